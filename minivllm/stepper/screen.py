"""One picture of one step: processes and queues, the source beside them if there is room, the explanation below.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.style import Style
from rich.text import Text

from minivllm.stepper.explain import Explainer, headline
from minivllm.stepper.history import History
from minivllm.stepper.panels import left_panel, right_panel, source_line
from minivllm.stepper.steps import Walk
from minivllm.stepper.words import Words
from minivllm.timeline import theme

MIN_COLUMNS, MIN_ROWS = 50, 14
# From this width on the source stands beside the state; below it the state needs the whole width.
_SIDE_BY_SIDE = 88
# As many as fit, the most needed first.
_KEYS = (
    *("? help", "q quit", "n next", "p back", "f failure", "o over", "u up", "Enter all", "r this process"),
    *("/ search", "t time", "l level"),
)


class Screen:
    """Draws steps of one run.

    Attributes:
        walk, history, words, explainer: what the parts of the picture are made from.
        glyphs: the characters that the terminal can show.
    """

    def __init__(self, walk: Walk, encoding: str | None) -> None:
        self.walk = walk
        self.history = History(walk)
        self.words = Words(walk.run)
        self.glyphs = theme.glyphs_for(encoding)
        self.encoding = encoding or "ascii"
        self.explainer = Explainer(walk, self.history, self.words)

    def picture(
        self, index: int, columns: int, rows: int, message: str = "", keys: bool = True
    ) -> list[Text]:
        """Exactly `rows` lines of at most `columns` cells.

        Args:
            message: shown in the last line instead of the keys.
            keys: whether there is a last line for keys and messages.
        """
        if columns < MIN_COLUMNS or rows < MIN_ROWS:
            lines = [Text(f"{columns}x{rows} is too small: {MIN_COLUMNS}x{MIN_ROWS} at least")]
            return self._fit(lines, columns, rows)
        side_by_side = columns >= _SIDE_BY_SIDE
        explanation = self.explainer.lines(index, place=None if side_by_side else source_line(self, index))
        below = [part for line in explanation for part in wrap(self.spell(line), columns)]
        layout = Layout(columns, rows - (1 if keys else 0), len(below), side_by_side)
        left = left_panel(self, self.history.at(index), index, layout.left_columns, layout.body_rows)
        right = right_panel(self, index, layout.right_columns, layout.body_rows) if side_by_side else []
        head = headline(self.walk, self.words, index, columns)
        lines = layout.put_together(head, left, right, below, self.encoding)
        lines = self._fit(lines, columns, rows - (1 if keys else 0))
        if keys:
            text = message or _keys(columns)
            lines += self._fit(
                [Text(text, Style(reverse=True) if message else Style(color=theme.FAINT))], columns, 1
            )
        return lines

    def everything(self, index: int, columns: int) -> list[Text]:
        """All there is to say about a step, however many lines it takes."""
        state = self.history.at(index)
        lines = [headline(self.walk, self.words, index, columns), Text()]
        for line in self.explainer.lines(index, full=True):
            lines += wrap(line, columns)
        lines.append(Text())
        lines += left_panel(self, state, index, columns, 1000)
        lines.append(Text())
        lines += right_panel(self, index, columns, 40)
        return self._fit(lines, columns, len(lines))

    def _fit(self, lines: Iterable[Text], columns: int, rows: int) -> list[Text]:
        return fit(lines, columns, rows, self.encoding)

    def spell(self, text: Text) -> Text:
        """The same in characters that the terminal can show."""
        return spell(text, self.encoding)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a picture go.

    Attributes:
        below_wanted: how many lines the explanation has.
        side_by_side: two panels; otherwise the left one has the whole width.
    """

    columns: int
    rows: int
    below_wanted: int
    side_by_side: bool = True

    @property
    def below_rows(self) -> int:
        return min(self.below_wanted, max(6, (self.rows - 3) * 2 // 5))

    @property
    def body_rows(self) -> int:
        return self.rows - 3 - self.below_rows

    @property
    def left_columns(self) -> int:
        return max(26, min(self.columns // 2, 64)) if self.side_by_side else self.columns

    @property
    def right_columns(self) -> int:
        return self.columns - self.left_columns - 3

    def put_together(
        self, head: Text, left: list[Text], right: list[Text], below: list[Text], encoding: str = "utf-8"
    ) -> list[Text]:
        """The headline, the panels, and what stands below them.

        Args:
            encoding: of the terminal; what it cannot show is replaced before anything is measured.
        """
        if not self.side_by_side:
            rule = Text("─" * self.columns, theme.FAINT)
            body = [cut(spell(line, encoding), self.columns, encoding) for line in left[: self.body_rows]]
            body += [Text()] * (self.body_rows - len(body))
            return [head, rule, *body, rule.copy(), *self._first_below(below, encoding)]
        widths = self.left_columns, self.right_columns
        lines = [head, Text("─" * (widths[0] + 1) + "┬" + "─" * (widths[1] + 1), theme.FAINT)]
        bar = Text(" │ ", theme.FAINT)
        for row in range(self.body_rows):
            line = Text()
            for part, width in ((left, widths[0]), (right, widths[1])):
                cell = spell(part[row], encoding).copy() if row < len(part) else Text()
                if part is left:
                    cell = cut(cell, width, encoding)
                cell.truncate(width, overflow="crop", pad=True)
                line.append_text(cell)
                if part is left:
                    line.append_text(bar)
            lines.append(line)
        lines.append(Text("─" * (widths[0] + 1) + "┴" + "─" * (widths[1] + 1), theme.FAINT))
        return lines + self._first_below(below, encoding)

    def _first_below(self, below: list[Text], encoding: str) -> list[Text]:
        shown = below[: self.below_rows]
        if len(below) > len(shown):
            mark = theme.glyphs_for(encoding).ellipsis
            shown[-1] = shown[-1].copy()
            shown[-1].truncate(self.columns - len(mark) - 1, overflow="crop")
            shown[-1].append(f" {mark}")
        return shown


def spell(text: Text, encoding: str) -> Text:
    """A line in characters that a terminal of this encoding can show."""
    glyphs = theme.glyphs_for(encoding)
    if glyphs is theme.UNICODE:
        return text
    plain = text.plain
    for drawn, replacement in (("─", "-"), ("│", "|"), ("┬", "+"), ("┴", "+"), ("━", "#")):
        plain = plain.replace(drawn, replacement)
    plain = glyphs.spell(plain).encode(encoding, "replace").decode(encoding)
    # Styles stay where lengths do, which is what nearly all replacements keep.
    same_length = len(plain) == len(text.plain)
    return Text(plain, spans=text.spans if same_length else [], style=text.style)


def cut(text: Text, columns: int, encoding: str) -> Text:
    """At most `columns` cells, with a mark at the end where something is missing."""
    if text.cell_len <= columns:
        return text
    mark = theme.glyphs_for(encoding).ellipsis
    shorter = text.copy()
    shorter.truncate(columns - len(mark), overflow="crop")
    return shorter.append(mark)


def _keys(columns: int) -> str:
    shown = _KEYS[0]
    for key in _KEYS[1:]:
        if len(shown) + 2 + len(key) > columns:
            break
        shown += "  " + key
    return shown


def fit(lines: Iterable[Text], columns: int, rows: int, encoding: str) -> list[Text]:
    """Exactly `rows` lines of at most `columns` cells."""
    fitted = [spell(line, encoding) for line in lines][:rows]
    fitted = [cut(line, columns, encoding) for line in fitted]
    return fitted + [Text()] * (rows - len(fitted))


def wrap(text: Text, columns: int) -> list[Text]:
    """A line broken at spaces; continuation lines are indented like the first."""
    indent = len(text.plain) - len(text.plain.lstrip(" "))
    if text.cell_len <= columns:
        return [text]
    body = text[indent:]
    lines = list(body.wrap(_measure, max(10, columns - indent)))
    for line in lines:
        line.rstrip()
        line.pad_left(indent)
    return lines


_measure = Console(file=io.StringIO(), width=80)
