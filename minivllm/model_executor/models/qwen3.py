"""Qwen3: Llama's frame with a norm on each query and key head.

vLLM 0.25.1: vllm/model_executor/models/qwen3.py (Qwen3ForCausalLM, Qwen3DecoderLayer, Qwen3Attention)
Articles: part 1 §8.2
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.model_executor.layers.layernorm import RMSNorm, RMSNormFunction
from minivllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    """Attention whose queries and keys are normalised head by head before they are turned."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__(config, dtype, device, prefix)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)

    def process_weights_after_loading(self) -> None:
        # Queries and keys lie side by side, so one norm with a weight per head does for both.
        q = self.q_norm.weight.data.expand(self.num_heads, -1)
        k = self.k_norm.weight.data.expand(self.num_kv_heads, -1)
        self.qk_norm = RMSNormFunction(torch.cat((q, k)), self.q_norm.eps)

    def normalize_heads(self, qk: Tensor) -> Tensor:
        return self.qk_norm(qk)


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_cls: ClassVar[type[LlamaAttention]] = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_cls: ClassVar[type[LlamaDecoderLayer]] = Qwen3DecoderLayer
