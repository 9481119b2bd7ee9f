"""Making executors of light workers for tests."""

from __future__ import annotations

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
