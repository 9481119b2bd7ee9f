"""Making executors of light workers for tests."""

from __future__ import annotations

import sys
import time
from typing import Any

from minivllm.config import ParallelConfig, SchedulerConfig, VllmConfig
from minivllm.executor.multiproc_executor import MultiprocExecutor


def make_config(
    tp: int = 2, pp: int = 1, async_scheduling: bool = False, worker: str = "LightWorker", **parallel: Any
) -> VllmConfig:
    return VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, worker_cls=f"workers.{worker}", **parallel
        ),
        scheduler_config=SchedulerConfig(async_scheduling=async_scheduling),
    )


def make_executor(*args: Any, **kwargs: Any) -> MultiprocExecutor:
    """An executor of two light workers unless told otherwise; see make_config."""
    return MultiprocExecutor(make_config(*args, **kwargs))


def main() -> None:
    """A parent for tests that kill it: starts an executor, says so, and runs the named method for ever."""
    executor = make_executor()
    print("ready", *(worker.pid for worker in executor.workers), flush=True)
    if len(sys.argv) > 1:
        executor.collective_rpc(sys.argv[1])
    time.sleep(600)


if __name__ == "__main__":
    main()
