"""Attention metadata of V1's batches, put together on the CPU.

vLLM 0.25.1: vllm/v1/attention/backends/cpu_attn.py (CPUAttentionMetadataBuilder)
Articles: part 1 §7

In V2 (worker/gpu/attn_utils.py) lengths and positions are on the device, which makes masks and page lists of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.model_executor.layers.attention import (
    AttentionMetadata,
    PrefillMetadata,
    causal_mask,
    page_indices,
)


class AttentionMetadataBuilder:
    """Makes the metadata of a batch for one model.

    Args:
        num_kv_heads: of this rank.
        dtype: of queries, for masks.
    """

    def __init__(self, num_kv_heads: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.head_index = torch.arange(2 * num_kv_heads, device=device).view(2, 1, num_kv_heads, 1)

    def build(
        self,
        slot_mapping: tuple[Tensor, Tensor],
        block_table: Tensor,
        num_scheduled: np.ndarray,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
    ) -> AttentionMetadata:
        """The batch as attention sees it.

        Args:
            slot_mapping: block and offset of each token, `[num_tokens]`.
            block_table: `[num_reqs, max_blocks]`.
            num_scheduled, seq_lens: `[num_reqs]`; rows with one token come first.
            query_start_loc: `[num_reqs + 1]`.
        """
        metadata = AttentionMetadata(slot_mapping)
        num_decodes = int(np.count_nonzero(num_scheduled == 1))
        assert (num_scheduled[:num_decodes] == 1).all(), (
            "reorder has brought rows with one token to the front"
        )
        if num_decodes:
            self.add_decodes(metadata, block_table[:num_decodes], seq_lens[:num_decodes])
        for row in range(num_decodes, len(num_scheduled)):
            start, end, seq_len = int(query_start_loc[row]), int(query_start_loc[row + 1]), int(seq_lens[row])
            if seq_len == end - start:
                metadata.prefills.append(PrefillMetadata(start, end))
                continue
            block_ids = block_table[row : row + 1, : -(-seq_len // self.block_size)]
            pages = page_indices(block_ids, self.num_kv_heads, self.head_index)
            mask = causal_mask(end - start, seq_len, self.dtype, self.device)
            metadata.prefills.append(PrefillMetadata(start, end, pages, seq_len, mask))
        return metadata

    def add_decodes(self, metadata: AttentionMetadata, block_table: Tensor, seq_lens: np.ndarray) -> None:
        """Tokens that each see `seq_lens` tokens of their request, `[num_decodes]`, their own among them."""
        num_blocks = -(-int(seq_lens.max()) // self.block_size)
        length = num_blocks * self.block_size
        metadata.num_decodes = len(seq_lens)
        metadata.decode_pages = page_indices(block_table[:, :num_blocks], self.num_kv_heads, self.head_index)
        beyond = np.arange(length) >= np.repeat(seq_lens, self.num_kv_heads)[:, None]
        mask = np.where(beyond, np.float32("-inf"), np.float32(0))
        metadata.decode_mask = torch.from_numpy(mask).unsqueeze(1).to(self.device, self.dtype)
