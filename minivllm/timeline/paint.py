"""Bars in eighths of a column: the segments of one row as styled cells.

vLLM 0.25.1: no counterpart
Articles: –

A cell has eight sub-cells. A filling that starts at the left edge is a block glyph in the bar's colour; one
that ends at the right edge is the complementary glyph in reverse video, which needs a terminal (or a
picture). Plain text falls back to the two right-aligned blocks that Unicode has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from minivllm.timeline import theme
from minivllm.timeline.scale import TimeScale
from minivllm.timeline.theme import Glyphs
from minivllm.timeline.view import Kind, Row

_SUB = 8


Piece = tuple[float, float, str, float]
"""Part of a cell: left and right edge in cells, colour, opacity. Carried in a style's meta under PIECES."""
PIECES = "pieces"
WAIT_OPACITY = 0.32


def paint_row(
    row: Row, scale: TimeScale, glyphs: Glyphs, styled: bool, grid: Sequence[int] = (), exact: bool = False
) -> Text:
    """The bar area of a row, `scale.width` cells wide.

    Args:
        styled: the output keeps reverse video (a terminal or an exported picture).
        grid: columns of the axis' ticks, drawn faintly where the row is empty.
        exact: the style of each cell carries its bars as PIECES, for a picture that can draw them exactly.
    """
    width = scale.width
    base = theme.color(row.actor.slot)
    sub = _sub_cells(row, scale)
    cells = [_cell(sub[c * _SUB : (c + 1) * _SUB], row, base, glyphs, styled) for c in range(width)]
    faint = Style(color=theme.FAINT, dim=True)
    if styled:
        for column in grid:
            if cells[column][0] == " ":
                cells[column] = (glyphs.grid, faint)
    for mark in row.marks:
        if scale.start_ns <= mark.at_ns <= scale.end_ns:
            column = min(int(scale.column(mark.at_ns)), width - 1)
            shade = theme.ERROR if mark.symbol == "died" else base
            cells[column] = (glyphs.marks[mark.symbol], Style(color=shade, bold=True))
    if exact:
        for column, pieces in _exact_pieces(row, scale, base).items():
            character, style = cells[column]
            cells[column] = (character, (style or Style()) + Style(meta={PIECES: pieces}))
    for piece in scale.shortened:
        middle = min(round(piece.start_col) + 1, width - 1)
        empty = cells[middle][0] in (" ", glyphs.grid)
        cells[middle] = (glyphs.gap, faint if empty else Style(color=base))
    text = Text(no_wrap=True)
    run, run_style = "", None
    for character, style in cells:
        if style is not run_style and run:
            text.append(run, run_style)
            run = ""
        run, run_style = run + character, style
    text.append(run, run_style)
    return text


def _sub_cells(row: Row, scale: TimeScale) -> list[int]:
    """What each eighth of a cell shows: 0 for nothing, n for segment n - 1. Later segments lie on top."""
    sub = [0] * (scale.width * _SUB)
    for index, segment in enumerate(row.segments, start=1):
        if segment.end_ns < scale.start_ns or segment.start_ns > scale.end_ns:
            continue
        first = min(int(scale.column(segment.start_ns) * _SUB), len(sub) - 1)
        last = max(first + 1, round(scale.column(segment.end_ns) * _SUB))
        for i in range(first, min(last, len(sub))):
            sub[i] = index
    return sub


def _exact_pieces(row: Row, scale: TimeScale, base: str) -> dict[int, tuple[Piece, ...]]:
    """Column -> the parts of segments that lie in it; nothing is thinner than an eighth of a cell."""
    pieces: dict[int, tuple[Piece, ...]] = {}
    for segment in row.segments:
        if segment.end_ns < scale.start_ns or segment.start_ns > scale.end_ns:
            continue
        left = min(scale.column(segment.start_ns), scale.width - 1 / _SUB)
        right = max(scale.column(segment.end_ns), left + 1 / _SUB)
        color = theme.ERROR if segment.kind in (Kind.ERROR, Kind.UNFINISHED) else base
        opacity = WAIT_OPACITY if segment.kind is Kind.WAIT else 1.0
        for column in range(int(left), min(math.ceil(right), scale.width)):
            piece = (max(left, column) - column, min(right, column + 1) - column, color, opacity)
            pieces[column] = (*pieces.get(column, ()), piece)
    return pieces


_styles: dict[tuple[str, str | None, bool], Style] = {}


def _style(color: str, background: str | None = None, reverse: bool = False) -> Style:
    key = (color, background, reverse)
    if key not in _styles:
        _styles[key] = Style(color=color, bgcolor=background, reverse=reverse or None)
    return _styles[key]


def _cell(sub: list[int], row: Row, base: str, glyphs: Glyphs, styled: bool) -> tuple[str, Style | None]:
    present = set(sub)
    if present == {0}:
        return " ", None

    def kind(index: int) -> Kind:
        return row.segments[index - 1].kind

    def color(index: int) -> str:
        return theme.ERROR if kind(index) in (Kind.ERROR, Kind.UNFINISHED) else base

    solid = [i for i in present if i and kind(i) is not Kind.WAIT]
    if not solid:
        return glyphs.wait, _style(base)
    main = max(solid, key=sub.count)
    amount = sub.count(main)
    full = glyphs.error if kind(main) in (Kind.ERROR, Kind.UNFINISHED) else glyphs.eighths[_SUB]
    if amount == _SUB:
        return full, _style(color(main))
    starts_left, ends_right = sub[0] == main, sub[-1] == main
    if ends_right and not starts_left:
        if styled and glyphs.eighths[4] != glyphs.eighths[8]:
            left = sub[0]
            behind = color(left) if left and kind(left) is not Kind.WAIT else None
            if behind is not None and behind != color(main):
                return glyphs.eighths[_SUB - amount], _style(behind, color(main))
            return glyphs.eighths[_SUB - amount], _style(color(main), reverse=True)
        if amount >= 6:
            return full, _style(color(main))
        return (glyphs.right_half if amount >= 3 else glyphs.right_eighth), _style(color(main))
    character = glyphs.eighths[amount]
    # The ASCII set has no thin bars: whatever is there must still be seen.
    return (character if character != " " else full), _style(color(main))
