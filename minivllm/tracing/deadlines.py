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

_standing: Callable[[], float] | None = None
_stood_s = 0.0  # under controllers that are gone


def deadline_clock() -> float:
    """Seconds since some moment, without those in which a process of a live step-through was standing."""
    now = monotonic() - _stood_s
    return now if _standing is None else now - _standing()


def stand_still_for(standing: Callable[[], float] | None) -> None:
    """From now on take off what this function says: how long somebody has been standing so far. None: nothing."""
    global _standing, _stood_s
    if _standing is not None:
        # In this order the clock is set back for a moment, and no deadline passes too early.
        _stood_s += _standing()
    _standing = standing


class Patience:
    """A limit of time on this clock."""

    __slots__ = ("_end",)

    def __init__(self, limit_s: float) -> None:
        self._end = deadline_clock() + limit_s

    def left(self) -> float:
        """Seconds; none or less when the time is up."""
        return self._end - deadline_clock()
