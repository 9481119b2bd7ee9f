"""Add a response timeout without stale answers.

`collective_rpc` runs a method on all workers and returns their answers by rank. Somebody has added a `timeout`. Since then
it happens that a call returns what an earlier one had asked for.

Change both sides, the executor and the worker's loop, so that a result is that of its own call, and that the limit is
one for the whole call.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor.collective_rpc, WorkerProc.worker_busy_loop)
Articles: part 2 §2.3.7, §2.4.13, §4.2
"""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def worker_loop(connection: Connection, methods: dict[str, Callable[..., Any]]) -> None:
    """In a worker: execute calls one after the other until the connection is closed."""
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            answer = ("ok", methods[method](*args))
        except Exception as error:
            answer = ("failed", str(error))
        connection.send(answer)


class Executor:
    """Calls methods on all workers."""

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), timeout: float | None = None
    ) -> list[Any]:
        """Run `method` on all workers and return their answers by rank.

        Raises:
            RuntimeError: the method failed on some rank; the text is the worker's.
            TimeoutError: not all ranks have answered after `timeout` seconds; the text names those that have not ("rank 1").
        """
        for connection in self.connections:
            connection.send((method, args))
        answers = []
        for connection in self.connections:
            if timeout is not None and not connection.poll(timeout):
                raise TimeoutError(f"{method} timed out")
            status, value = connection.recv()
            if status == "failed":
                raise RuntimeError(value)
            answers.append(value)
        return answers
