"""The step-through in the terminal: keys to steps, a line to type into, pages of text.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from minivllm.exceptions import ConfigError
from minivllm.stepper import panels
from minivllm.stepper.positions import find_position
from minivllm.stepper.screen import Screen
from minivllm.stepper.terminal import RESIZED, Terminal
from minivllm.trace_store import Process
from minivllm.tracing.spec import LEVEL_NAMES, LIFECYCLE, MESSAGE

# Replaying so many steps takes long enough to wonder.
_WORTH_SAYING = 20_000

HELP = """\
n, right, space   next step              p, left    previous step
page down, up     ten steps on, back     g, G       first, last step
r, R              next, previous step of this (the marked) process
0 … 9             next step of the worker with this rank
e, c              next step of EngineCore, of the client
o                 over: from the begin of a span to its end, and back
u                 up: to the begin of the span around this one
f, F              next, previous failure or failpoint
/                 search names, processes, attributes, errors
                  (an empty text repeats the last search)
t                 go to a time (1.5s, +20ms), number or name (rpc.call#7)
l                 all steps, only rpc and lifecycle, only lifecycle
enter             everything about this step: attributes, traceback, queues
q                 quit

Why is a rank late? f goes to what went wrong or was held up. When nothing
was, look for a process that waits: it says for whom, and what that one does.

One step is one recorded event: a span begins, ends or notes something.
The picture shows the state right after it. "It will take" looks ahead:
the trace knows how long each span was going to last.

Rings have one letter per slot: . never written, w being written,
W written and unread, r read by some, o read by all.
Flags such as 1 01: the written flag, then one for each reader.
Processes: {marks}
"""


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
        self._message = ""
        self._searched = ""
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
            rank = int(key)
            self._go(
                self.walk.find(self.index, lambda step: step.span.process.rank == rank),
                f"no later step of rank {rank}",
            )
        elif key.isprintable() and len(key) == 1:
            self._message = f"{key} does nothing; ? lists the keys"

    # --- moving

    def _go(self, index: int | None, otherwise: str) -> None:
        if index is None:
            self._message = otherwise
        else:
            self.index = index

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

    def _search(self) -> None:
        text = self._ask("search: ")
        if text is None:
            return
        self._searched = text or self._searched
        if self._searched:
            self._go(self.walk.search(self._searched, self.index), f"{self._searched!r} is in no later step")

    def _jump(self) -> None:
        text = self._ask("time (1.5s, +20ms), step number or name: ")
        if text:
            try:
                self.index = find_position(self.walk, text, self.index)
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
        from minivllm.stepper.screen import wrap

        text = HELP.format(marks=panels.legend(self.screen.glyphs))
        self._page(
            lambda columns: [
                self.screen.spell(part) for line in text.splitlines() for part in wrap(Text(line), columns)
            ]
        )

    def _show_everything(self) -> None:
        self._page(lambda columns: self.screen.everything(self.index, columns))


def make_console() -> Console:
    """A console that styles for the terminal; Rich looks at NO_COLOR and TERM itself."""
    return Console(
        width=80,
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
    )
