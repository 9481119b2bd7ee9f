"""A command of minivllm in a pseudo-terminal: what it shows, and keys for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence

import pytest

LIMIT_S = 60.0
_HOME = b"\x1b[H"
_FRAME_END = b"\x1b[J"  # clears what is below the frame


class Session:
    """A Python process at a terminal of a given size."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], columns: int = 80, rows: int = 24
    ) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                time.sleep(0.1)  # the parent sets the size first
                os.execve(sys.executable, [sys.executable, *arguments], dict(environment))
            finally:
                os._exit(127)
        self.resize(columns, rows)
        self.shown = b""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def screen(self) -> str:
        """What is to be seen now: everything since the last return to the upper left corner."""
        return self._readable(self.shown.rpartition(_HOME)[2])

    @staticmethod
    def _readable(shown: bytes) -> str:
        text = shown.decode("utf-8", "replace")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")

    def press(self, keys: str, until: str) -> str:
        """Type, and read until the screen shows a text."""
        self.shown = b""
        os.write(self.fd, keys.encode())
        return self.wait_for(until)

    def press_last(self, keys: str) -> None:
        """Type what ends the run, perhaps before there is another frame."""
        self.shown = b""
        os.write(self.fd, keys.encode())

    def wait_for(self, text: str) -> str:
        """Read until the screen shows a text, or the process has ended after it did."""
        deadline = time.monotonic() + LIMIT_S
        begun = max(self.shown.rfind(_HOME), 0)
        while not (re.search(text, self.screen) and self.shown.endswith(_FRAME_END)):
            assert time.monotonic() < deadline, f"{text!r} did not appear in:\n{self.screen}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.fd, 65536)
                except OSError as error:
                    for frame in reversed(self.shown[begun:].split(_HOME)):
                        before, ended, _ = frame.rpartition(_FRAME_END)
                        if ended and re.search(text, found := self._readable(before)):
                            return found
                    raise AssertionError(
                        f"it ended ({error}) before {text!r}, with:\n{self.screen}"
                    ) from None
        return self.screen

    def settle(self, quiet_s: float = 0.06) -> str:
        """Read until nothing has come for a moment."""
        while select.select([self.fd], [], [], quiet_s)[0]:
            self.shown += os.read(self.fd, 65536)
        return self.screen

    def end(self) -> int:
        """Exit code; reads what is left."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                if select.select([self.fd], [], [], 0.1)[0]:
                    self.shown += os.read(self.fd, 65536)
            except OSError:
                pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                # What it has said between the last read and its end is still in the terminal.
                with contextlib.suppress(OSError):
                    while select.select([self.fd], [], [], 0)[0] and (rest := os.read(self.fd, 65536)):
                        self.shown += rest
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, 9)
                os.waitpid(self.pid, 0)
                pytest.fail(f"still running:\n{self.screen}")
