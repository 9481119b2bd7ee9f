"""The finalizer that never runs.

An executor has workers. It ends them in `shutdown`, and, so that a forgotten executor leaves nothing behind, when it is
collected. Its author has registered a finalizer for that. The workers of a forgotten executor live on all the same.

Change the class so that they end, and so that they are ended once, however often and in whatever way that is asked for.

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
        self._finalizer = weakref.finalize(self, self.shutdown)
        for rank in range(world_size):
            self.workers.append(start_worker(rank))

    def shutdown(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.end()
