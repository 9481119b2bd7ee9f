"""Ends of message queues in other processes, for tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minivllm.distributed.shm_broadcast import Handle, MessageQueue

SPAWN = multiprocessing.get_context("spawn")


def make_queue(n_reader: int = 1, **kwargs: Any) -> tuple[MessageQueue, list[MessageQueue]]:
    """A writer and its readers, all in this process, ready."""
    writer = MessageQueue(n_reader, n_reader, **kwargs)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(n_reader)]
    writer.wait_until_ready(5)
    for reader in readers:
        reader.wait_until_ready(5)
    return writer, readers


@contextmanager
def queue(n_reader: int = 1, **kwargs: Any) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    writer, readers = make_queue(n_reader, **kwargs)
    try:
        yield writer, readers
    finally:
        for end in (writer, *readers):
            end.shutdown()


class Peer:
    """A reader in a process of its own: runs `body(queue, conn, *args)` and is ended with the test."""

    def __init__(
        self, handle: Handle, rank: int, body: Callable[..., None], *args: Any, method: str = "spawn"
    ) -> None:
        context = multiprocessing.get_context(method)
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(handle, rank, theirs, body, args), daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid
        assert self.pid is not None

    def receive(self, limit_s: float = 20.0) -> Any:
        assert self.conn.poll(limit_s), f"nothing came from the reader, exit code {self.process.exitcode}"
        return self.conn.recv()

    def join(self, limit_s: float = 10.0) -> int | None:
        self.process.join(limit_s)
        code = self.process.exitcode
        self.conn.close()
        self.process.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)

    def end(self) -> None:
        self.kill()
        self.conn.close()
        self.process.close()


def _run(handle: Handle, rank: int, conn: Any, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    queue = MessageQueue.create_from_handle(handle, rank)
    queue.wait_until_ready(20)
    body(queue, conn, *args)
    queue.shutdown()


def cpu_seconds(pid: int | str = "self") -> float:
    """CPU time that a process has used, user and system."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bool(np.array_equal(a, b))
        )
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


class FailsToLoad:
    """Pickles, but cannot be unpickled."""

    def __init__(self, size: int = 0) -> None:
        self.filling = b"x" * size

    def __reduce__(self) -> Any:
        return (_explode, (self.filling,))


def _explode(filling: bytes) -> None:
    raise RuntimeError("cannot be built here")
