"""How many OpenMP threads each worker gets.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (set_multiprocessing_worker_envs), vllm/utils/ompmultiprocessing.py (OMPProcessManager)
Articles: part 2 §2.7
"""

from __future__ import annotations

import os

from minivllm.platforms.cpu import usable_cores


def worker_omp_threads(device: str, local_world_size: int) -> int | None:
    """Threads for one of `local_world_size` workers; None when OMP_NUM_THREADS is set, which is the user's decision.

    On a CPU the workers share the cores. On a GPU the host code needs one thread.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, usable_cores() // local_world_size) if device == "cpu" else 1
