"""Attention over a paged KV cache, in torch operations that run on a CPU and on a GPU.

vLLM 0.25.1: vllm/model_executor/layers/attention/attention.py (Attention), vllm/v1/attention/backends/cpu_attn.py
(CPUAttentionMetadata)
Articles: part 1 §8.3

A batch has two parts, decode first: rows with one token, which are computed together, and rows with more, which are
computed one by one.

The cache of a layer is one tensor `[num_blocks, 2 * num_kv_heads, block_size, head_dim]`, a token's keys and values
side by side, so that a step needs one write and one gather for both. A "page" is what one head has in one block. Since
it lies together, a gather in the order (keys or values, row, head, block) already is what a matrix multiplication wants.
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
        pages: `[2 * num_kv_heads * num_blocks]` its pages (see page_indices), or None when nothing was computed
            before: then the keys and values of this very step are all there are, and the cache need not be read.
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
        slot_mapping: where each token's key and value go: block and offset in it, `[num_tokens]` each.
        num_decodes: rows with one token; they come first. A row with drafts counts as one per token.
        decode_pages: `[2 * num_decodes * num_kv_heads * blocks]` their pages (see page_indices); shorter rows are
            filled up with the null block.
        decode_mask: `[num_decodes * num_kv_heads, 1, blocks * block_size]` added to the scores: -inf beyond a row's end.
        prefills: the other rows.
    """

    slot_mapping: tuple[Tensor, Tensor]
    num_decodes: int = 0
    decode_pages: Tensor | None = None
    decode_mask: Tensor | None = None
    prefills: list[PrefillMetadata] = field(default_factory=list)


class Attention(Layer):
    """Grouped-query attention of this rank's heads.

    Attributes:
        kv_cache: `[num_blocks, 2 * num_kv_heads, block_size, head_dim]`, or None before it is allocated: then a
            batch can hold prefills without pages only (profiling).
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, layer_name: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.scale = head_dim**-0.5
        self.layer_name = layer_name
        self.bind_kv_cache(None)

    def bind_kv_cache(self, kv_cache: Tensor | None) -> None:
        """Use `kv_cache` from now on."""
        self.kv_cache = kv_cache
        self.by_token = None if kv_cache is None else kv_cache.transpose(1, 2)
        self.by_page = None if kv_cache is None else kv_cache.flatten(2).flatten(0, 1)

    def forward(self, q: Tensor, kv: Tensor) -> Tensor:
        """Write `kv` to the cache and attend.

        Args:
            q: `[num_tokens, num_heads, head_dim]`.
            kv: `[num_tokens, 2 * num_kv_heads, head_dim]`, keys first.

        Returns:
            `[num_tokens, num_heads * head_dim]`.
        """
        attend = get_forward_context().attend
        return self.attend(q, kv) if attend is None else attend(self, q, kv)

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """What forward does, also for whoever takes its place."""
        metadata = get_forward_context().attn_metadata
        assert metadata is not None
        if self.by_token is not None:
            self.by_token.index_put_(metadata.slot_mapping, kv)
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
        assert self.by_page is not None and metadata.decode_pages is not None
        assert metadata.decode_mask is not None
        rows = metadata.num_decodes * self.num_kv_heads
        kv = self.by_page.index_select(0, metadata.decode_pages).view(2, rows, -1, self.head_dim)
        k, v = kv.unbind(0)
        # The query heads that share a key/value head take the place of query positions: they see the same keys, and
        # nothing has to be repeated.
        grouped = q.reshape(rows, self.group, self.head_dim)
        if q.dtype == torch.float32:
            # For one query F.scaled_dot_product_attention takes half as long again on a CPU.
            scores = torch.baddbmm(metadata.decode_mask, grouped, k.transpose(1, 2), alpha=self.scale)
            out = torch.bmm(scores.softmax(-1), v)
        else:
            # Half precision needs its sums in float32, and kernels for that want four dimensions.
            out = F.scaled_dot_product_attention(
                grouped.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), metadata.decode_mask.unsqueeze(0)
            )
        return out.reshape(metadata.num_decodes, -1)

    def _prefill(self, q: Tensor, kv: Tensor, prefill: PrefillMetadata) -> Tensor:
        if prefill.pages is None:
            kv = kv.view(-1, 2, self.num_kv_heads, self.head_dim).permute(1, 2, 0, 3)
        else:
            assert self.by_page is not None
            pages = self.by_page.index_select(0, prefill.pages)
            kv = pages.view(2, self.num_kv_heads, -1, self.head_dim)[:, :, : prefill.seq_len]
        # Key/value heads take the place of the batch, and the heads of a group share one through a stride of zero.
        k, v = kv.unsqueeze(2).expand(-1, -1, self.group, -1, -1).unbind(0)
        tokens = q.shape[0]
        grouped = q.view(tokens, self.num_kv_heads, self.group, self.head_dim).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(grouped, k, v, prefill.mask, is_causal=prefill.mask is None)
        return out.permute(2, 0, 1, 3).reshape(tokens, -1)


def page_indices(block_ids: Tensor, num_kv_heads: int, head_index: Tensor) -> Tensor:
    """Indices of pages in a cache seen as `[num_blocks * 2 * num_kv_heads, block_size * head_dim]`.

    Args:
        block_ids: `[rows, blocks]`.
        head_index: `[2, 1, num_kv_heads, 1]` 0, 1, 2 …: the keys' heads, then the values'.

    Returns:
        `[2 * rows * num_kv_heads * blocks]` in the order keys or values, row, head, block.
    """
    rows, blocks = block_ids.shape
    return torch.add(head_index, block_ids.view(1, rows, 1, blocks), alpha=2 * num_kv_heads).view(-1)


def causal_mask(num_tokens: int, seq_len: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[num_tokens, seq_len]`: 0 where the last `num_tokens` of `seq_len` positions may look, else -inf."""
    mask = torch.full((num_tokens, seq_len), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(seq_len - num_tokens + 1)
