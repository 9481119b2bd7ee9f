"""What a worker is called: in ps, in front of its log lines, and in traces.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.setup_proc_title_and_log_prefix)
Articles: part 2 §2.4.14
"""

from __future__ import annotations

from minivllm import tracing
from minivllm.config import ParallelConfig
from minivllm.utils.system_utils import decorate_logs, set_process_title


def setup_proc_title_and_log_prefix(parallel_config: ParallelConfig, rank: int, groups_exist: bool) -> None:
    """Name this process `minivllm::Worker`, and `minivllm::Worker_PP0_TP1` once the groups exist."""
    name = "Worker"
    if groups_exist:
        name += "".join(
            f"_{dimension}{number}" for dimension, number in _parallel_ranks(parallel_config, rank)
        )
    with tracing.span("worker.set_process_title", title=name):
        set_process_title(name)
        decorate_logs(name)


def trace_label(parallel_config: ParallelConfig, rank: int) -> str:
    """Short name of a worker in traces: "tp1", "pp0.tp1"."""
    numbers = _parallel_ranks(parallel_config, rank) or [("TP", 0)]
    return ".".join(f"{dimension.lower()}{number}" for dimension, number in numbers)


def _parallel_ranks(parallel_config: ParallelConfig, rank: int) -> list[tuple[str, int]]:
    """This rank's number in each dimension with more than one rank: pipeline stages are blocks of consecutive ranks."""
    tp_size, pp_size = parallel_config.tensor_parallel_size, parallel_config.pipeline_parallel_size
    numbers = []
    if pp_size > 1:
        numbers.append(("PP", rank // tp_size))
    if tp_size > 1:
        numbers.append(("TP", rank % tp_size))
    return numbers
