"""Rotary position embedding without scaling.

vLLM 0.25.1: vllm/model_executor/layers/rotary_embedding/base.py (RotaryEmbedding), __init__.py (get_rope)
Articles: part 1 §8.2
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.model_executor.layers.layer import Layer


class RotaryEmbedding(Layer):
    """Turns pairs (i, i + head_dim / 2) of a head by position · base^(-2i / head_dim).

    Args:
        head_dim: elements per head, all of which are turned.
        max_position: positions 0 to max_position - 1 are prepared.
        base: rope_theta.
    """

    def __init__(
        self, head_dim: int, max_position: int, base: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.half_dim = head_dim // 2
        inv_freq = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
        cos, sin = angles.cos(), angles.sin()
        # Rotating the halves into each other's place and negating the first is the same as rotating them and giving
        # its sine the minus sign, which costs nothing per step.
        self.cos_sin_cache = torch.cat((cos, cos, -sin, sin), dim=-1).to(device, dtype)

    def get_cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[num_tokens]` → cosines and signed sines, `[num_tokens, 1, head_dim]` each."""
        # Deviation from vLLM: looked up once per step and shared by all layers, and not by each layer anew.
        cos, sin = self.cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, -1)
        return cos, sin

    def forward(self, heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Turn `heads` into `out`; both `[num_tokens, num_heads, head_dim]`, queries and keys alike."""
        torch.addcmul(heads * cos, heads.roll(self.half_dim, -1), sin, out=out)
