"""Every call has a number, every answer carries it, and what does not match is dropped.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor.collective_rpc, WorkerProc.worker_busy_loop)
Articles: part 2 §2.3.7, §2.4.13, §4.2
"""

import itertools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def worker_loop(connection: Connection, methods: dict[str, Callable[..., Any]]) -> None:
    """In a worker: execute calls one after the other until the connection is closed."""
    while True:
        try:
            number, method, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (number, "ok", methods[method](*args))
        except Exception as error:
            answer = (number, "failed", str(error))
        connection.send(answer)


class Executor:
    """Calls methods on all workers."""

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections
        self.numbers = itertools.count(1)

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), timeout: float | None = None
    ) -> list[Any]:
        """Run `method` on all workers and return their answers by rank.

        Raises:
            RuntimeError: the method failed on some rank; the text is the worker's.
            TimeoutError: not all ranks have answered after `timeout` seconds; the text names those that have not ("rank 1").
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        number = next(self.numbers)
        for connection in self.connections:
            connection.send((number, method, args))
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < len(self.connections):
            missing = [rank for rank in range(len(self.connections)) if rank not in answers]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([self.connections[rank] for rank in missing], left)
            if not ready:
                names = ", ".join(f"rank {rank}" for rank in missing)
                raise TimeoutError(f"{method}: no answer after {timeout} s from {names}")
            for rank in missing:
                if self.connections[rank] in ready:
                    answered, status, value = self.connections[rank].recv()
                    # An older number: the answer to a call that somebody has given up.
                    if answered == number:
                        answers[rank] = (status, value)
        for rank, (status, value) in sorted(answers.items()):
            if status == "failed":
                raise RuntimeError(f"rank {rank}: {value}")
        return [answers[rank][1] for rank in sorted(answers)]
