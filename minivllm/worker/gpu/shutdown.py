"""Give back what a runner holds.

vLLM 0.25.1: vllm/v1/worker/gpu/shutdown.py (free_before_shutdown)
Articles: part 2 §2.4.6
"""

from __future__ import annotations

from torch import Tensor

from minivllm.model_executor.models.interfaces import CausalLM


def free_before_shutdown(model: CausalLM | None, kv_caches: list[Tensor]) -> None:
    """Drop the KV cache; layers would keep it alive, and with it the memory of an engine in the caller's process."""
    if model is not None:
        for layer in model.attention_layers():
            layer.bind_kv_cache(None)
    kv_caches.clear()
