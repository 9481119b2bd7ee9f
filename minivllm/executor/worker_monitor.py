"""Watching the worker processes, so that the death of one ends what waits for it at once.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor.start_worker_monitor)
Articles: part 2 §2.3.2, §2.6.4
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import wait

from minivllm.executor.termination import ExecutorResources

# The sentinels tell at once; this is for a worker whose own children keep its sentinel's other end open.
_LOOK_EVERY_S = 0.5


def monitor_workers(resources: ExecutorResources, announce_failure: Callable[[], None]) -> None:
    """Return when the executor is shut down or has failed.

    Invariant: on a failure, first the cause is noted and every waiting caller released, then the callback is called,
    and only then are the other workers ended, which takes as long as it takes.

    Deviation from vLLM: there the other workers are ended first, and a busy one delays callback and caller by 9 s.

    Args:
        announce_failure: calls the executor's failure callback; holds no reference to the executor.
    """
    sentinels = [handle.proc.sentinel for handle in resources.handles]
    while not resources.find_dead(0):
        try:
            wait([*sentinels, resources.wake_reader], _LOOK_EVERY_S)
        except OSError:
            break  # closed by a shutdown
    if resources.failure:
        try:
            announce_failure()
        finally:
            resources.shutdown()
