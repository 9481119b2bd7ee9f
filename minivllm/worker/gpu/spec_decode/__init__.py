"""Speculative decoding: propose tokens cheaply, verify them all in one forward pass.

vLLM 0.25.1: vllm/v1/worker/gpu/spec_decode/__init__.py (init_speculator)
Articles: part 2 §2.3.6
"""

from __future__ import annotations

import torch

from minivllm.config import VllmConfig
from minivllm.worker.gpu.sample.states import SamplingStates
from minivllm.worker.gpu.spec_decode.speculator import Speculator
from minivllm.worker.gpu.states import RequestState


def init_speculator(
    vllm_config: VllmConfig, req_states: RequestState, sampling_states: SamplingStates, device: torch.device
) -> Speculator | None:
    """The speculator that the configuration asks for; None when nothing is speculated."""
    speculative_config = vllm_config.speculative_config
    if speculative_config is None:
        return None
    if speculative_config.method == "ngram":
        from minivllm.worker.gpu.spec_decode.ngram import NgramSpeculator

        return NgramSpeculator(speculative_config, req_states)
    from minivllm.worker.gpu.spec_decode.draft_model import DraftModelSpeculator

    return DraftModelSpeculator(vllm_config, req_states, sampling_states, device)
