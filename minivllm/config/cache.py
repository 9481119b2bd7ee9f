"""Size and shape of the KV cache.

vLLM 0.25.1: vllm/config/cache.py (CacheConfig)
Articles: part 1 §8.3
"""

from __future__ import annotations

from dataclasses import dataclass

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
        if not isinstance(self.block_size, int) or isinstance(self.block_size, bool) or self.block_size < 1:
            raise ConfigError(
                f"block_size={self.block_size!r} is not valid: an integer of at least 1 is needed"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization!r} is not in (0, 1]")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ConfigError("num_gpu_blocks_override must be at least 2: block 0 is the null block")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ConfigError("kv_cache_memory_bytes must be positive")
