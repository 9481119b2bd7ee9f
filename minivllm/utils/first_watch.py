"""The first thing that a started process does: watch the one that started it, before it imports what it is to run.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.4.7

A process that is started by spawn finds its function by importing its module, and all that this imports. A parent that is killed
meanwhile would be missed only afterwards. So nothing is imported here that takes long.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any


class ParentWatch:
    """A thread that sees the parent die.

    Attributes:
        on_death: called then, in that thread. As long as nothing else is set, the process ends on the spot: it has not made
            anything yet that would have to be removed.
    """

    def __init__(self, parent_pid: int, death_reader: Connection, thread_name: str) -> None:
        """death_reader: EOF when the parent is gone."""
        self.on_death: Callable[[], object] = _end
        self._watched: list[Any] = [death_reader]
        # Any other child that the parent forks holds the write end open, too; a pidfd does not care.
        if sys.platform == "linux":
            try:
                self._watched.append(os.pidfd_open(parent_pid))
            except OSError:
                # An old kernel, or the parent is gone already: then the pipe has to do.
                pass
        threading.Thread(target=self._watch, name=thread_name, daemon=True).start()

    def _watch(self) -> None:
        wait(self._watched)
        self.on_death()


class Later:
    """An object whose pickle is read only when somebody asks for the object."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._pickle = b""

    def __reduce__(self) -> tuple[Callable[[bytes], Later], tuple[bytes]]:
        # Pipes can be pickled only while a process is started, which is when this is called.
        return _later, (bytes(ForkingPickler.dumps(self._value)),)

    def get(self) -> Any:
        return pickle.loads(self._pickle) if self._pickle else self._value


def run_watched(parent_pid: int, death_reader: Connection, thread_name: str, rest: Later) -> None:
    """Body of a process: `rest` holds a function and its arguments, and the function gets the watch behind them."""
    watch = ParentWatch(parent_pid, death_reader, thread_name)
    function, args = rest.get()
    function(*args, watch)


def _later(pickled: bytes) -> Later:
    later = Later(None)
    later._pickle = pickled
    return later


def _end() -> None:
    os._exit(1)
