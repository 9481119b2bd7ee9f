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
from minivllm.model_executor.layers.attention import (
    AttentionMetadata,
    PrefillMetadata,
    causal_mask,
    page_indices,
)
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
        `[num_layers]` tensors of `[num_blocks, 2 * num_kv_heads, block_size, head_size]`.
    """
    kv_caches = []
    for layer in model.attention_layers():
        spec = kv_cache_config.kv_cache_specs[layer.layer_name]
        shape = (kv_cache_config.num_blocks, 2 * spec.num_kv_heads, spec.block_size, spec.head_size)
        # Zeros, not empty: masked entries are multiplied by zero, and whatever lay there before may be a NaN.
        kv_cache = torch.zeros(shape, dtype=dtype, device=device)
        layer.bind_kv_cache(kv_cache)
        kv_caches.append(kv_cache)
    return kv_caches


class AttentionMetadataBuilder:
    """Makes the metadata of a batch.

    Args:
        num_kv_heads: of this rank.
        dtype: of queries, for masks.
        decode_query_len: rows of up to that many tokens are taken apart into rows of one token; more than 1 when
            drafts are verified.
    """

    def __init__(
        self,
        max_model_len: int,
        block_size: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        decode_query_len: int = 1,
    ) -> None:
        self.decode_query_len = decode_query_len
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.dtype = dtype
        self.device = device
        self.head_index = torch.arange(2 * num_kv_heads, device=device).view(2, 1, num_kv_heads, 1)
        self.zero = torch.zeros((), dtype=dtype, device=device)
        self.minus_infinity = torch.full((), float("-inf"), dtype=dtype, device=device)
        # Masks cover whole blocks, of which the last may reach beyond the model's length.
        self.arange = torch.arange(max_model_len + block_size, device=device)
        # The pages of the last batch in which everybody decoded, with what they depend on.
        self._decoded: tuple[InputBatch, int, int] | None = None
        self._pages: Tensor | None = None

    def build(self, batch: InputBatch, block_tables: BlockTables) -> AttentionMetadata:
        """The batch as attention sees it."""
        metadata = AttentionMetadata(block_tables.compute_slot_mappings(batch.token_slots, batch.positions))
        if batch.num_tokens == batch.num_reqs:
            longest = int(batch.seq_lens_np.max())
            pages = self._pages_of_decodes(batch, longest, block_tables)
            self._add_decodes(metadata, batch.seq_lens, longest, pages)
            return metadata
        num_decodes = int(np.searchsorted(batch.num_scheduled_tokens, self.decode_query_len + 1))
        if num_decodes:
            # Keys and values are written before they are read, so that a token can see those before it in its row.
            num_tokens = int(batch.query_start_loc_np[num_decodes])
            longest = int(batch.seq_lens_np[:num_decodes].max())
            pages = self._gather_pages(batch.token_slots[:num_tokens], longest, block_tables)
            self._add_decodes(metadata, batch.positions[:num_tokens] + 1, longest, pages)
        for row in range(num_decodes, batch.num_reqs):
            start, end = int(batch.query_start_loc_np[row]), int(batch.query_start_loc_np[row + 1])
            seq_len = int(batch.seq_lens_np[row])
            if seq_len == end - start:
                metadata.prefills.append(PrefillMetadata(start, end))
                continue
            block_ids = block_tables.gather_block_tables(
                batch.idx_mapping[row : row + 1], -(-seq_len // self.block_size)
            )
            pages = page_indices(block_ids, self.num_kv_heads, self.head_index)
            mask = causal_mask(end - start, seq_len, self.dtype, self.device)
            metadata.prefills.append(PrefillMetadata(start, end, pages, seq_len, mask))
        return metadata

    def build_decodes(
        self, token_slots: Tensor, positions: Tensor, longest: int, block_tables: BlockTables
    ) -> AttentionMetadata:
        """A batch of `[n]` tokens, each of which sees all of its request up to itself.

        Args:
            longest: number of tokens that the longest request has, or more.
        """
        metadata = AttentionMetadata(block_tables.compute_slot_mappings(token_slots, positions))
        pages = self._gather_pages(token_slots, longest, block_tables)
        self._add_decodes(metadata, positions + 1, longest, pages)
        return metadata

    def _pages_of_decodes(self, batch: InputBatch, longest: int, block_tables: BlockTables) -> Tensor:
        # Nothing changes until somebody needs another block, which is every block_size steps.
        decoded = batch, -(-longest // self.block_size), block_tables.version
        last = self._decoded
        if self._pages is None or last is None or last[0] is not batch or last[1:] != decoded[1:]:
            self._pages = self._gather_pages(batch.idx_mapping, longest, block_tables)
            self._decoded = decoded
        return self._pages

    def _gather_pages(self, slots: Tensor, longest: int, block_tables: BlockTables) -> Tensor:
        block_ids = block_tables.gather_block_tables(slots, -(-longest // self.block_size))
        return page_indices(block_ids, self.num_kv_heads, self.head_index)

    def _add_decodes(
        self, metadata: AttentionMetadata, seq_lens: Tensor, longest: int, pages: Tensor
    ) -> None:
        metadata.num_decodes = seq_lens.shape[0]
        metadata.decode_pages = pages
        length = -(-longest // self.block_size) * self.block_size
        ends = seq_lens.view(-1, 1, 1, 1).expand(-1, self.num_kv_heads, -1, -1)
        mask = torch.where(ends <= self.arange[:length], self.minus_infinity, self.zero)
        metadata.decode_mask = mask.view(-1, 1, length)


def build_dummy_attn_metadata(num_tokens: int, num_reqs: int, device: torch.device) -> AttentionMetadata:
    """`num_tokens` in `num_reqs` prompts of about equal length, none of which reads the cache.

    All of them write to the null block.
    """
    bounds = np.linspace(0, num_tokens, num_reqs + 1).astype(int).tolist()
    prefills = [PrefillMetadata(start, end) for start, end in pairwise(bounds)]
    null = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    return AttentionMetadata((null, null), prefills=prefills)
