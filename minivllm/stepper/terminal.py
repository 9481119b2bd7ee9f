"""The terminal as the step-through needs it: one key at a time, a screen of its own, told when its size changes.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from minivllm.exceptions import ConfigError

RESIZED: Final = "resized"
# What terminals send for keys that are no characters.
_SEQUENCES: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1bOH": "home",
    "\x1bOF": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
    "\x04": "end of input",
    "": "end of input",
}
# A signal (a new size, say) that comes just before a wait begins does not interrupt it; its handler runs after it.
_LOOK_FOR_SIGNALS_S: Final = 0.25
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"


def check_terminal(instead: str = "`minivllm step DIR --print` prints the steps instead") -> None:
    """Refuse where keys cannot be read or the cursor cannot be moved.

    Args:
        instead: what the reader can do without a terminal.

    Raises:
        ConfigError: says what to do instead.
    """
    for stream, name in ((sys.stdin, "standard input"), (sys.stdout, "standard output")):
        if not stream.isatty():
            raise ConfigError(f"{name} is not a terminal; {instead}")
    if os.environ.get("TERM", "dumb") == "dumb":
        raise ConfigError(f"this terminal (TERM=dumb) cannot move its cursor; {instead}")


class Terminal:
    """The terminal while the step-through has it; `open()` gives it back whatever happens."""

    def __init__(self, output: int | None = None) -> None:
        """output: a descriptor of the terminal, where standard output is no longer one."""
        self._fd = sys.stdin.fileno()
        self._output = sys.stdout.fileno() if output is None else output
        self._encoding = sys.stdout.encoding or "ascii"
        self._pending = b""
        self._resize_reader, self._resize_writer = os.pipe()
        os.set_blocking(self._resize_writer, False)
        self._saved: Any = None

    @contextmanager
    def open(self) -> Iterator[None]:
        before = {
            signal.SIGWINCH: signal.signal(signal.SIGWINCH, self._on_resize),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._on_stop),
        }
        try:
            self._take()
            yield
        finally:
            self._give_back()
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._resize_reader)
            os.close(self._resize_writer)

    def _take(self) -> None:
        self._saved = termios.tcgetattr(self._fd)
        # Keys at once and without echo; Ctrl-C and Ctrl-Z still send their signals.
        tty.setcbreak(self._fd)
        self.write(_ENTER)

    def _give_back(self) -> None:
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        try:
            self.write(_LEAVE)
            termios.tcsetattr(self._fd, termios.TCSADRAIN, saved)
        except (OSError, termios.error):
            pass  # the terminal is gone

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        try:
            os.write(self._resize_writer, b"x")
        except OSError:
            pass  # many resizes are pending already

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: leave a sane terminal to the shell, and draw everything again afterwards."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()
        self._on_resize(number, frame)

    @property
    def size(self) -> tuple[int, int]:
        """(columns, rows); COLUMNS and LINES do not count, since they do not follow a resize."""
        try:
            size = os.get_terminal_size(self._output)
        except OSError:
            size = shutil.get_terminal_size()
        # A pseudo-terminal that nobody has given a size says 0.
        return size.columns or 80, size.lines or 24

    def write(self, text: str) -> None:
        sys.stdout.flush()
        data = text.encode(self._encoding, "replace")
        while data:
            data = data[os.write(self._output, data) :]

    def draw(self, lines: list[str]) -> None:
        """Replace what is on the screen by these lines."""
        body = "\r\n".join(f"{line}\x1b[0m\x1b[K" for line in lines)
        self.write(f"\x1b[H{body}\x1b[J")

    def write_at(self, row: int, text: str) -> None:
        """Replace one line of the screen, counted from 1."""
        self.write(f"\x1b[{row};1H{text}\x1b[K")

    @property
    def descriptors(self) -> list[int]:
        """What to wait for besides other things; when one of them is readable, key() returns at once."""
        return [self._fd, self._resize_reader]

    @property
    def has_more_keys(self) -> bool:
        """Whether a key has been read that key() has not returned."""
        return bool(self._pending)

    def key(self) -> str:
        """The next key: a character, one of the names above, or RESIZED."""
        while not self._pending:
            ready, _, _ = select.select(self.descriptors, [], [], _LOOK_FOR_SIGNALS_S)
            if not ready:
                continue
            if self._resize_reader in ready:
                os.read(self._resize_reader, 4096)
                return RESIZED
            try:
                self._pending = os.read(self._fd, 1024)
            except OSError:
                return "end of input"  # the terminal is gone
            if not self._pending:
                return "end of input"
        return self._take_key()

    def _take_key(self) -> str:
        """One key out of what was typed so far; a pasted text is many."""
        data = self._pending
        if data[:1] == b"\x1b" and len(data) > 1:
            length = 2
            if data[1:2] in b"[O":
                length = 3
                while length < len(data) and not 0x40 <= data[length - 1] <= 0x7E:
                    length += 1
        else:
            # A UTF-8 character says in its first byte how long it is.
            first = data[0]
            length = 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        self._pending = data[length:]
        text = data[:length].decode("utf-8", "replace")
        return _SEQUENCES.get(text, text)
