"""The time axis: nanoseconds to columns, ticks with round numbers, long idle stretches shortened.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

# An idle stretch must take this share of the axis before shortening it makes anything else more legible.
_IDLE_SHARE = 0.2
_GAP_COLUMNS = 3
_MIN_TICK_COLUMNS = 9


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the axis with one rate: `[start_ns, end_ns)` lies on `[start_col, end_col)`."""

    start_ns: int
    end_ns: int
    start_col: float
    end_col: float
    shortened: bool = False


class TimeScale:
    """Maps times to columns `0 … width`, linear except where idle stretches were cut short."""

    def __init__(self, start_ns: int, end_ns: int, width: int, idle: Iterable[tuple[int, int]] = ()) -> None:
        self.start_ns = start_ns
        self.end_ns = max(end_ns, start_ns + 1)
        self.width = width
        total = self.end_ns - start_ns
        gaps = [
            (max(a, start_ns), min(b, self.end_ns))
            for a, b in sorted(idle)
            if min(b, self.end_ns) - max(a, start_ns) > _IDLE_SHARE * total
        ]
        if len(gaps) * _GAP_COLUMNS > width // 2:
            gaps = []
        kept_ns = total - sum(b - a for a, b in gaps)
        rate = (width - _GAP_COLUMNS * len(gaps)) / max(kept_ns, 1)
        self.pieces: list[Piece] = []
        at_ns, at_col = start_ns, 0.0
        for a, b in [*gaps, (self.end_ns, self.end_ns)]:
            if a > at_ns:
                self.pieces.append(Piece(at_ns, a, at_col, at_col + (a - at_ns) * rate))
                at_col += (a - at_ns) * rate
            if b > a:
                self.pieces.append(Piece(a, b, at_col, at_col + _GAP_COLUMNS, shortened=True))
                at_col += _GAP_COLUMNS
            at_ns = b
        self.ns_per_column = 1 / rate if rate else float(total)
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

    def ticks(self, zero_ns: int, unit_ns: int) -> list[tuple[int, str]]:
        """Columns and labels of round times, counted from `zero_ns` in `unit_ns`."""
        step_units = _round_step(self.ns_per_column * _MIN_TICK_COLUMNS / unit_ns)
        step_ns = step_units * unit_ns
        decimals = 0
        while decimals < 9 and abs(step_units * 10**decimals - round(step_units * 10**decimals)) > 1e-9:
            decimals += 1
        ticks: list[tuple[int, str]] = []
        for piece in self.pieces:
            if piece.shortened:
                continue
            n = -(-(piece.start_ns - zero_ns) // step_ns)
            while zero_ns + n * step_ns <= piece.end_ns:
                column = int(self.column(zero_ns + n * step_ns))
                if column < self.width and (not ticks or column - ticks[-1][0] >= _MIN_TICK_COLUMNS - 1):
                    ticks.append((column, f"{n * step_units + 0.0:.{decimals}f}"))
                n += 1
        return ticks


def _round_step(at_least: float) -> float:
    """The smallest of 1, 2, 5, 10, … times a power of ten that is not below `at_least`."""
    power = 10.0**-9
    while power * 10 <= at_least:
        power *= 10
    for factor in (1, 2, 5, 10):
        if power * factor >= at_least * (1 - 1e-9):
            return power * factor
    return power * 10


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
