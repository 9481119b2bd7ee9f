"""Two-nets: a worker process that is idle, busy, or in the middle of its clean-up when it is to end.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from minivllm.learn import kit

CLEAN_UP_S = 0.3


class Worker:
    """A worker process; `said` is what it has said so far: serving, cleaning, cleaned."""

    def __init__(self, module: Any, busy: bool) -> None:
        theirs, self.death_writer = kit.context.Pipe(duplex=False)
        self._reader, writer = kit.context.Pipe(duplex=False)
        self.process = kit.start(_worker, module.WorkerMain, theirs, writer, busy)
        theirs.close()
        writer.close()
        self.said: list[str] = []
        if not self.hears("serving"):
            raise kit.Broken(f"the worker did not come to its loop; exit code {self.process.exitcode}")

    def hears(self, word: str, limit_s: float = 5.0) -> bool:
        """Whether the worker says so in time."""
        try:
            while word not in self.said and self._reader.poll(limit_s * kit.slack()):
                self.said.append(self._reader.recv())
        except EOFError:
            pass
        return word in self.said

    def terminate(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGTERM)

    def must_end_in_order(self, limit_s: float, who: str) -> None:
        code = kit.must_end(self.process, limit_s, who)
        self.hears("cleaned", 0.1)
        if self.said[1:] != ["cleaning", "cleaned"]:
            cleaned = ", ".join(self.said[1:]) or "it did not begin to"
            raise kit.Broken(
                f"{who} ended with exit code {code} and did not clean up to the end, once ({cleaned})"
            )
        if code != 0:
            raise kit.Broken(f"{who} ended with exit code {code}")


def check_sigterm_alone(module: Any) -> None:
    """SIGTERM ends a worker in the middle of a call, and it cleans up."""
    with _worker_of(module, busy=True) as worker:
        worker.terminate()
        worker.must_end_in_order(2, "a busy worker that got SIGTERM")


def check_death_pipe_alone(module: Any) -> None:
    """An idle worker whose death pipe closes ends by itself, and cleans up."""
    with _worker_of(module, busy=False) as worker:
        worker.death_writer.close()
        worker.must_end_in_order(2, "an idle worker whose death pipe was closed")


def check_sigterm_after_death_pipe(module: Any) -> None:
    """SIGTERM still works when the death pipe has fired before."""
    with _worker_of(module, busy=True) as worker:
        worker.death_writer.close()
        time.sleep(0.2)
        worker.terminate()
        worker.must_end_in_order(1.5, "a busy worker whose death pipe was closed and which then got SIGTERM")


def check_clean_up_is_not_interrupted(module: Any) -> None:
    """A SIGTERM that comes during the clean-up does not interrupt it, whatever has begun it."""
    with _worker_of(module, busy=True) as worker:
        worker.terminate()
        worker.hears("cleaning")
        worker.terminate()
        worker.must_end_in_order(2, "a worker that got a second SIGTERM while it was cleaning up")
    with _worker_of(module, busy=False) as worker:
        worker.death_writer.close()
        worker.hears("cleaning")
        worker.terminate()
        worker.must_end_in_order(
            2, "a worker that was cleaning up because of its death pipe and then got SIGTERM"
        )


@contextmanager
def _worker_of(module: Any, busy: bool) -> Iterator[Worker]:
    worker = Worker(module, busy)
    try:
        yield worker
    finally:
        kit.end(worker.process)


def _worker(worker_main: Any, death_pipe: Connection, said: Connection, busy: bool) -> None:
    def serve(shutdown_requested: threading.Event) -> None:
        said.send("serving")
        if busy:
            time.sleep(60)
        while not shutdown_requested.wait(0.01):
            pass

    def clean_up() -> None:
        said.send("cleaning")
        time.sleep(CLEAN_UP_S)
        said.send("cleaned")

    worker_main(death_pipe).run(serve, clean_up)
