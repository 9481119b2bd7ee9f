"""Root mean square normalisation.

vLLM 0.25.1: vllm/model_executor/layers/layernorm.py (RMSNorm)
Articles: part 1 §8.2
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.model_executor.layers.layer import Layer, empty_parameter


class RMSNormFunction:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, of n elements.

    On a CPU in float32 this is computed as `x / sqrt(|x|² + n·eps) * (weight·√n)`, by four operations that torch
    has kernels for; F.rms_norm is composed of eight there and takes twice as long on one token.

    Args:
        weight: anything that broadcasts to x, e.g. `[n]`, or `[num_heads, n]` for a weight per head.
    """

    __slots__ = ("eps", "fused", "scaled_eps", "scaled_weight", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        n = weight.shape[-1]
        self.shape = (n,)
        self.eps = eps
        self.weight = weight
        self.fused = weight.device.type != "cpu" or weight.dtype != torch.float32
        self.scaled_weight = weight * math.sqrt(n)
        self.scaled_eps = torch.full((1,), math.sqrt(n * eps), dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused:
            return F.rms_norm(x, self.shape, None, self.eps) * self.weight
        norm = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.scaled_eps)
        return x.div(norm).mul_(self.scaled_weight)


class RMSNorm(Layer):
    """RMS normalisation of the hidden states, with the addition of the residual before it."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(hidden_size, dtype=dtype, device=device)
        self.eps = eps

    def process_weights_after_loading(self) -> None:
        self.normalize = RMSNormFunction(self.weight.data, self.eps)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add `x` to `residual`, in place, and normalise the sum; without a residual `x` itself becomes it.

        Returns:
            The normalised sum and the sum, both `[num_tokens, hidden_size]`.
        """
        residual = x if residual is None else residual.add_(x)
        return self.normalize(residual), residual
