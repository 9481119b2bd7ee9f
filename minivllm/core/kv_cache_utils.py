"""From free memory to a number of KV cache blocks.

vLLM 0.25.1: vllm/v1/core/kv_cache_utils.py (get_kv_cache_configs, get_num_blocks)
Articles: part 1 §8.3
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.config import VllmConfig
from minivllm.exceptions import ConfigError
from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig


def get_kv_cache_configs(
    vllm_config: VllmConfig,
    kv_cache_specs: Sequence[dict[str, FullAttentionSpec]],
    available_memory: Sequence[int],
) -> list[KVCacheConfig]:
    """Decide how many blocks each rank allocates, and write the number into `cache_config.num_gpu_blocks`.

    Args:
        kv_cache_specs: per rank: layer name -> spec, for the layers of that rank.
        available_memory: per rank, bytes that the KV cache may take.

    Returns:
        One configuration per rank, all with the same number of blocks: a block id must mean the same slot on
        every rank, so the rank with the least room decides.

    Raises:
        ConfigError: not even one block besides the null block fits on some rank.
    """
    cache_config = vllm_config.cache_config
    if cache_config.num_gpu_blocks_override is not None:
        num_blocks = cache_config.num_gpu_blocks_override
    else:
        per_rank = [
            memory // max(1, sum(spec.page_size_bytes for spec in specs.values()))
            for specs, memory in zip(kv_cache_specs, available_memory, strict=True)
        ]
        num_blocks = min(per_rank)
        if num_blocks < 2:
            rank = per_rank.index(num_blocks)
            page = sum(spec.page_size_bytes for spec in kv_cache_specs[rank].values())
            raise ConfigError(
                f"rank {rank} has {available_memory[rank]} bytes for its KV cache, but two blocks of "
                f"{cache_config.block_size} tokens need {2 * page}; raise kv_cache_memory_bytes "
                "(MINIVLLM_CPU_KVCACHE_BYTES on a CPU, gpu_memory_utilization on a GPU) or lower block_size"
            )
        # More blocks than all running requests can fill at full length would only cost memory.
        num_blocks = min(num_blocks, _most_blocks_in_use(vllm_config))
    cache_config.num_gpu_blocks = num_blocks
    return [KVCacheConfig(num_blocks=num_blocks, kv_cache_specs=dict(specs)) for specs in kv_cache_specs]


def _most_blocks_in_use(vllm_config: VllmConfig) -> int:
    """Deviation from vLLM: the cache is not made larger than max_num_seqs requests of max_model_len can fill,
    so that a tiny model on a laptop does not touch memory it cannot use."""
    model_config = vllm_config.model_config
    if model_config is None or model_config.max_model_len is None:
        return 1 << 62
    per_request = -(-model_config.max_model_len // vllm_config.cache_config.block_size)
    return 1 + per_request * vllm_config.scheduler_config.max_num_seqs
