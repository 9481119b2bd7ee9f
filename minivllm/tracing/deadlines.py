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

# What time.monotonic() comes to on the clock of the step-through, and seconds that it stood under earlier ones. Replaced as
# a whole: a deadline that is set at that moment would otherwise be off by all of them.
_stood: tuple[Callable[[float], float] | None, float] = None, 0.0


def deadline_clock() -> float:
    """Seconds since some moment, without those in which a process of a live step-through was standing."""
    clock, stood_s = _stood
    now = monotonic()
    return (now if clock is None else clock(now)) - stood_s


def stand_still_for(clock: Callable[[float], float] | None) -> None:
    """From now on ask this function what a moment is without the time in which somebody was standing. None: nobody is."""
    global _stood
    before, stood_s = _stood
    if before is not None:
        now = monotonic()
        stood_s += now - before(now)
    _stood = clock, stood_s


class Patience:
    """A limit of time on this clock."""

    __slots__ = ("_end",)

    def __init__(self, limit_s: float) -> None:
        self._end = deadline_clock() + limit_s

    def left(self) -> float:
        """Seconds; none or less when the time is up."""
        return self._end - deadline_clock()
