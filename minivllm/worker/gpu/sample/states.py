"""Sampling settings per slot.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/states.py (SamplingStates)
Articles: part 1 §8.2
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu.buffer_utils import UvaBackedTensor
from minivllm.worker.gpu.sample.gumbel import gumbel_sample
from minivllm.worker.gpu.sample.min_p import apply_min_p
from minivllm.worker.gpu.sample.top_k_top_p import apply_top_k_top_p

NO_LOGPROBS = -1


class SamplingStates:
    """Temperature and the like, `[max_num_reqs]` each; `np` twins tell without a look at the device what is in use.

    Args:
        seed: the engine's; requests without a seed of their own derive theirs from it.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, seed: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.temperature = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.top_k = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.top_p = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.min_p = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.seeds = UvaBackedTensor(max_num_reqs, torch.int64, device)
        self.num_logprobs = np.full(max_num_reqs, NO_LOGPROBS, dtype=np.int32)

    def add_request(self, req_id: str, slot: int, params: SamplingParams) -> None:
        self.temperature.np[slot] = 0 if params.is_greedy else params.temperature
        top_k = params.top_k
        self.top_k.np[slot] = top_k if 0 < top_k < self.vocab_size else self.vocab_size
        self.top_p.np[slot] = params.top_p
        self.min_p.np[slot] = params.min_p
        self.seeds.np[slot] = derive_seed(self.seed, req_id) if params.seed is None else params.seed
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs

    def apply_staged_writes(self) -> None:
        for table in (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds):
            table.copy_to_uva()

    def sample(self, logits: Tensor, slots: Tensor, slots_np: np.ndarray, positions: Tensor) -> Tensor:
        """Draw one token per row, `[n]` int64.

        Args:
            logits: `[n, vocab_size]`; overwritten.
            slots, slots_np: `[n]`.
            positions: `[n]` position of the token to be drawn.
        """
        temperature = self.temperature.gpu.index_select(0, slots)
        logits.div_(torch.where(temperature > 0, temperature, 1).view(-1, 1))
        if self.min_p.np[slots_np].any():
            apply_min_p(logits, self.min_p.gpu.index_select(0, slots))
        top_k_np = self.top_k.np[slots_np]
        max_top_k = int(top_k_np.max())
        apply_top_k_top_p(
            logits,
            self.top_k.gpu.index_select(0, slots) if top_k_np.min() < self.vocab_size else None,
            self.top_p.gpu.index_select(0, slots) if self.top_p.np[slots_np].min() < 1 else None,
            max_top_k,
        )
        return gumbel_sample(logits, temperature, self.seeds.gpu.index_select(0, slots), positions)


def derive_seed(engine_seed: int, req_id: str) -> int:
    """The seed of a request that brings none: the same on all ranks and in every run with the same requests."""
    digest = hashlib.blake2b(f"{engine_seed}/{req_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
