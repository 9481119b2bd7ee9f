"""What attention layers need to know about the current batch, without passing it through every layer.

vLLM 0.25.1: vllm/forward_context.py (ForwardContext, set_forward_context)
Articles: part 1 §8.3
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from minivllm.model_executor.layers.attention import Attention, AttentionMetadata


class ForwardContext:
    """Attributes:
    attn_metadata: the batch as attention sees it; None outside of a forward pass.
    attend: takes the place of each attention layer while a forward pass is recorded in pieces; else None.
    """

    __slots__ = ("attend", "attn_metadata")

    def __init__(self) -> None:
        self.attn_metadata: AttentionMetadata | None = None
        self.attend: Callable[[Attention, Tensor, Tensor], Tensor] | None = None


_forward_context = ForwardContext()


def get_forward_context() -> ForwardContext:
    return _forward_context


class set_forward_context:
    """`with set_forward_context(attn_metadata): model(...)`; a class, since a generator costs more per step."""

    __slots__ = ("attend", "attn_metadata")

    def __init__(
        self,
        attn_metadata: AttentionMetadata | None,
        attend: Callable[[Attention, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.attn_metadata = attn_metadata
        self.attend = attend

    def __enter__(self) -> None:
        _forward_context.attn_metadata = self.attn_metadata
        _forward_context.attend = self.attend

    def __exit__(self, *exc: object) -> None:
        _forward_context.attn_metadata = _forward_context.attend = None
