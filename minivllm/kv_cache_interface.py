"""What a worker says about its KV cache, and what EngineCore decides about it.

vLLM 0.25.1: vllm/v1/kv_cache_interface.py (FullAttentionSpec, KVCacheConfig)
Articles: part 1 §8.3

No torch at module level; dtypes are names ("float32", "bfloat16", "float16").
"""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """One attention layer's needs on one rank.

    Attributes:
        block_size: tokens per block.
        num_kv_heads: key/value heads kept by this rank.
        head_size: elements per head.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


@dataclass(slots=True)
class KVCacheConfig:
    """The decision for one rank.

    Attributes:
        num_blocks: blocks in the pool; the same on all ranks. Block 0 is the null block and is never handed out.
        kv_cache_specs: layer name -> spec, in layer order, for the layers of this rank.
    """

    num_blocks: int
    kv_cache_specs: dict[str, FullAttentionSpec] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())
