"""Bars in eighths of a column: the segments of one row as styled cells.

vLLM 0.25.1: no counterpart
Articles: –

A cell has eight sub-cells. A filling that starts at the left edge is a block glyph in the bar's colour; one
that ends at the right edge is the complementary glyph in reverse video, which needs a terminal (or a
picture). Plain text falls back to the two right-aligned blocks that Unicode has.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from minivllm.timeline import theme
from minivllm.timeline.scale import TimeScale
from minivllm.timeline.theme import Glyphs
from minivllm.timeline.view import Kind, Row

_SUB = 8


def paint_row(row: Row, scale: TimeScale, glyphs: Glyphs, styled: bool, grid: Sequence[int] = ()) -> Text:
    """The bar area of a row, `scale.width` cells wide.

    Args:
        styled: the output keeps reverse video (a terminal or an exported picture).
        grid: columns of the axis' ticks, drawn faintly where the row is empty.
    """
    width = scale.width
    # 0 is empty; n > 0 is segment n - 1. Later segments lie on top of earlier ones.
    sub = [0] * (width * _SUB)
    for index, segment in enumerate(row.segments, start=1):
        if segment.end_ns < scale.start_ns or segment.start_ns > scale.end_ns:
            continue
        first = min(int(scale.column(segment.start_ns) * _SUB), len(sub) - 1)
        last = max(first + 1, round(scale.column(segment.end_ns) * _SUB))
        for i in range(first, min(last, len(sub))):
            sub[i] = index
    base = theme.color(row.actor.slot)
    cells: list[tuple[str, Style | None]] = []
    for column in range(width):
        cells.append(_cell(sub[column * _SUB : (column + 1) * _SUB], row, base, glyphs, styled))
    faint = Style(color=theme.FAINT, dim=True)
    if styled:
        for column in grid:
            if cells[column][0] == " ":
                cells[column] = (glyphs.grid, faint)
    for piece in scale.shortened:
        middle = min(int(piece.start_col) + 1, width - 1)
        if cells[middle][0] in (" ", glyphs.grid):
            cells[middle] = (glyphs.gap, faint)
    for mark in row.marks:
        if scale.start_ns <= mark.at_ns <= scale.end_ns:
            column = min(int(scale.column(mark.at_ns)), width - 1)
            shade = theme.ERROR if mark.symbol == "died" else base
            cells[column] = (glyphs.marks[mark.symbol], Style(color=shade, bold=True))
    text = Text(no_wrap=True)
    run, run_style = "", None
    for character, style in cells:
        if style is not run_style and run:
            text.append(run, run_style)
            run = ""
        run, run_style = run + character, style
    text.append(run, run_style)
    return text


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
