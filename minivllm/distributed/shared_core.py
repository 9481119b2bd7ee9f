"""Leaving a core that two processes share while they wait for each other by turns.

vLLM 0.25.1: no counterpart
Articles: none

Two processes of which one always waits for the other never run at the same time, and so the scheduler sees no harm in
having both on one core, where each message costs two switches between them. Where a virtual machine does not say which
cores share a cache, Linux wakes nobody elsewhere, and they stay there for seconds beside a core that has nothing to do. Seen
with Linux 6.18 on two cores, in every third run: a round trip of 10.5 µs in place of 3.2.

Whoever polls notices: its yields are taken up, and for how long. Then it moves, without asking where there is room,
since that takes longer than to try. With more busy processes than cores that helps nobody, so the next attempt comes
four times as late, up to a second; who has been alone since then may try at once. The kernel parts two that share a
core, too, where it can, often in the same moment; so it is looked once more before a move.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable
from typing import Final

_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 1.0
_ALONE_S: Final = 0.005  # without a yield that somebody took up
_ASKING_S: Final = 0.001  # company that computes takes a slice of 3 ms each time it is asked, and what is waited for may be there

current_core: Callable[[], int] | None = None
"""The core that the calling thread is on; None where nobody can tell, or change it."""
if hasattr(os, "sched_setaffinity"):
    current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)


class SharedCore:
    """What this process has seen of others on its core.

    Attributes:
        moves: how often a thread of this process has left its core.
    """

    __slots__ = ("_company", "_enough_s", "_last", "_lost_s", "_pause_s", "_try_at", "moves")

    def __init__(self, company: Callable[[], bool]) -> None:
        """company: yields, and says whether somebody took that up."""
        self._company = company
        self._enough_s = _some()
        self._lost_s = 0.0
        self._last = self._try_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self.moves = 0

    def taken_up(self, now: float, seconds: float, most: int) -> int:
        """Somebody else ran on this core for so many seconds when the calling thread yielded; now: time.monotonic().

        Returns how often it yielded here, to look once more before it moves: at most `most` times, since each yield counts against
        the caller in the scheduler's books.
        """
        if now - seconds - self._last > _ALONE_S:
            self._lost_s, self._try_at, self._pause_s = 0.0, 0.0, _FIRST_PAUSE_S
        self._last = now
        self._lost_s += seconds
        if self._lost_s < self._enough_s or now < self._try_at or most < 1:
            return 0
        self._lost_s, self._enough_s = 0.0, _some()
        looks = 0
        if _may_leave():
            # By now the kernel may have parted the two, or the other one has left, and a move would bring them together again.
            # Of two who ask at once, the one that asks less often leaves, and the other one notices.
            enough = time.monotonic() + _ASKING_S
            for looks in range(1, min(random.randint(1, 4), most) + 1):
                if not self._company():
                    return looks
                if time.monotonic() > enough:
                    break
        self._pause_s = min(4 * self._pause_s, _LONGEST_PAUSE_S)
        self._try_at = now + self._pause_s * random.uniform(1, 2)
        self._move()
        return looks

    def _move(self) -> None:
        if current_core is None:
            return
        try:
            allowed = os.sched_getaffinity(0)
            elsewhere = allowed - {current_core()}
            if not elsewhere:
                return
            try:
                os.sched_setaffinity(0, elsewhere)
            finally:
                os.sched_setaffinity(0, allowed)  # where it may run later is not for a queue to say
            self.moves += 1
        except OSError:
            self._enough_s = float("inf")  # a container that does not let us


def _may_leave() -> bool:
    """Whether there is another core for this process, which may be held on one of several."""
    try:
        return current_core is not None and len(os.sched_getaffinity(0)) > 1
    except OSError:
        return False


def _some() -> float:
    # At random, since the other one sees the same: both at once would meet again on the next core.
    return random.uniform(100e-6, 400e-6)
