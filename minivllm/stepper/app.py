"""The step-through in the terminal: keys to steps, a line to type into, pages of text.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from minivllm.exceptions import ConfigError
from minivllm.stepper.help import help_lines
from minivllm.stepper.positions import find_position, hidden_remark, remark
from minivllm.stepper.screen import Screen
from minivllm.stepper.search import StepWords
from minivllm.stepper.steps import Step
from minivllm.stepper.terminal import RESIZED, Terminal
from minivllm.timeline import text as words
from minivllm.trace_store import Process
from minivllm.tracing.spec import LEVEL_NAMES, LIFECYCLE, MESSAGE

# Replaying so many steps takes long enough to wonder.
_WORTH_SAYING = 20_000


class App:
    """One session at the terminal.

    Attributes:
        index: the step that is shown.
    """

    def __init__(self, screen: Screen, terminal: Terminal, console: Console, index: int) -> None:
        self.screen = screen
        self.walk = screen.walk
        self.terminal = terminal
        self.console = console
        self.index = index
        missing = "; ".join(self.walk.store.warnings)
        self._message = f"warning: {missing}" if missing else ""
        self._searched = ""
        self._step_words = StepWords(screen, self._tell_progress)
        self._done = False
        walk = self.walk
        self._keys: dict[str, Callable[[], None]] = {
            "q": self._quit,
            "end of input": self._quit,
            "g": lambda: self._go(walk.find(-1, lambda step: True), ""),
            "G": lambda: self._go(walk.find(len(walk), lambda step: True, False), ""),
            "r": lambda: self._go(walk.next_of(self._process, self.index), "no later step of this process"),
            "R": lambda: self._go(
                walk.next_of(self._process, self.index, False), "no earlier step of this process"
            ),
            "f": lambda: self._go(walk.next_failure(self.index), "no failure from here on"),
            "F": lambda: self._go(walk.next_failure(self.index, False), "no failure before this step"),
            "o": lambda: self._go(walk.other_end(self.index), "the other end is not in the trace"),
            "u": lambda: self._go(walk.parent(self.index), "this span has no parent in the trace"),
            "e": lambda: self._go_to_role("engine_core"),
            "c": lambda: self._go_to_role("client"),
            "/": self._search,
            "\\": lambda: self._search(False),
            "t": self._jump,
            "l": self._change_level,
            "enter": self._show_everything,
            "?": self._help,
            "h": self._help,
            "page down": lambda: self._move(10),
            "page up": lambda: self._move(-10),
        }
        for key in ("n", "right", "down", " ", "j"):
            self._keys[key] = lambda: self._move(1)
        for key in ("p", "left", "up", "backspace", "k"):
            self._keys[key] = lambda: self._move(-1)
        self._keys["home"], self._keys["end"] = self._keys["g"], self._keys["G"]

    @property
    def _process(self) -> Process:
        return self.walk[self.index].span.process

    def run(self) -> None:
        """Until the reader quits."""
        with self.terminal.open():
            while not self._done:
                self._draw()
                self._press(self.terminal.key())

    def _press(self, key: str) -> None:
        if key == RESIZED:
            return
        self._message = ""
        if key in self._keys:
            self._keys[key]()
        elif key.isdigit():
            self._go_to_rank(int(key))
        else:
            self._message = f"{_name_of(key)} does nothing; ? lists the keys"

    # --- moving

    def _go(self, index: int | None, otherwise: str) -> None:
        if index is None:
            self._message = otherwise
        else:
            self.index = index
            self._message = self._hidden

    @property
    def _hidden(self) -> str:
        said = hidden_remark(self.walk, self.index)
        return f"{said}; l shows more levels" if said else ""

    def _move(self, by: int) -> None:
        for _ in range(abs(by)):
            index = self.walk.find(self.index, lambda step: True, by > 0)
            if index is None:
                self._message = "this is the last step" if by > 0 else "this is the first step"
                return
            self.index = index

    def _go_to_role(self, role: str) -> None:
        found = self.walk.find(self.index, lambda step: step.span.process.role == role)
        self._go(found, f"no later step of {role}")

    def _go_to_rank(self, rank: int) -> None:
        known = [p.rank for p in self.walk.store.processes() if p.role == "worker" and p.rank is not None]
        if rank in known:
            found = self.walk.find(self.index, lambda step: step.span.process.rank == rank)
            self._go(found, f"no later step of rank {rank}")
        else:
            have = words.ranks(known) if known else "no workers"
            self._message = f"there is no rank {rank}; the run has {have}"

    def _search(self, forward: bool = True) -> None:
        text = self._ask("search: " if forward else "search backward: ")
        if text is None:
            return
        self._searched = wanted = text or self._searched
        if not wanted:
            return

        def said(step: Step) -> str:
            return self._step_words.of(step.index)

        found = self.walk.search(wanted, self.index, forward, said)
        if found is not None:
            self._go(found, "")
            return
        found = self.walk.search(wanted, -1 if forward else len(self.walk), forward, said)
        if found is None:
            self._message = f"{wanted!r} is in no step: no name, process, attribute, error or change of state"
        elif found == self.index:
            self._message = f"{wanted!r} is in no other step"
        else:
            self.index = found
            self._message = (
                "after the last step: from the first again"
                if forward
                else "before the first: from the last again"
            )

    def _jump(self) -> None:
        text = self._ask("time (1.5s, +20ms), step number or name: ")
        if text:
            try:
                before = self.index
                self.index = find_position(self.walk, text, before)
                self._message = remark(self.walk, text, before) or self._hidden
            except ConfigError as error:
                self._message = str(error)

    def _change_level(self) -> None:
        walk = self.walk
        walk.details = walk.details - 1 if walk.details > LIFECYCLE else MESSAGE
        below = [name for number, name in enumerate(LEVEL_NAMES) if LIFECYCLE <= number <= walk.details]
        self._message = (
            "all steps" if walk.details == MESSAGE else f"only steps of level {' and '.join(below)}"
        )

    def _quit(self) -> None:
        self._done = True

    # --- drawing

    def _draw(self, bottom: str | None = None) -> None:
        columns, rows = self.terminal.size
        message = self._message if bottom is None else bottom
        length = self.screen.history.replay_length(self.index)
        if length > _WORTH_SAYING:
            self.terminal.write_at(rows, self.screen.spell(Text(f"replaying {length:,} steps …")).plain)
        self.terminal.draw(self._encode(self.screen.picture(self.index, columns, rows, message), columns))

    def _tell_progress(self, index: int) -> None:
        text = self.screen.spell(Text(f"searching step {index + 1:,} …"))
        self.terminal.write_at(self.terminal.size[1], text.plain)

    def _encode(self, lines: list[Text], columns: int) -> list[str]:
        self.console.width = columns
        with self.console.capture() as capture:
            for line in lines:
                self.console.print(line, no_wrap=True, overflow="crop", crop=True)
        return capture.get().split("\n")[: len(lines)]

    def _ask(self, prompt: str) -> str | None:
        """A line of text typed at the bottom; None when the reader pressed Escape."""
        typed = ""
        while True:
            self._draw(f"{prompt}{typed}_")
            key = self.terminal.key()
            if key == "enter":
                return typed.strip()
            if key in ("escape", "end of input"):
                return None
            if key == "backspace":
                typed = typed[:-1]
            elif len(key) == 1 and key.isprintable():
                typed += key

    def _page(self, make: Callable[[int], list[Text]]) -> None:
        """Show a text of any length; arrows scroll, any other key returns."""
        top = 0
        while True:
            columns, rows = self.terminal.size
            lines = make(columns)
            room = max(1, rows - 1)
            top = max(0, min(top, len(lines) - room))
            shown = lines[top : top + room]
            more = (
                f"lines {top + 1} to {top + len(shown)} of {len(lines)}; arrows scroll, "
                if len(lines) > room
                else ""
            )
            bottom = Text(f"{more}any other key returns", "reverse")
            self.terminal.draw(
                self._encode([*shown, *[Text()] * (room - len(shown)), self.screen.spell(bottom)], columns)
            )
            key = self.terminal.key()
            steps = {"down": 1, "up": -1, "j": 1, "k": -1, "page down": room, "page up": -room, " ": room}
            if key in steps:
                top += steps[key]
            elif key == "home":
                top = 0
            elif key == "end":
                top = len(lines)
            elif key != RESIZED:
                if key == "end of input":
                    self._done = True
                return

    def _help(self) -> None:
        self._page(
            lambda columns: [self.screen.spell(line) for line in help_lines(columns, self.screen.glyphs)]
        )

    def _show_everything(self) -> None:
        self._page(lambda columns: self.screen.everything(self.index, columns))


def _name_of(key: str) -> str:
    """A key as its label says it; keys that send a sequence of their own have no name here."""
    if len(key) == 1 and not key.isprintable():
        return {"\t": "Tab"}.get(key, f"Ctrl-{chr(ord(key) + 64)}" if ord(key) < 27 else "this key")
    return "this key" if key.startswith("\x1b") else key


def make_console() -> Console:
    """A console that styles for the terminal; Rich looks at NO_COLOR and TERM itself."""
    return Console(
        width=80,
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
    )
