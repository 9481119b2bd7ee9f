"""Activation functions.

vLLM 0.25.1: vllm/model_executor/layers/activation.py (SiluAndMul)
Articles: part 1 §8.2
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minivllm.model_executor.layers.layer import Layer


class SiluAndMul(Layer):
    """`silu(x[:, :d]) * x[:, d:]`."""

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, 2 * d]` → `[num_tokens, d]`."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)
