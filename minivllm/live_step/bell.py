"""How other threads and signal handlers get the attention of the controller's thread.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations

import os


class Bell:
    """A pipe that wakes whoever waits at it.

    Attributes:
        descriptor: readable after release() or close(), until hush().
        released: everybody is to be let go.
        closed: the controller is to end.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        self.released = False
        self.closed = False

    def release(self) -> None:
        self.released = True
        self._ring()

    def close(self) -> None:
        self.released = self.closed = True
        self._ring()

    def _ring(self) -> None:
        try:
            os.write(self._writer, b"x")
        except BlockingIOError:
            pass  # it has been ringing for long

    def hush(self) -> None:
        try:
            os.read(self.descriptor, 4096)
        except BlockingIOError:
            pass
