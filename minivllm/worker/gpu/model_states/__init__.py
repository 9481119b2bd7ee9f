"""State that only some kinds of models need.

vLLM 0.25.1: vllm/v1/worker/gpu/model_states/__init__.py (init_model_state)
Articles: part 1 §8.2
"""

from __future__ import annotations

import torch

from minivllm.config import VllmConfig
from minivllm.worker.gpu.model_states.default import DefaultModelState
from minivllm.worker.gpu.model_states.interface import ModelState


def init_model_state(vllm_config: VllmConfig, dtype: torch.dtype, device: torch.device) -> ModelState:
    """The state of the configured model. Dense decoders, the only models there are, all take the default."""
    return DefaultModelState(vllm_config, dtype, device)
