"""Model loaders.

vLLM 0.25.1: vllm/model_executor/model_loader/__init__.py (get_model_loader)
Articles: part 1 §8.2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.model_executor.model_loader.default_loader import DefaultModelLoader


def get_model_loader() -> DefaultModelLoader:
    """The loader for local safetensors checkpoints, the only format there is."""
    from minivllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return DefaultModelLoader()
