"""Penalties on tokens that a request has already seen.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/penalties.py (PenaltiesState)
Articles: part 1 §8.2
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu.buffer_utils import UvaBackedTensor, zeros


class PenaltiesState:
    """Counts per slot, kept on the device and brought up to date token by token.

    Attributes:
        in_prompt: `[max_num_reqs, vocab_size]` bool.
        output_counts: `[max_num_reqs, vocab_size]` int32.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        self.repetition = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.presence = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.frequency = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.in_prompt = zeros((max_num_reqs, vocab_size), torch.bool, device)
        self.output_counts = zeros((max_num_reqs, vocab_size), torch.int32, device)
        self.use_penalty = np.zeros(max_num_reqs, dtype=bool)
        self.device = device

    def add_request(self, slot: int, params: SamplingParams, prompt: list[int], output: list[int]) -> bool:
        """Args:
            output: tokens generated before a preemption.

        Returns:
            Whether the request uses penalties.
        """
        uses = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self.use_penalty[slot] = uses
        if uses:
            self.repetition.np[slot] = params.repetition_penalty
            self.presence.np[slot] = params.presence_penalty
            self.frequency.np[slot] = params.frequency_penalty
            self.in_prompt[slot].zero_()
            self.in_prompt[slot, torch.tensor(prompt, dtype=torch.int64).to(self.device)] = True
            vocab_size = self.output_counts.shape[-1]
            counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab_size)
            self.output_counts[slot].copy_(counts)
        return bool(uses)

    def apply_staged_writes(self) -> None:
        for table in (self.repetition, self.presence, self.frequency):
            table.copy_to_uva()

    def apply_penalties(
        self, logits: Tensor, rows: Tensor, slots: Tensor, drafts: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Change the logits of the given rows in place.

        Args:
            logits: `[num_reqs, vocab_size]`.
            rows, slots: `[n]` rows of `logits` that use penalties, and their slots.
            drafts: tokens that are to be counted in some rows only, as pairs of row and token, `[m]` each.
        """
        chosen = logits.index_select(0, rows)
        counts = self.output_counts.index_select(0, slots)
        if drafts is not None:
            one = torch.ones(1, dtype=torch.int32, device=self.device)
            counts.index_put_((torch.searchsorted(rows, drafts[0]), drafts[1]), one, accumulate=True)
        in_output = counts > 0
        seen = self.in_prompt.index_select(0, slots).logical_or_(in_output)
        repetition = self.repetition.gpu.index_select(0, slots).view(-1, 1)
        factor = torch.where(chosen > 0, 1 / repetition, repetition)
        chosen = torch.where(seen, chosen * factor, chosen)
        chosen -= counts * self.frequency.gpu.index_select(0, slots).view(-1, 1)
        chosen -= in_output * self.presence.gpu.index_select(0, slots).view(-1, 1)
        logits.index_copy_(0, rows, chosen)

    def count(self, slots: Tensor, token_ids: Tensor, stands: Tensor | None = None) -> None:
        """Count the tokens that the given slots have just got; all `[n]`, where `stands` is false nothing is counted."""
        if stands is None:
            stands = torch.ones(1, device=self.device)
        self.output_counts.index_put_((slots, token_ids), stands.to(torch.int32), accumulate=True)
