"""One picture of one step: processes and queues on the left, the source on the right, the explanation below.

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
from minivllm.stepper.panels import left_panel, right_panel
from minivllm.stepper.steps import Walk
from minivllm.stepper.words import Words
from minivllm.timeline import theme

MIN_COLUMNS, MIN_ROWS = 50, 14
KEYS = "n next  p back  r this process  f failure  o over  u up  / search  t time  Enter all  ? help  q quit"
KEYS_SHORT = "n next  p back  r process  f failure  / search  t time  ? help  q quit"


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
        below: list[Text] = []
        for line in self.explainer.lines(index):
            below += wrap(line, columns)
        layout = Layout(columns, rows - (1 if keys else 0), len(below))
        left = left_panel(self, self.history.at(index), index, layout.left_columns, layout.body_rows)
        right = right_panel(self, index, layout.right_columns, layout.body_rows)
        lines = layout.put_together(headline(self.walk, self.words, index, columns), left, right, below)
        lines = self._fit(lines, columns, rows - (1 if keys else 0))
        if keys:
            text = message or (KEYS if len(KEYS) <= columns else KEYS_SHORT)
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
    """

    columns: int
    rows: int
    below_wanted: int

    @property
    def below_rows(self) -> int:
        return min(self.below_wanted, max(6, (self.rows - 3) * 2 // 5))

    @property
    def body_rows(self) -> int:
        return self.rows - 3 - self.below_rows

    @property
    def left_columns(self) -> int:
        return max(26, min(self.columns * 9 // 20, 64))

    @property
    def right_columns(self) -> int:
        return self.columns - self.left_columns - 3

    def put_together(self, head: Text, left: list[Text], right: list[Text], below: list[Text]) -> list[Text]:
        """The headline, two panels side by side, and what stands below them."""
        widths = self.left_columns, self.right_columns
        lines = [head, Text("─" * (widths[0] + 1) + "┬" + "─" * (widths[1] + 1), theme.FAINT)]
        bar = Text(" │ ", theme.FAINT)
        for row in range(self.body_rows):
            line = Text()
            for part, width in ((left, widths[0]), (right, widths[1])):
                cell = part[row].copy() if row < len(part) else Text()
                cell.truncate(width, overflow="crop", pad=True)
                line.append_text(cell)
                if part is left:
                    line.append_text(bar)
            lines.append(line)
        lines.append(Text("─" * (widths[0] + 1) + "┴" + "─" * (widths[1] + 1), theme.FAINT))
        return lines + below[: self.below_rows]


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


def fit(lines: Iterable[Text], columns: int, rows: int, encoding: str) -> list[Text]:
    """Exactly `rows` lines of at most `columns` cells."""
    fitted = [spell(line, encoding) for line in lines][:rows]
    for line in fitted:
        line.truncate(columns, overflow="crop")
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
