"""KV cache and attention metadata.

vLLM 0.25.1: vllm/v1/worker/gpu/attn_utils.py (get_kv_cache_spec, init_kv_cache, build_attn_metadata)
Articles: part 1 §8.3
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from minivllm.config import VllmConfig
from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from minivllm.model_executor.layers.attention import AttentionMetadata, PrefillMetadata, causal_mask
from minivllm.model_executor.models.interfaces import CausalLM
from minivllm.worker.gpu.block_table import BlockTables
from minivllm.worker.gpu.input_batch import InputBatch


def get_kv_cache_spec(vllm_config: VllmConfig, model: CausalLM) -> dict[str, FullAttentionSpec]:
    """Layer name → what the layer needs, in layer order, for the layers of this rank."""
    assert vllm_config.model_config is not None
    dtype = vllm_config.model_config.dtype
    return {
        layer.layer_name: FullAttentionSpec(
            vllm_config.cache_config.block_size, layer.num_kv_heads, layer.head_dim, dtype
        )
        for layer in model.attention_layers()
    }


def init_kv_cache(
    kv_cache_config: KVCacheConfig, model: CausalLM, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Allocate one tensor per layer and give it to the layer.

    Returns:
        `[num_layers]` tensors of `[num_blocks, block_size, 2 * num_kv_heads, head_size]`.
    """
    kv_caches = []
    for layer in model.attention_layers():
        spec = kv_cache_config.kv_cache_specs[layer.layer_name]
        shape = (kv_cache_config.num_blocks, spec.block_size, 2 * spec.num_kv_heads, spec.head_size)
        # Zeros, not empty: masked entries are multiplied by zero, and whatever lay there before may be a NaN.
        kv_cache = torch.zeros(shape, dtype=dtype, device=device)
        layer.bind_kv_cache(kv_cache)
        kv_caches.append(kv_cache)
    return kv_caches


def build_attn_metadata(
    batch: InputBatch, block_tables: BlockTables, arange: Tensor, dtype: torch.dtype
) -> AttentionMetadata:
    """The batch as attention sees it.

    Args:
        arange: `[at least the longest sequence, rounded up to a block]`.
        dtype: of queries, for masks.
    """
    slot_mapping = block_tables.compute_slot_mappings(batch.token_slots, batch.positions)
    if batch.num_tokens == batch.num_reqs:
        num_decodes = batch.num_reqs
    else:
        num_decodes = int(np.searchsorted(batch.num_scheduled_tokens, 2))
    metadata = AttentionMetadata(slot_mapping, num_decodes)
    if num_decodes:
        lens = batch.seq_lens_np[:num_decodes]
        longest = int(lens.max())
        num_pages = -(-longest // block_tables.block_size)
        idx_mapping, seq_lens = batch.idx_mapping, batch.seq_lens
        if num_decodes < batch.num_reqs:
            idx_mapping, seq_lens = idx_mapping[:num_decodes], seq_lens[:num_decodes]
        metadata.decode_pages = block_tables.gather_block_tables(idx_mapping, num_pages).view(-1)
        metadata.decode_len = longest
        if int(lens.min()) < longest:
            beyond = arange[:longest] >= seq_lens.view(-1, 1, 1, 1)
            metadata.decode_mask = torch.zeros(beyond.shape, dtype=dtype, device=arange.device).masked_fill_(
                beyond, float("-inf")
            )
    for row in range(num_decodes, batch.num_reqs):
        start, end = int(batch.query_start_loc_np[row]), int(batch.query_start_loc_np[row + 1])
        seq_len = int(batch.seq_lens_np[row])
        if seq_len == end - start:
            metadata.prefills.append(PrefillMetadata(start, end))
            continue
        num_pages = -(-seq_len // block_tables.block_size)
        pages = block_tables.table.gpu[int(batch.idx_mapping_np[row]), :num_pages]
        mask = causal_mask(end - start, seq_len, dtype, arange.device)
        metadata.prefills.append(PrefillMetadata(start, end, pages, seq_len, mask))
    return metadata


def build_dummy_attn_metadata(num_tokens: int, num_reqs: int, device: torch.device) -> AttentionMetadata:
    """`num_tokens` in `num_reqs` prompts of about equal length, none of which reads the cache.

    All of them write to the null block.
    """
    bounds = np.linspace(0, num_tokens, num_reqs + 1).astype(int).tolist()
    prefills = [PrefillMetadata(start, end) for start, end in pairwise(bounds)]
    return AttentionMetadata(torch.zeros(num_tokens, dtype=torch.int64, device=device), prefills=prefills)
