"""Checkpoints with random weights, of any shape, for tests and benchmarks.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from minivllm.assets.checkpoint_files import (
    BUNDLED,
    DTYPES,
    MODEL_TYPES,
    TOKENIZER_FILES,
    make_config,
    write_json,
    write_weights,
)
from minivllm.assets.corpus import end_of_text_id

_SMALL = {"intermediate_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 1024}
PRESETS: dict[str, dict[str, Any]] = {
    # 1.1 M parameters; the shape of the benchmarks.
    "qwen3-1m": {
        "hidden_size": 128,
        "intermediate_size": 288,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-gqa1": dict(
        _SMALL, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "qwen3-gqa2": dict(
        _SMALL,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        tie_word_embeddings=True,
    ),
    "qwen3-gqa4": dict(
        _SMALL,
        hidden_size=64,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=8,
        tie_word_embeddings=True,
    ),
    # Two key/value heads: each is replicated when TP is 4.
    "qwen3-kv2": dict(
        _SMALL,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    ),
    "qwen3-untied": dict(
        _SMALL,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=False,
    ),
    # transformers gives o_proj a bias too; vLLM 0.25.1 does not, and cannot load this one.
    "qwen3-bias": dict(
        _SMALL,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        attention_bias=True,
        rope_theta=1_000_000.0,
    ),
    "llama-gqa1": dict(
        _SMALL,
        architecture="LlamaForCausalLM",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "llama-gqa2": dict(
        _SMALL,
        architecture="LlamaForCausalLM",
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
    ),
}


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights in float32 whose greedy choice is far from a tie and depends on every tensor.

    The embedding is small next to what the layers add. With tied embeddings it would otherwise decide alone, and
    the model would repeat its last token whatever its layers do.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    inner = config["intermediate_size"]
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        tensors[name] = torch.randn(rows, columns, generator=generator) * (gain * columns**-0.5)

    def vector(name: str, size: int, centre: float, spread: float) -> None:
        tensors[name] = centre + spread * torch.randn(size, generator=generator)

    matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=3.0)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        vector(f"{layer}.input_layernorm.weight", hidden, 1.0, 0.1)
        for name, rows, columns, gain in (
            ("q_proj", query, hidden, 1.5),
            ("k_proj", kv, hidden, 1.5),
            ("v_proj", kv, hidden, 1.5),
            ("o_proj", hidden, query, 1.5),
        ):
            matrix(f"{layer}.self_attn.{name}.weight", rows, columns, gain)
            if config["attention_bias"]:
                vector(f"{layer}.self_attn.{name}.bias", rows, 0.0, 0.3)
        if config["model_type"] == "qwen3":
            vector(f"{layer}.self_attn.q_norm.weight", head_dim, 1.2, 0.2)
            vector(f"{layer}.self_attn.k_norm.weight", head_dim, 1.2, 0.2)
        vector(f"{layer}.post_attention_layernorm.weight", hidden, 1.0, 0.1)
        matrix(f"{layer}.mlp.gate_proj.weight", inner, hidden, 1.5)
        matrix(f"{layer}.mlp.up_proj.weight", inner, hidden, 1.5)
        matrix(f"{layer}.mlp.down_proj.weight", hidden, inner, 1.5)
    vector("model.norm.weight", hidden, 1.0, 0.1)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, gain=3.0)
    return tensors


def make_random_checkpoint(
    path: str | os.PathLike[str],
    *,
    architecture: Literal["Qwen3ForCausalLM", "LlamaForCausalLM"] = "Qwen3ForCausalLM",
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    tie_word_embeddings: bool,
    max_position_embeddings: int = 1024,
    rope_theta: float = 10000.0,
    rms_norm_eps: float = 1e-6,
    attention_bias: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 1,
) -> Path:
    """Write a checkpoint with random weights to the directory `path`, and return it.

    The same arguments give the same bytes. `head_dim` defaults to `hidden_size // num_attention_heads`, `vocab_size`
    to that of the bundled tokenizer, whose files are copied. `shards` above 1 writes that many safetensors files and
    `model.safetensors.index.json`.

    Raises:
        ValueError: an unknown architecture or dtype, query heads that the key/value heads do not divide, an odd
            head size, or a vocabulary smaller than the tokenizer's.
    """
    from tokenizers import Tokenizer

    if architecture not in MODEL_TYPES:
        raise ValueError(f"architecture {architecture!r} is not one of {', '.join(MODEL_TYPES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"{num_attention_heads} query heads cannot share {num_key_value_heads} key/value heads evenly"
        )
    if head_dim is None:
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden size {hidden_size} does not divide by {num_attention_heads} heads: give head_dim"
            )
        head_dim = hidden_size // num_attention_heads
    if head_dim % 2:
        raise ValueError(f"head size {head_dim} is odd, but rotary embeddings turn pairs of dimensions")
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    if vocab_size is None:
        vocab_size = tokenizer.get_vocab_size()
    if vocab_size < tokenizer.get_vocab_size():
        raise ValueError(
            f"vocabulary size {vocab_size} is below the tokenizer's {tokenizer.get_vocab_size()}"
        )
    config = make_config(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        tie_word_embeddings=tie_word_embeddings,
        max_position_embeddings=max_position_embeddings,
        rope_theta=rope_theta,
        rms_norm_eps=rms_norm_eps,
        attention_bias=attention_bias,
        dtype=dtype,
        end_of_text=end_of_text_id(tokenizer),
    )
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(BUNDLED / name, directory / name)
    write_json(directory / "config.json", config)
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in _random_weights(config, seed).items()}
    write_weights(directory, weights, shards)
    return directory
