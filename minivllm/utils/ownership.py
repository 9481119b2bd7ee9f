"""Which process an object with children, sockets or shared memory belongs to: a forked copy of it must not be used.

vLLM 0.25.1: none (an LLM that is used in a forked child waits for ever)
Articles: –

A copy shares the other end of every socket and ring with the original: what it sends is answered to whoever reads first, and
its locks may have been copied while somebody held them.
"""

from __future__ import annotations

import multiprocessing.process
import os
import weakref
from multiprocessing.process import BaseProcess

# How many forks lie between this process and the first one that imported this module. An object is a copy when it was
# made at another number, which costs less to find out than asking for the process id.
generation = 0


_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def remain_the_parents(process: BaseProcess) -> None:
    """Have a forked child leave this process alone: when it exits, multiprocessing would end or join it as its own."""
    _started.add(process)


class Owner:
    """The process in which an object was made.

    To be asked where it costs nothing: `if owner.generation != ownership.generation: raise …(owner.refusal("engine"))`.
    """

    __slots__ = ("generation", "pid")

    def __init__(self) -> None:
        self.generation = generation
        self.pid = os.getpid()

    def refusal(self, what: str) -> str:
        """Why this process cannot use it, and what to do."""
        return (
            f"this {what} belongs to process {self.pid}, and process {os.getpid()} was forked from it and has only a "
            f"copy, which cannot be used: use it in process {self.pid}, or make a new one here"
        )


def _after_fork_in_child() -> None:
    global generation
    generation += 1
    children: set[BaseProcess] = getattr(multiprocessing.process, "_children", set())
    children.difference_update(_started)
    _started.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
