"""The files of a Hugging Face checkpoint directory, written so that transformers 4 and 5, vLLM and minivllm read them.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minivllm.assets.corpus import END_OF_TEXT, end_of_text_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BUNDLED = Path(__file__).with_name("tiny-qwen3")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}


def make_config(
    *,
    architecture: str,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    vocab_size: int,
    tie_word_embeddings: bool,
    max_position_embeddings: int,
    rope_theta: float,
    rms_norm_eps: float,
    attention_bias: bool,
    dtype: str,
    end_of_text: int,
) -> dict[str, Any]:
    """The contents of config.json, in the keys of transformers 4 and 5 and of vLLM."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.02,
        "rms_norm_eps": rms_norm_eps,
        "use_cache": True,
        "tie_word_embeddings": tie_word_embeddings,
        # transformers 4 and vLLM read rope_theta, transformers 5 reads rope_parameters (and rope_theta without it).
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "attention_bias": attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
        # transformers 4 and vLLM read torch_dtype, transformers 5 dtype.
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if architecture == "Qwen3ForCausalLM":
        config |= {
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": num_hidden_layers,
        }
    else:
        config |= {"mlp_bias": False, "pretraining_tp": 1}
    return config


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Replace `path` in one step: a reader of a running training's directory never sees half a file."""
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    # safetensors leaves the file readable by its owner only, unlike every other file of the directory.
    partial.chmod(0o644)
    os.replace(partial, path)


def write_weights(path: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """Write one safetensors file, or `shards` of them and the index that names the file of each tensor."""
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot be written to {shards} shards")
    names = list(tensors)
    # Round robin puts neighbouring tensors in different files, which a loader must not mind.
    contents = {
        f"model-{number + 1:05d}-of-{shards:05d}.safetensors": names[number::shards]
        for number in range(shards)
    }
    if shards == 1:
        contents = {"model.safetensors": names}
    index = path / "model.safetensors.index.json"
    for old in (*path.glob("model*.safetensors"), index):
        if old.name not in contents:
            old.unlink(missing_ok=True)
    for file, held in contents.items():
        _save_file({name: tensors[name] for name in held}, path / file)
    if shards > 1:
        total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: file for file, held in contents.items() for name in held}
        write_json(index, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def write_tokenizer(path: Path, tokenizer: Tokenizer, model_max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json to the directory `path`."""
    tokenizer.save(str(path / "tokenizer.json"))
    end_of_text = end_of_text_id(tokenizer)
    special = {
        "content": END_OF_TEXT,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {str(end_of_text): special},
            "bos_token": None,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model_max_length,
        },
    )
    write_json(path / "generation_config.json", {"eos_token_id": end_of_text, "pad_token_id": end_of_text})
