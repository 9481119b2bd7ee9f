"""One picture of one step: processes and queues on the left, the source on the right, the explanation below.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import io
from collections.abc import Iterable

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
        explanation = self.explainer.lines(index)
        below: list[Text] = []
        for line in explanation:
            below += wrap(line, columns)
        below_rows = min(len(below), max(6, (rows - 4) * 2 // 5))
        body_rows = rows - 3 - below_rows - (1 if keys else 0)
        # The explanation may have room to spare, or the body need less than there is.
        left_columns = max(26, min(columns * 9 // 20, 64))
        right_columns = columns - left_columns - 3
        state = self.history.at(index)
        left = left_panel(self, state, index, left_columns, body_rows)
        right = right_panel(self, index, right_columns, body_rows)
        lines = [headline(self.walk, self.words, index, columns)]
        lines.append(Text("─" * (left_columns + 1) + "┬" + "─" * (right_columns + 1), theme.FAINT))
        bar = Text(" │ ", theme.FAINT)
        for row in range(body_rows):
            line = Text()
            for part, width in ((left, left_columns), (right, right_columns)):
                cell = part[row].copy() if row < len(part) else Text()
                cell.truncate(width, overflow="crop", pad=True)
                line.append_text(cell)
                if part is left:
                    line.append_text(bar)
            lines.append(line)
        lines.append(Text("─" * (left_columns + 1) + "┴" + "─" * (right_columns + 1), theme.FAINT))
        lines += below[:below_rows]
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
        fitted = [self.spell(line) for line in lines][:rows]
        for line in fitted:
            line.truncate(columns, overflow="crop")
        return fitted + [Text()] * (rows - len(fitted))

    def spell(self, text: Text) -> Text:
        """The same in characters that the terminal can show."""
        if self.glyphs is theme.UNICODE:
            return text
        plain = text.plain
        for drawn, replacement in (("─", "-"), ("│", "|"), ("┬", "+"), ("┴", "+"), ("━", "#")):
            plain = plain.replace(drawn, replacement)
        plain = self.glyphs.spell(plain).encode(self.encoding, "replace").decode(self.encoding)
        # Styles stay where lengths do, which is what nearly all replacements keep.
        same_length = len(plain) == len(text.plain)
        return Text(plain, spans=text.spans if same_length else [], style=text.style)


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
