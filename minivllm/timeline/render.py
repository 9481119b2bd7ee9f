"""A View as Rich renderables: labels with their tree, bars, durations, axis, legend and sentences.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

from minivllm.timeline import text as words
from minivllm.timeline import theme
from minivllm.timeline.paint import paint_row
from minivllm.timeline.scale import TimeScale, idle_stretches, steady_stretches
from minivllm.timeline.theme import Glyphs
from minivllm.timeline.view import Kind, Row, View

MIN_WIDTH = 40
_MIN_BARS = 12
# A duration or a process id is never cut: "2 min 05 s", "pid 1234567".
_WHOLE_NOTE = 11
_KEPT_TAIL = 4
_ROOM = re.compile(r"^[a-z_]+\.(?=[a-z])")


class Timeline:
    """Draws one view at the width the console offers.

    Args:
        styled: colours and reverse video reach the reader (a terminal or an exported picture).
        exact: cells carry the exact edges of their bars, for a picture.
    """

    def __init__(
        self, view: View, glyphs: Glyphs = theme.UNICODE, styled: bool = True, exact: bool = False
    ) -> None:
        self.view = view
        self.glyphs = glyphs
        self.styled = styled
        self.exact = exact

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, glyphs = self.view, self.glyphs
        width = max(options.max_width, MIN_WIDTH)
        if view.title:
            yield Text(glyphs.spell(view.title), style="bold", overflow="fold")
        if view.rows:
            yield from self._chart(width)
            yield from self._legend(width)
        for sentence in view.explanation:
            yield _bullet(glyphs.spell(sentence), glyphs.bullet)
        for sentence in view.missing:
            yield _bullet(glyphs.spell(sentence), "!", Style(color=theme.ERROR))

    def _chart(self, width: int) -> Iterable[RenderableType]:
        view, glyphs = self.view, self.glyphs
        labels = _tree_labels(view.rows, glyphs)
        notes = [glyphs.spell(_note(row)) for row in view.rows]
        note_width = max(map(cell_len, notes), default=0)
        # Labels may take up to 40 % of the line; what is left is for the bars.
        note_width = min(note_width, max(_WHOLE_NOTE, width // 5))
        label_width = min(
            max(cell_len(t) + cell_len(r.label) for t, r in zip(labels, view.rows, strict=True)),
            width * 2 // 5,
            width - note_width - 2 - _MIN_BARS,
        )
        bars = width - label_width - note_width - 2
        cuts: list[tuple[int, int]] = []
        if view.shorten:
            find = idle_stretches if view.shorten == "idle" else steady_stretches
            cuts = find(_busy(view.rows), view.start_ns, view.end_ns)
        scale = TimeScale(view.start_ns, view.end_ns, bars, view.zero_ns, cuts)
        unit_ns, unit = words.unit_for(max(view.end_ns - view.zero_ns, view.zero_ns - view.start_ns, 1))
        ticks = scale.ticks(unit_ns)
        faint = Style(color=theme.FAINT)
        yield _axis_labels(ticks, bars, label_width, glyphs.spell(unit), faint)
        axis = [glyphs.axis] * bars
        for column, _ in ticks:
            axis[column] = glyphs.axis_tick
        for piece in scale.shortened:
            axis[min(round(piece.start_col) + 1, bars - 1)] = glyphs.gap
        yield Text(" " * (label_width + 1) + "".join(axis), style=faint, no_wrap=True, overflow="crop")
        grid = [column for column, _ in ticks]
        for tree, row, note in zip(labels, view.rows, notes, strict=True):
            line = Text(no_wrap=True, overflow="crop")
            line.append(tree, faint)
            line.append_text(_label(row, label_width - cell_len(tree), glyphs))
            line.append(" ")
            line.append_text(paint_row(row, scale, glyphs, self.styled, grid, self.exact))
            line.append(" ")
            line.append(_fit(note, note_width, glyphs.ellipsis, right=True), _note_style(row))
            yield line
        if scale.shortened:
            total = sum(p.end_ns - p.start_ns for p in scale.shortened)
            many = len(scale.shortened)
            what = "nothing was recorded" if view.shorten == "idle" else "nothing begins or ends"
            text = (
                f"{glyphs.gap} {words.count(many, 'stretch', 'stretches')} in which {what} "
                f"({words.duration(total)}{' in all' if many > 1 else ''}) {'are' if many > 1 else 'is'} cut short"
            )
            yield Text(glyphs.spell(text), style=faint)

    def _legend(self, width: int) -> Iterable[RenderableType]:
        view, glyphs = self.view, self.glyphs
        kinds = {s.kind for row in view.rows for s in row.segments}
        symbols = {m.symbol for row in view.rows for m in row.marks}
        entries: list[tuple[str, Style | None, str]] = [
            (glyphs.legend, Style(color=theme.color(a.slot)), a.name) for a in view.actors()
        ]
        if Kind.WAIT in kinds:
            entries.append((glyphs.wait * 2, None, view.waiting))
        # One look for both: an end that never came is told by the row's note and its mark.
        bad = [
            word
            for kind, word in ((Kind.ERROR, "error"), (Kind.UNFINISHED, "never finished"))
            if kind in kinds
        ]
        if bad:
            entries.append((glyphs.error * 2, Style(color=theme.ERROR), " or ".join(bad)))
        meaning = {"start": "started", "ready": "READY", "died": "died", "ended": "process gone"}
        entries += [(glyphs.marks[s], None, meaning[s]) for s in meaning if s in symbols]
        # Laid out here, because Rich would break the line between a symbol and its word.
        line = Text(no_wrap=True, overflow="crop")
        for symbol, style, word in entries:
            if line.cell_len and line.cell_len + 4 + cell_len(symbol + word) > width:
                yield line
                line = Text(no_wrap=True, overflow="crop")
            line.append("   " if line.cell_len else "")
            line.append(symbol, style)
            line.append(" " + word, Style(color=theme.FAINT))
        yield line


def _busy(rows: Iterable[Row]) -> list[tuple[int, int]]:
    return [(s.start_ns, s.end_ns) for row in rows for s in row.segments] + [
        (m.at_ns, m.at_ns) for row in rows for m in row.marks
    ]


def _note(row: Row) -> str:
    if row.note or not row.segments:
        return row.note
    start, end = row.segments[0].start_ns, max(s.end_ns for s in row.segments)
    if start == end and row.segments[-1].kind is Kind.UNFINISHED:
        # Nothing is known of its process after the moment in which it began.
        return "never finished"
    return words.duration(end - min(start, *(s.start_ns for s in row.segments)))


def _note_style(row: Row) -> Style:
    bad = any(s.kind in (Kind.ERROR, Kind.UNFINISHED) for s in row.segments)
    return Style(color=theme.ERROR) if bad else Style()


def _label(row: Row, width: int, glyphs: Glyphs) -> Text:
    style = Style(color=theme.color(row.actor.slot), bold=True) if row.heading else Style()
    text = glyphs.spell(row.label)
    if cell_len(text) > width and not row.heading:
        # The room that a step belongs to can be guessed from the process; its own name cannot.
        text = _ROOM.sub("", text)
    head, _, tail = text.rpartition(" ")
    if cell_len(text) > width and tail[-1:].isdigit() and len(tail) <= _KEPT_TAIL < width // 2:
        # What tells a row from its neighbours is at the end: a rank, or how many spans share the row.
        return Text(_fit(head, width - len(tail) - 1, glyphs.ellipsis) + " " + tail, style=style)
    return Text(_fit(text, width, glyphs.ellipsis), style=style)


def _fit(text: str, width: int, ellipsis: str, right: bool = False) -> str:
    """`text` cut or filled to `width` cells."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return " " * (width - cell_len(text)) + text if right else set_cell_size(text, width)
    return set_cell_size(text, max(width - len(ellipsis), 0)) + ellipsis[:width]


