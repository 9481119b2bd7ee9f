"""Finalize with the resources, not with their owner.

A bound method holds its object, so a finalizer that calls one keeps the object alive for ever; it runs when the
interpreter ends and at no other time. A function that knows the list of workers holds nothing of the executor. Calling
the finalizer runs the function at most once.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor._init_executor: weakref.finalize)
Articles: part 2 §2.3.1, §4.5
"""

import weakref
from collections.abc import Callable
from typing import Protocol


class Worker(Protocol):
    """A running worker process."""

    def end(self) -> None:
        """Ask it to end and wait until it has; to be called once."""


class Executor:
    """Owns worker processes."""

    def __init__(self, start_worker: Callable[[int], Worker], world_size: int) -> None:
        self.workers: list[Worker] = []
        # The list, and not what is in it now: a start that fails half-way ends those that it has started.
        self._finalizer = weakref.finalize(self, _end_workers, self.workers)
        for rank in range(world_size):
            self.workers.append(start_worker(rank))

    def shutdown(self) -> None:
        """End all workers."""
        self._finalizer()


def _end_workers(workers: list[Worker]) -> None:
    for worker in workers:
        worker.end()
