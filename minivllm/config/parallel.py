"""How many ranks, of which kind, and which classes run on them.

vLLM 0.25.1: vllm/config/parallel.py (ParallelConfig)
Articles: part 2 §2.3.1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.config.checks import check_class_name, check_flags, check_integers, check_seconds
from minivllm.exceptions import ConfigError


@dataclass(slots=True)
class ParallelConfig:
    """Sizes of the parallel dimensions; world_size = tp x pp x pcp of one data-parallel replica.

    Attributes:
        distributed_executor_backend: "mp", "uni", an Executor class, its qualified name, or None (choose).
        worker_cls: qualified name of the worker class; "auto" lets the platform choose.
        worker_extension_cls: qualified name of a class whose methods are mixed into the worker.
        startup_timeout_s: deadline for all workers to be ready (None: MINIVLLM_STARTUP_TIMEOUT_S).
        master_addr, master_port: rendezvous of several nodes.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    distributed_executor_backend: Any = None
    worker_cls: str = "auto"
    worker_extension_cls: str = ""
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    numa_bind: bool = False
    startup_timeout_s: float | None = None

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "nnodes")
        check_integers(self, sizes, 1)
        check_integers(self, ("node_rank",), 0)
        check_integers(self, ("master_port",), 0, 65535)
        check_flags(self, ("numa_bind",))
        if not isinstance(self.master_addr, str) or not self.master_addr:
            raise ConfigError(
                f"master_addr={self.master_addr!r} is not valid: an address, as text, is needed"
            )
        if self.startup_timeout_s is not None:
            check_seconds("startup_timeout_s", self.startup_timeout_s)
        if self.worker_cls != "auto":
            check_class_name("worker_cls", self.worker_cls)
        if self.worker_extension_cls != "":
            check_class_name("worker_extension_cls", self.worker_extension_cls)
        if self.prefill_context_parallel_size != 1:
            raise ConfigError("prefill_context_parallel_size above 1 is not supported")
        if self.world_size % self.nnodes:
            raise ConfigError(
                f"world_size {self.world_size} (tensor x pipeline parallel size) must be divisible by "
                f"nnodes={self.nnodes}"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"node_rank={self.node_rank} is not valid: 0 to {self.nnodes - 1} with nnodes={self.nnodes}"
            )

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def local_world_size(self) -> int:
        return self.world_size // self.nnodes

    # One data-parallel replica is all there is, so "within the replica" is the whole job.
    @property
    def nnodes_within_dp(self) -> int:
        return self.nnodes

    @property
    def node_rank_within_dp(self) -> int:
        return self.node_rank
