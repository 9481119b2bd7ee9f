"""What a run prints while the screen belongs to the step-through: kept, and printed when the screen is given back.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations

import os
import sys
import tempfile

_TAIL_BYTES = 400
_BLOCK_BYTES = 1 << 16


class KeptOutput:
    """Standard output and error of this process, and of those it starts, go into a file without a name.

    Attributes:
        terminal: a descriptor of what standard output was before.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives until restore()
        _flush()
        self.terminal = os.dup(1)
        self._error = os.dup(2)
        os.dup2(self._file.fileno(), 1)
        os.dup2(self._file.fileno(), 2)

    def last_line(self) -> str:
        """The last line that was printed; "" when there is none."""
        size = os.fstat(self._file.fileno()).st_size
        tail = os.pread(self._file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = tail.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def restore(self) -> None:
        """Give both back, and print what has come."""
        _flush()
        os.dup2(self.terminal, 1)
        os.dup2(self._error, 2)
        os.close(self.terminal)
        os.close(self._error)
        position = 0
        try:
            while block := os.pread(self._file.fileno(), _BLOCK_BYTES, position):
                position += os.write(1, block)
        except OSError:
            pass  # the terminal is gone
        self._file.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
