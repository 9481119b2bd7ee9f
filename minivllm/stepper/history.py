"""The state after any step in a moment: snapshots on the way, and replay from the nearest one.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from minivllm.stepper.state import RunState
from minivllm.stepper.steps import Walk

SNAPSHOT_EVERY = 1000


class History:
    """States of one run. What it answers depends on the step only, not on the way there."""

    def __init__(self, walk: Walk, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self._walk = walk
        self._every = snapshot_every
        # Entry n is the state before step n * snapshot_every.
        self._snapshots = [RunState.before(walk)]
        self._current = self._snapshots[0].copy()
        self._next = 0  # the first step that is not applied to _current

    def replay_length(self, index: int) -> int:
        """How many steps at(index) would have to apply."""
        nearest = min((index + 1) // self._every, len(self._snapshots) - 1) * self._every
        start = self._next if nearest <= self._next <= index + 1 else nearest
        return index + 1 - start

    def at(self, index: int) -> RunState:
        """The state after step `index`; -1 is the one before the first. The caller must not change it.

        It holds until the next call.
        """
        if not -1 <= index < len(self._walk):
            raise IndexError(f"step {index} of {len(self._walk)}")
        nearest = min((index + 1) // self._every, len(self._snapshots) - 1)
        if index + 1 < self._next or nearest * self._every > self._next:
            self._current = self._snapshots[nearest].copy()
            self._next = nearest * self._every
        while self._next <= index:
            self._current.apply(self._walk[self._next])
            self._next += 1
            if self._next == len(self._snapshots) * self._every:
                self._snapshots.append(self._current.copy())
        return self._current
