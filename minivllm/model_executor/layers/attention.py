"""Attention over a paged KV cache, in torch operations that run on a CPU and on a GPU.

vLLM 0.25.1: vllm/model_executor/layers/attention/attention.py (Attention), vllm/v1/attention/backends/cpu_attn.py
(CPUAttentionMetadata)
Articles: part 1 §8.3

A batch has two parts, decode first: rows with one token, which are computed together, and rows with more, which are
computed one by one. The cache of a layer is one tensor `[num_blocks, block_size, 2 * num_kv_heads, head_dim]`, keys
and values of a token side by side, so that a step needs one write and one gather for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.forward_context import get_forward_context
from minivllm.model_executor.layers.layer import Layer


@dataclass(slots=True)
class PrefillMetadata:
    """One row with several tokens.

    Attributes:
        start, end: its tokens in the batch.
        pages: `[num_pages]` its blocks, or None when nothing was computed before: then the keys and values of this
            very step are all there are, and the cache need not be read.
        seq_len: tokens computed before this step plus its own.
        mask: `[end - start, seq_len]` added to the scores; None together with pages (plainly causal).
    """

    start: int
    end: int
    pages: Tensor | None = None
    seq_len: int = 0
    mask: Tensor | None = None


@dataclass(slots=True)
class AttentionMetadata:
    """The batch as attention sees it; the same for all layers.

    Attributes:
        slot_mapping: `[num_tokens]` where each token's key and value go: block * block_size + offset.
        num_decodes: rows with one token; they come first.
        decode_pages: `[num_decodes * pages_per_row]` their blocks, row by row, padded with the null block.
        decode_len: tokens to attend to; the longest row's.
        decode_mask: `[num_decodes, 1, 1, decode_len]` added to the scores; None when all rows are equally long.
        prefills: the other rows.
    """

    slot_mapping: Tensor
    num_decodes: int = 0
    decode_pages: Tensor | None = None
    decode_len: int = 0
    decode_mask: Tensor | None = None
    prefills: list[PrefillMetadata] = field(default_factory=list)


class Attention(Layer):
    """Grouped-query attention of this rank's heads.

    Attributes:
        kv_cache: `[num_blocks, block_size, 2 * num_kv_heads, head_dim]`, or None before it is allocated: then a
            batch can hold prefills without pages only (profiling).
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, layer_name: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.layer_name = layer_name
        self.kv_cache: Tensor | None = None
        self.slots: Tensor | None = None

    def bind_kv_cache(self, kv_cache: Tensor | None) -> None:
        """Use `kv_cache` from now on."""
        self.kv_cache = kv_cache
        self.slots = None if kv_cache is None else kv_cache.flatten(0, 1)

    def forward(self, q: Tensor, kv: Tensor) -> Tensor:
        """Write `kv` to the cache and attend.

        Args:
            q: `[num_tokens, num_heads, head_dim]`.
            kv: `[num_tokens, 2 * num_kv_heads, head_dim]`, keys first.

        Returns:
            `[num_tokens, num_heads * head_dim]`.
        """
        metadata = get_forward_context().attn_metadata
        assert metadata is not None
        if self.slots is not None:
            self.slots.index_copy_(0, metadata.slot_mapping, kv)
        if not metadata.prefills:
            return self._decode(q, metadata)
        out = q.new_empty(q.shape[0], self.num_heads * self.head_dim)
        if metadata.num_decodes:
            out[: metadata.num_decodes] = self._decode(q[: metadata.num_decodes], metadata)
        for prefill in metadata.prefills:
            tokens = slice(prefill.start, prefill.end)
            out[tokens] = self._prefill(q[tokens], kv[tokens], prefill)
        return out

    def _decode(self, q: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert self.kv_cache is not None and metadata.decode_pages is not None
        rows = metadata.num_decodes
        pages = self.kv_cache.index_select(0, metadata.decode_pages)
        # [rows, padded length, 2, kv heads, head_dim] -> keys and values, [rows, kv heads, length, head_dim] each
        kv = pages.view(rows, -1, 2, self.num_kv_heads, self.head_dim)[:, : metadata.decode_len]
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        # The query heads that share a key/value head take the place of query positions: they see the same keys, and
        # nothing has to be repeated.
        grouped = q.view(rows, self.num_kv_heads, self.group, self.head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, metadata.decode_mask)
        return out.reshape(rows, -1)

    def _prefill(self, q: Tensor, kv: Tensor, prefill: PrefillMetadata) -> Tensor:
        if prefill.pages is not None:
            assert self.kv_cache is not None
            kv = self.kv_cache.index_select(0, prefill.pages).flatten(0, 1)[: prefill.seq_len]
        tokens = q.shape[0]
        # Key/value heads take the place of the batch, and the heads of a group share one through a stride of zero.
        k, v = kv.view(-1, 2, self.num_kv_heads, 1, self.head_dim).permute(1, 2, 3, 0, 4).unbind(0)
        grouped = q.view(tokens, self.num_kv_heads, self.group, self.head_dim).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(
            grouped,
            k.expand(-1, self.group, -1, -1),
            v.expand(-1, self.group, -1, -1),
            prefill.mask,
            is_causal=prefill.mask is None,
        )
        return out.permute(2, 0, 1, 3).reshape(tokens, -1)


def causal_mask(num_tokens: int, seq_len: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[num_tokens, seq_len]`: 0 where the last `num_tokens` of `seq_len` positions may look, else -inf."""
    mask = torch.full((num_tokens, seq_len), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(seq_len - num_tokens + 1)
