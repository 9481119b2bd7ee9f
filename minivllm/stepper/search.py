"""What the screen says about each step, to be searched in.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.stepper.screen import Screen

# The state between two of these is put into words at once: forwards, since that is how states follow each other.
_CHUNK = 1000


class StepWords:
    """The sentence about each step and the states that it changed, as they are afterwards; made when asked for."""

    def __init__(self, screen: Screen, tell: Callable[[int], None]) -> None:
        """
        Args:
            tell: called with a step's index from time to time, since this may take seconds in a long run.
        """
        self._screen = screen
        self._tell = tell
        self._chunks: dict[int, list[str]] = {}

    def of(self, index: int) -> str:
        number = index // _CHUNK
        if number not in self._chunks:
            self._tell(index)
            length = len(self._screen.walk)
            self._chunks[number] = [
                self._words(i) for i in range(number * _CHUNK, min((number + 1) * _CHUNK, length))
            ]
        return self._chunks[number][index % _CHUNK]

    def _words(self, index: int) -> str:
        screen = self._screen
        step = screen.walk[index]
        rank = step.span.process.rank
        return "\n".join(
            (
                screen.explainer.event(step).plain,
                "" if rank is None else f"rank {rank}",
                *screen.explainer.failpoint(step),
                *(f"{what}: {after}" for what, _, after in screen.explainer.changes(index)),
            )
        )
