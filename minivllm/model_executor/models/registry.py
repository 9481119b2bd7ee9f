"""From the architecture in config.json to the class that implements it.

vLLM 0.25.1: vllm/model_executor/models/registry.py (ModelRegistry)
Articles: part 1 §8.2
"""

from __future__ import annotations

import importlib

from minivllm.config.model import SUPPORTED_ARCHITECTURES
from minivllm.exceptions import ConfigError
from minivllm.model_executor.models.interfaces import CausalLM

_MODELS: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
}


def resolve_model_cls(architecture: str) -> type[CausalLM]:
    """The class of an architecture. Raises ConfigError when there is none."""
    if architecture not in _MODELS:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    module, name = _MODELS[architecture]
    model_cls: type[CausalLM] = getattr(
        importlib.import_module(f"minivllm.model_executor.models.{module}"), name
    )
    return model_cls
