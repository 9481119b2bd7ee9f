"""The clock that all deadlines are on: it stands still while a reader keeps some process of the run standing.

vLLM 0.25.1: none
Articles: part 2 §2.3.7

A deadline of the engine, the executor or a queue is `deadline_clock() + limit`, and is compared with `deadline_clock()`.
Nobody can sleep until a moment of this clock, so a wait that ends in the kernel is looked at again before it counts.
What must go on however long a reader takes (looking for dead processes, polling) stays on `time.monotonic`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

# The controller's count of the seconds in which somebody has been standing, and those under controllers that are gone.
# Replaced as a whole: a deadline that is set at that moment would otherwise be off by all of them.
_stood: tuple[Callable[[], float] | None, float] = None, 0.0


def deadline_clock() -> float:
    """Seconds since some moment, without those in which a process of a live step-through was standing."""
    standing, stood_s = _stood
    now = monotonic() - stood_s
    return now if standing is None else now - standing()


def stand_still_for(standing: Callable[[], float] | None) -> None:
    """From now on take off what this function says: how long somebody has been standing so far. None: nothing."""
    global _stood
    before, stood_s = _stood
    _stood = standing, stood_s + (before() if before is not None else 0.0)


class Patience:
    """A limit of time on this clock."""

    __slots__ = ("_end",)

    def __init__(self, limit_s: float) -> None:
        self._end = deadline_clock() + limit_s

    def left(self) -> float:
        """Seconds; none or less when the time is up."""
        return self._end - deadline_clock()