def _tree_labels(rows: list[Row], glyphs: Glyphs) -> list[str]:
    """The guides in front of each label, from the depths of the rows that follow."""
    guides: list[str] = []
    # open_below[d]: a later row of depth d belongs to the same parent.
    open_below: dict[int, bool] = {}
    for row in reversed(rows):
        for depth in [d for d in open_below if d > row.depth]:
            del open_below[depth]
        prefix = ""
        for depth in range(1, row.depth):
            prefix += glyphs.trunk if open_below.get(depth) else "  "
        if row.depth:
            prefix += glyphs.branch if open_below.get(row.depth) else glyphs.last
        open_below[row.depth] = True
        guides.append(prefix)
    guides.reverse()
    return guides


def _axis_labels(ticks: list[tuple[int, str]], bars: int, label_width: int, unit: str, style: Style) -> Text:
    cells = [" "] * (bars + 1)
    for i, (column, label) in enumerate(ticks):
        if i == 0 or i == len(ticks) - 1:
            label += " " + unit
        start = min(column, bars - len(label))
        free = start >= 0 and all(c == " " for c in cells[max(start - 1, 0) : start + len(label)])
        if free:
            cells[start : start + len(label)] = list(label)
    return Text(" " * (label_width + 1) + "".join(cells).rstrip(), style=style, no_wrap=True, overflow="crop")


def _bullet(sentence: str, symbol: str, style: Style | None = None) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=1, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(symbol, style=style or Style(color=theme.FAINT)), Text(sentence))
    return grid
