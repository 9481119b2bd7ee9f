"""The live step-through at the terminal: keys that let processes go.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from minivllm.live_step.bell import Bell
from minivllm.live_step.picture import picture
from minivllm.live_step.processes import Processes
from minivllm.live_step.server import Peer, Server
from minivllm.stepper import panels
from minivllm.stepper.screen import wrap
from minivllm.stepper.terminal import RESIZED, Terminal
from minivllm.timeline import theme

_REFRESH_S = 0.5

HELP = """\
n, right, space   one step of the process that has been standing longest
0 … 9             one step of the worker with this rank
e, c              one step of EngineCore, of the client
a                 one step of everybody who stands
r                 the marked process runs on and stops nowhere any more
g                 go: all processes run on
s                 stop again: everybody stops at the next step
tab, up, down     mark another process, to look at it
q, Ctrl-C         quit: end the run and all its processes

The processes are running: what you see is the present. Each stops before
each step of level lifecycle; between them it runs freely. "In" a step means
that it was let into it and has not come to the next one: it works there, or
waits for somebody who is standing.

While anybody stands, no deadline of the engine runs.
Processes: {marks}
"""


class App:
    """For the thread that has the terminal.

    Attributes:
        marked: the process whose step is explained.
    """

    def __init__(
        self,
        server: Server,
        bell: Bell,
        terminal: Terminal,
        console: Console,
        encoding: str,
        output: Callable[[], str],
        quit_run: Callable[[], None],
        processes: Processes,
    ) -> None:
        """
        Args:
            output: the last line that the run has printed.
            quit_run: ends the run; returns at once.
            processes: those that the run has, or will have.
        """
        self.server = server
        self.terminal = terminal
        self._bell = bell
        self.marked: Peer | None = None
        self._console = console
        self._encoding = encoding
        self._output = output
        self._quit_run = quit_run
        self._processes = processes
        self._message = ""
        self._helps = False
        self._is_over = False

    def run(self) -> None:
        """Until the bell is closed."""
        shown: list[str] = []
        while not self._bell.closed:
            if self._bell.released and not self._is_over:
                self._let_all_go()
            shown = self._draw(shown)
            keys = [] if self._is_over else self.terminal.descriptors
            ready = self.server.wait(_REFRESH_S, [self._bell.descriptor, *keys])
            self._bell.hush()
            has_key = any(descriptor in ready for descriptor in keys)
            while has_key and not self._is_over:
                self._press(self.terminal.key())
                has_key = self.terminal.has_more_keys

    def _press(self, key: str) -> None:
        if key == RESIZED:
            return
        self._message = ""
        if self._helps:
            self._helps = False
        elif key in ("n", "right", " "):
            standing = self.server.halted()
            if standing:
                self.marked = standing[0][0]
                self.server.go(*standing[0])
            else:
                self._message = "nobody is standing: the run goes on by itself"
        elif key.isdigit() and len(key) == 1:
            self._step(f"rank{key}")
        elif key in ("e", "c"):
            self._step("engine" if key == "e" else "client")
        elif key == "a":
            for peer, halt in self.server.halted():
                self.server.go(peer, halt)
        elif key == "r" and self.marked is not None:
            self.server.set_free(self.marked, True)
            self._message = f"{self.marked.name} runs on; s makes everybody stop again"
        elif key == "g":
            self.server.set_all_free(True)
            self._message = "all run on; s makes everybody stop again at the next step"
        elif key == "s":
            self.server.set_all_free(False)
            self._message = "everybody stops at the next step"
        elif key in ("\t", "down", "up"):
            self._mark_another(-1 if key == "up" else 1)
        elif key in ("?", "h"):
            self._helps = True
        elif key in ("q", "end of input"):
            self.quit()
        elif len(key) == 1 and key.isprintable():
            self._message = f"{key} does nothing; ? lists the keys"

    def quit(self) -> None:
        """Let everybody go, and have the run end."""
        self._let_all_go()
        self._quit_run()

    def _let_all_go(self) -> None:
        self._message = "ending the run …"
        self._is_over = True
        self.server.set_all_free(True)

    def _step(self, who: str) -> None:
        found = self.server.find(who)
        if not found:
            self._message = self._processes.lack(who) or f"there is no {who} now"
            return
        self.marked = found[-1]
        halt = self.marked.first_halt
        if halt is not None:
            self.server.go(self.marked, halt)
        else:
            self._message = f"{self.marked.name} is not standing; it is on its way or waits"

    def _mark_another(self, by: int) -> None:
        peers = self.server.in_order
        if peers:
            index = peers.index(self.marked) if self.marked in peers else -by
            self.marked = peers[(index + by) % len(peers)]

    def _draw(self, shown: list[str]) -> list[str]:
        """Draw unless it is the same picture; returns the picture."""
        if self.marked is None or self.marked.ended:
            standing = self.server.halted()
            self.marked = standing[0][0] if standing else self.marked
        columns, rows = self.terminal.size
        if self._helps:
            lines = [part for line in self._help_lines() for part in wrap(line, columns)][: rows - 1]
            lines += [Text()] * (rows - 1 - len(lines)) + [Text("any key returns", "reverse")]
        else:
            lines = picture(
                self.server,
                self.marked,
                self._encoding,
                columns,
                rows,
                self._message,
                self._output(),
            )
        drawn = self._encode(lines, columns)
        if drawn != shown:
            self.terminal.draw(drawn)
        return drawn

    def _help_lines(self) -> list[Text]:
        marks = panels.legend(theme.glyphs_for(self._encoding))
        return [Text(line) for line in HELP.format(marks=marks).splitlines()]

    def _encode(self, lines: list[Text], columns: int) -> list[str]:
        self._console.width = columns
        with self._console.capture() as capture:
            for line in lines:
                self._console.print(line, no_wrap=True, overflow="crop", crop=True)
        return capture.get().split("\n")[: len(lines)]
