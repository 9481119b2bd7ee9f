"""Finalizer: worker processes behind pipes, and executors that are shut down, forgotten, or both.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import gc
import os
import weakref
from multiprocessing.connection import Connection
from typing import Any

from minivllm.learn import kit

RANKS = 2


class Workers:
    """Starts real workers and counts how often each is ended."""

    def __init__(self) -> None:
        self.started: list[RunningWorker] = []

    def start(self, rank: int) -> RunningWorker:
        self.started.append(RunningWorker())
        return self.started[-1]

    def alive(self) -> list[int]:
        return [rank for rank, worker in enumerate(self.started) if worker.process.is_alive()]

    def kill(self) -> None:
        kit.end(*[worker.process for worker in self.started])


class RunningWorker:
    def __init__(self) -> None:
        theirs, self._death_writer = kit.context.Pipe(duplex=False)
        self.process = kit.start(_worker, theirs)
        theirs.close()
        self.ended = 0

    def end(self) -> None:
        self.ended += 1
        self._death_writer.close()
        self.process.join(5)


def check_forgotten(module: Any) -> None:
    """When the last reference to an executor goes, its workers end."""
    workers = Workers()
    try:
        executor = module.Executor(workers.start, RANKS)
        reference = weakref.ref(executor)
        del executor
        kit.within(5, "collecting the executor", gc.collect)
        if reference() is not None:
            holders = {_name(holder) for holder in gc.get_referrers(reference()) if _name(holder) != "frame"}
            raise kit.Broken(
                "the last reference was deleted and the garbage collector has run, and the executor is still there, "
                f"held by: {', '.join(sorted(holders))}"
            )
        if not kit.until(lambda: not workers.alive(), 2):
            raise kit.Broken(f"the executor has been collected, and workers still run: {workers.alive()}")
    finally:
        workers.kill()


def check_once(module: Any) -> None:
    """Workers are ended once: by `shutdown`, however often it is called, or by the finalizer, not by both."""
    workers = Workers()
    try:
        executor = module.Executor(workers.start, RANKS)
        for _ in range(3):
            kit.within(5, "shutdown", executor.shutdown)
        if workers.alive():
            raise kit.Broken("shutdown has returned, and workers still run")
        del executor
        gc.collect()
        counts = [worker.ended for worker in workers.started]
        if counts != [1] * RANKS:
            raise kit.Broken(
                f"three calls of shutdown and the end of the executor have ended the workers {counts} times"
            )
    finally:
        workers.kill()


def check_failed_start(module: Any) -> None:
    """When a start fails half-way, the workers that were started end as well."""
    workers = Workers()

    def start(rank: int) -> RunningWorker:
        if rank == 1:
            raise ValueError("no such weights")
        return workers.start(rank)

    try:
        try:
            module.Executor(start, RANKS)
        except ValueError:
            pass
        else:
            raise kit.Broken("rank 1 failed to start, and the executor says nothing")
        gc.collect()
        if not kit.until(lambda: not workers.alive(), 2):
            raise kit.Broken("rank 1 failed to start, and rank 0 still runs")
    finally:
        workers.kill()


def _name(holder: Any) -> str:
    return "a bound method" if type(holder).__name__ == "method" else type(holder).__name__


def _worker(death_pipe: Connection) -> None:
    try:
        death_pipe.recv()
    except EOFError:
        os._exit(0)
