"""Size and shape of the KV cache.

vLLM 0.25.1: vllm/config/cache.py (CacheConfig)
Articles: part 1 §8.3
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.config.checks import check_integers, is_number
from minivllm.exceptions import ConfigError


@dataclass(slots=True)
class CacheConfig:
    """Attributes:
    block_size: tokens per KV block.
    gpu_memory_utilization: share of a GPU's memory that one rank may use.
    kv_cache_memory_bytes: bytes for the KV cache of one rank (None: profiled on a GPU,
        MINIVLLM_CPU_KVCACHE_BYTES on a CPU).
    num_gpu_blocks_override: number of blocks, whatever the memory says (tests force preemption with it).
    num_gpu_blocks: the decision, filled by EngineCore.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    num_gpu_blocks: int | None = None

    def __post_init__(self) -> None:
        check_integers(self, ("block_size",), 1)
        share = self.gpu_memory_utilization
        if not (is_number(share) and 0 < share <= 1):
            raise ConfigError(
                f"gpu_memory_utilization={share!r} is not valid: a number above 0 and up to 1 is needed"
            )
        if self.num_gpu_blocks_override == 1:
            raise ConfigError(
                "num_gpu_blocks_override=1 is not valid: block 0 is the null block, so at least 2 are needed"
            )
        if self.num_gpu_blocks_override is not None:
            check_integers(self, ("num_gpu_blocks_override",), 2)
        if self.kv_cache_memory_bytes is not None:
            check_integers(self, ("kv_cache_memory_bytes",), 1, (1 << 63) - 1)
