"""The time axis: nanoseconds to columns, ticks with round numbers, long idle stretches shortened.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

# A stretch must take this share of the axis before shortening it makes anything else more legible.
_WORTH_CUTTING = 0.2
_CUT_COLUMNS = 4
_MIN_TICK_COLUMNS = 9


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the axis with one rate: `[start_ns, end_ns)` lies on `[start_col, end_col)`."""

    start_ns: float
    end_ns: float
    start_col: float
    end_col: float
    shortened: bool = False


class TimeScale:
    """Maps times to columns `0 … width`, linear except where stretches were cut short.

    Without cuts the axis is widened a little, so that its ticks lie at whole columns: they are then evenly spaced,
    and a picture can draw them exactly where the bars' times are.
    """

    def __init__(
        self,
        start_ns: float,
        end_ns: float,
        width: int,
        zero_ns: float = 0,
        cuts: Iterable[tuple[int, int]] = (),
    ) -> None:
        end_ns = max(end_ns, start_ns + 1)
        total = end_ns - start_ns
        gaps = [
            (max(a, start_ns), min(b, end_ns))
            for a, b in sorted(cuts)
            if min(b, end_ns) - max(a, start_ns) > _WORTH_CUTTING * total
        ]
        if len(gaps) * _CUT_COLUMNS > width // 2:
            gaps = []
        if not gaps:
            start_ns, end_ns = _aligned(start_ns, end_ns, width, zero_ns)
            total = end_ns - start_ns
        self.start_ns, self.end_ns, self.width, self.zero_ns = start_ns, end_ns, width, zero_ns
        rate = (width - _CUT_COLUMNS * len(gaps)) / max(total - sum(b - a for a, b in gaps), 1)
        self.pieces: list[Piece] = []
        at_ns, at_col = start_ns, 0.0
        for a, b in [*gaps, (end_ns, end_ns)]:
            if a > at_ns:
                self.pieces.append(Piece(at_ns, a, at_col, at_col + (a - at_ns) * rate))
                at_col += (a - at_ns) * rate
            if b > a:
                self.pieces.append(Piece(a, b, at_col, at_col + _CUT_COLUMNS, shortened=True))
                at_col += _CUT_COLUMNS
            at_ns = b
        self.ns_per_column = 1 / rate
        self._starts = [p.start_ns for p in self.pieces]

    @property
    def shortened(self) -> list[Piece]:
        return [p for p in self.pieces if p.shortened]

    def column(self, at_ns: float) -> float:
        """The column of a time; times outside the axis land on its nearer end."""
        if at_ns <= self.start_ns:
            return 0.0
        if at_ns >= self.end_ns:
            return float(self.width)
        piece = self.pieces[bisect_right(self._starts, at_ns) - 1]
        share = (at_ns - piece.start_ns) / (piece.end_ns - piece.start_ns)
        return piece.start_col + share * (piece.end_col - piece.start_col)

    def ticks(self, unit_ns: int) -> list[tuple[int, str]]:
        """Columns and labels of round times, counted from `zero_ns` in `unit_ns`."""
        step_ns = _round_step(self.ns_per_column * (_MIN_TICK_COLUMNS - 1e-6))
        decimals = 0
        while decimals < 9 and step_ns * 10**decimals % unit_ns:
            decimals += 1
        ticks: list[tuple[int, str]] = []
        for piece in self.pieces:
            if piece.shortened:
                continue
            n = math.ceil((piece.start_ns - self.zero_ns) / step_ns - 1e-6)
            while (at_ns := self.zero_ns + n * step_ns) <= piece.end_ns:
                # A tick at a whole column must not fall into the cell before it by a rounding error.
                column = int(self.column(at_ns) + 1e-6)
                if column < self.width and (not ticks or column - ticks[-1][0] >= _MIN_TICK_COLUMNS - 1):
                    ticks.append((column, f"{n * step_ns / unit_ns + 0.0:.{decimals}f}"))
                n += 1
        return ticks


def _aligned(start_ns: float, end_ns: float, width: int, zero_ns: float) -> tuple[float, float]:
    """The narrowest axis around `[start_ns, end_ns)` that has whole columns at `zero_ns` and at each tick."""
    step_ns = _round_step((end_ns - start_ns) / width * _MIN_TICK_COLUMNS)
    for columns in range(int(step_ns * width / (end_ns - start_ns)), _MIN_TICK_COLUMNS // 2, -1):
        per_column = step_ns / columns
        start = zero_ns + math.floor((start_ns - zero_ns) / per_column + 1e-9) * per_column
        if start + width * per_column >= end_ns - 1e-6:
            return start, start + width * per_column
    return start_ns, end_ns


def _round_step(at_least: float) -> int:
    """The smallest of 1, 2, 5, 10, … nanoseconds times a power of ten that is not below `at_least`."""
    power = 1
    while power * 10 <= at_least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= at_least * (1 - 1e-9))


def steady_stretches(
    spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int, margin_share: float = 0.02
) -> list[tuple[int, int]]:
    """The long stretches in which nothing begins or ends, without a margin at either side."""
    margin = round((end_ns - start_ns) * margin_share)
    moments = sorted({start_ns, end_ns, *(t for span in spans for t in span if start_ns <= t <= end_ns)})
    return [(a + margin, b - margin) for a, b in pairwise(moments) if b - a > 2 * margin]


def idle_stretches(busy: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> list[tuple[int, int]]:
    """The stretches of `[start_ns, end_ns)` that none of `busy` covers."""
    idle: list[tuple[int, int]] = []
    at = start_ns
    for a, b in sorted(busy):
        if a > at:
            idle.append((at, min(a, end_ns)))
        at = max(at, b)
    if at < end_ns:
        idle.append((at, end_ns))
    return idle
