"""A CPU as the device: each rank gets its share of the cores.

vLLM 0.25.1: vllm/platforms/cpu.py (CpuPlatform), vllm/v1/worker/cpu_worker.py (CPUWorker.init_device)
Articles: part 1 §5
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from minivllm import envs
from minivllm.platforms.interface import Platform

if TYPE_CHECKING:
    import torch


def usable_cores() -> int:
    """Cores that this process may run on."""
    # macOS knows no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_share(local_rank: int, local_world_size: int) -> set[int] | None:
    """The cores of one rank: neighbours, and as many as every other rank has. None: fewer cores than ranks."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // local_world_size
    return set(cores[local_rank * each : (local_rank + 1) * each]) or None


class CpuPlatform(Platform):
    device_type: ClassVar[str] = "cpu"
    dist_backend: ClassVar[str] = "gloo"

    def bind_device(self, local_rank: int, local_world_size: int) -> torch.device:
        import torch

        # An explicit OMP_NUM_THREADS is the user's or the executor's decision, and torch has already followed it.
        if not os.environ.get("OMP_NUM_THREADS"):
            # More threads than cores makes ranks that wait for each other push each other off the cores.
            torch.set_num_threads(max(1, usable_cores() // local_world_size))
        # Ranks meet in every layer. One that the kernel moves to another core finds its caches cold there, and the
        # others wait for it. A rank alone is left where it is: it may be in the caller's own process.
        if local_world_size > 1 and envs.MINIVLLM_CPU_BIND_CORES:
            share = core_share(local_rank, local_world_size)
            # With more threads than that (a user's OMP_NUM_THREADS, or a share of one NUMA node) they would crowd there.
            if share is not None and torch.get_num_threads() <= len(share):
                os.sched_setaffinity(0, share)
        return torch.device("cpu")

    def get_memory_info(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * page, total
        except (ValueError, OSError):
            # macOS does not say how much is free.
            return total, total

    def synchronize(self) -> None:
        """Nothing to wait for: operations on a CPU have finished when they return."""

    def reset_peak_memory(self) -> None:
        """Nothing to reset, since torch counts no allocations on a CPU."""

    def get_peak_memory(self) -> int | None:
        return None

    def empty_cache(self) -> None:
        """Nothing to empty, since torch keeps no cache on a CPU."""
