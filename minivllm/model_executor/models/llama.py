"""Llama, and the frame that models like it share.

vLLM 0.25.1: vllm/model_executor/models/llama.py (LlamaForCausalLM, LlamaModel, LlamaDecoderLayer, LlamaAttention,
LlamaMLP)
Articles: part 1 §8.2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.distributed.parallel_state import PipelineStage, get_pp_indices, get_tp_group
from minivllm.model_executor.layers.activation import SiluAndMul
from minivllm.model_executor.layers.attention import Attention
from minivllm.model_executor.layers.layer import Layer
from minivllm.model_executor.layers.layernorm import RMSNorm
from minivllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from minivllm.model_executor.layers.logits_processor import LogitsProcessor
from minivllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from minivllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.model_executor.models.interfaces import CausalLM
from minivllm.sequence import IntermediateTensors


class LlamaMLP(Layer):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = bool(config.hf_config.get("mlp_bias", False))
        self.gate_up_proj = MergedColumnParallelLinear(hidden, inner, bias, dtype, device)
        self.down_proj = RowParallelLinear(inner, hidden, bias, dtype, device)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return y


class LlamaAttention(Layer):
    """Projections, rotary embedding, attention."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__()
        tp_size = get_tp_group().world_size
        hidden, self.head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        total_heads, total_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_heads = total_heads // tp_size
        self.num_kv_heads = config.get_num_kv_heads(tp_size)
        self.num_qk_heads = self.num_heads + self.num_kv_heads
        self.num_all_heads = self.num_qk_heads + self.num_kv_heads
        self.qkv_proj = QKVParallelLinear(
            hidden, self.head_dim, total_heads, total_kv_heads, bias, dtype, device
        )
        self.o_proj = RowParallelLinear(total_heads * self.head_dim, hidden, bias, dtype, device)
        self.attn = Attention(self.num_heads, self.num_kv_heads, self.head_dim, f"{prefix}.attn")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, rotary_emb: RotaryEmbedding) -> Tensor:
        """`[num_tokens, hidden_size]` → the same shape."""
        qkv = self.qkv_proj(x).view(-1, self.num_all_heads, self.head_dim)
        # Queries and keys lie side by side and are turned in place, by the same operations.
        qk = qkv[:, : self.num_qk_heads]
        rotary_emb(self.normalize_heads(qk), cos, sin, qk)
        y: Tensor = self.o_proj(self.attn(qkv[:, : self.num_heads], qkv[:, self.num_heads :]))
        return y

    def normalize_heads(self, qk: Tensor) -> Tensor:
        """What happens to queries and keys before they are turned: nothing in Llama."""
        return qk


class LlamaDecoderLayer(Layer):
    """Attention and MLP, each with a norm before and a residual around it."""

    attention_cls: ClassVar[type[LlamaAttention]] = LlamaAttention

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, prefix: str) -> None:
        super().__init__()
        self.self_attn = self.attention_cls(config, dtype, device, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(config, dtype, device)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, rotary_emb: RotaryEmbedding
    ) -> tuple[Tensor, Tensor]:
        """`[num_tokens, hidden_size]` each → what is to be added to the residual, and the residual."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos, sin, rotary_emb)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(Layer):
    """The layers of one pipeline stage, with the embedding on the first and the final norm on the last.

    Deviation from vLLM: what belongs to other stages does not exist. There, PPMissingLayer objects hold the places.

    Attributes:
        layers: by their number in the whole model, so that names are the same on every stage and in the checkpoint.
        start_layer, end_layer: first layer of this stage, and the one after its last.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        stage: PipelineStage,
        layer_cls: type[LlamaDecoderLayer],
    ) -> None:
        super().__init__()
        assert config.max_model_len is not None
        self.stage = stage
        self.start_layer, self.end_layer = get_pp_indices(
            config.num_hidden_layers, stage.rank, stage.num_stages
        )
        # With tied weights the embedding is the output head as well.
        if stage.is_first or (stage.is_last and config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleDict(
            {
                str(i): layer_cls(config, dtype, device, f"model.layers.{i}")
                for i in range(self.start_layer, self.end_layer)
            }
        )
        if stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.max_model_len, config.rope_theta, dtype, device
        )
        # A list is quicker to walk than a module of modules.
        self.layer_list: list[LlamaDecoderLayer] = list(self.layers.values())  # type: ignore[arg-type]

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: IntermediateTensors | None
    ) -> Tensor | IntermediateTensors:
        residual: Tensor | None
        if intermediate_tensors is None:
            x, residual = self.embed_tokens(input_ids), None
        else:
            x, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        cos, sin = self.rotary_emb.get_cos_sin(positions)
        for layer in self.layer_list:
            x, residual = layer(x, residual, cos, sin, self.rotary_emb)
        if not self.stage.is_last:
            assert residual is not None
            return IntermediateTensors({"hidden_states": x, "residual": residual})
        y: Tensor = self.norm(x, residual)[0]
        return y


class LlamaForCausalLM(CausalLM):
    """The model with its output head, which only the last pipeline stage has."""

    packed_modules_mapping: ClassVar[dict[str, dict[str | int, str]]] = {
        "qkv_proj": {"q": "q_proj", "k": "k_proj", "v": "v_proj"},
        "gate_up_proj": {0: "gate_proj", 1: "up_proj"},
    }
    layer_cls: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, stage: PipelineStage
    ) -> None:
        super().__init__()
        self.hidden_size, self.dtype, self.device = config.hidden_size, dtype, device
        self.num_hidden_layers = config.num_hidden_layers
        self.model = LlamaModel(config, dtype, device, stage, self.layer_cls)
        if stage.is_last:
            self.lm_head: VocabParallelEmbedding
            if config.tie_word_embeddings:
                self.lm_head = self.model.embed_tokens
            else:
                self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, dtype, device)
            self.logits_processor = LogitsProcessor(config.vocab_size)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: IntermediateTensors | None = None
    ) -> Tensor | IntermediateTensors:
        output: Tensor | IntermediateTensors = self.model(input_ids, positions, intermediate_tensors)
        return output

    def make_empty_intermediate_tensors(self, num_tokens: int) -> IntermediateTensors:
        shape = (num_tokens, self.hidden_size)
        return IntermediateTensors(
            {
                name: torch.zeros(shape, dtype=self.dtype, device=self.device)
                for name in ("hidden_states", "residual")
            }
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def is_pp_missing_parameter(self, name: str) -> bool:
        if not name.startswith("model.layers."):
            return self.model.stage.num_stages > 1 and name.startswith(
                ("model.embed_tokens.", "model.norm.", "lm_head.")
            )
        number = name.split(".")[2]
        if not number.isdecimal() or int(number) >= self.num_hidden_layers:
            return False
        return not self.model.start_layer <= int(number) < self.model.end_layer

    def attention_layers(self) -> Iterator[Attention]:
        return (layer.self_attn.attn for layer in self.model.layer_list)

    def weight_names(self) -> Iterator[tuple[str, Layer, str, str | int | None]]:
        for path, module in self.named_modules():
            if not isinstance(module, Layer):
                continue
            parent, _, leaf = path.rpartition(".")
            for name, _ in module.named_parameters(recurse=False):
                packed = self.packed_modules_mapping.get(leaf)
                if packed is None:
                    yield f"{path}.{name}", module, name, None
                else:
                    for shard_id, part in packed.items():
                        yield f"{parent}.{part}.{name}", module, name, shard_id
