"""Which draft tokens stand, and which token comes after them.

vLLM 0.25.1: vllm/v1/worker/gpu/spec_decode/rejection_sampler.py (RejectionSampler)
Articles: part 1 §8.2, part 2 §2.3.6

The target model gave logits for each position that a draft token would take, and for the one after them. At each of
them the sampler chooses as it always does; a draft token stands when it is the token chosen, and where the first one
does not, the token chosen takes its place (it is the recovered token). When all stand, the last choice is a bonus.

Deviation from vLLM: there, a random number decides whether a draft token stands, with the probability
min(1, target / draft), and another one draws the recovered token from what is left of the target's distribution. Here
both are one draw: the sampler's noise depends on seed and position alone, so that its choice is a token of the
target's distribution which does not know the draft. Given that the draft token was not chosen, the choice is
distributed as the rest of the target's distribution, which is what a recovered token has to be. A proposal without
randomness stands with the same probability as in vLLM; a draft model draws with the same noise, which makes it agree
with the target about as often. What comes out are not only tokens of the right distribution, but the very tokens that
the same seed gives without speculation.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu
from minivllm.worker.gpu.input_batch import InputBatch
from minivllm.worker.gpu.sample.output import LogprobsTensors, SamplerOutput
from minivllm.worker.gpu.sample.sampler import LOGPROBS, PENALTIES, Sampler

NO_TOKEN = -1


class RejectionSampler:
    """A sampler for steps that verify drafts. Steps without any go straight to the sampler inside."""

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        self.sampler = sampler
        self.device = device

    def __call__(self, logits: Tensor, batch: InputBatch) -> SamplerOutput:
        """Choose one token or more for each row.

        Args:
            logits: `[num_logits, vocab_size]`, for each row of the batch 1 + its number of drafts; may be overwritten.
        """
        num_drafts_np = batch.num_draft_tokens_np
        if num_drafts_np is None:
            return self.sampler(logits, batch)
        assert batch.logits_indices is not None
        num_logits_np = num_drafts_np + 1
        last_np = np.cumsum(num_logits_np) - 1
        first_np = last_np - num_drafts_np
        rows = expand_batch(batch, num_logits_np, first_np)
        # The input at a row's n-th logits is its n-th draft, except for n = 0, where it is a token that stands.
        inputs = batch.input_ids.index_select(0, batch.logits_indices)
        row_needs = self.sampler.needs[rows.idx_mapping_np]
        needs = int(np.bitwise_or.reduce(row_needs))
        raw_logits, sampled = self.sampler.choose(
            logits, rows, row_needs, self._drafts_before(inputs, row_needs, num_logits_np)
        )

        # `[num_reqs, 1 + most drafts]`, shorter rows filled up with their last entry.
        column = np.arange(num_logits_np.max())
        entry = async_copy_to_gpu(np.minimum(first_np[:, None] + column, last_np[:, None]), self.device)
        chosen = sampled[entry]
        is_draft = async_copy_to_gpu(column[1:] <= num_drafts_np[:, None], self.device)
        stands = (chosen[:, :-1] == inputs[entry][:, 1:]) & is_draft
        num_accepted = stands.long().cumprod(dim=1).sum(dim=1)
        kept = async_copy_to_gpu(column, self.device) <= num_accepted.view(-1, 1)
        output = SamplerOutput(
            chosen.gather(1, num_accepted.view(-1, 1)).view(-1),
            token_ids=torch.where(kept, chosen, NO_TOKEN),
            num_rejected=async_copy_to_gpu(num_drafts_np, self.device) - num_accepted,
        )
        if needs & PENALTIES:
            local = async_copy_to_gpu(
                np.arange(len(rows.req_ids)) - np.repeat(first_np, num_logits_np), self.device
            )
            limit = num_accepted.repeat_interleave(async_copy_to_gpu(num_logits_np, self.device))
            self.sampler.count(rows, row_needs, sampled, local <= limit)
        if needs & LOGPROBS:
            output.logprobs = self._logprobs(raw_logits, sampled, batch, first_np, num_logits_np)
        return output

    def _drafts_before(
        self, inputs: Tensor, row_needs: np.ndarray, num_logits_np: np.ndarray
    ) -> tuple[Tensor, Tensor] | None:
        """For penalties: which drafts come before which rows of the logits, as pairs of row and token."""
        where: list[int] = []
        which: list[int] = []
        start = 0
        for count in num_logits_np.tolist():
            if row_needs[start] & PENALTIES:
                for local in range(1, count):
                    where += [start + local] * local
                    which += range(start + 1, start + local + 1)
            start += count
        if not where:
            return None
        tokens = inputs.index_select(0, async_copy_to_gpu(np.array(which), self.device))
        return async_copy_to_gpu(np.array(where), self.device), tokens

    def _logprobs(
        self,
        raw_logits: Tensor,
        sampled: Tensor,
        batch: InputBatch,
        first_np: np.ndarray,
        num_logits_np: np.ndarray,
    ) -> dict[str, LogprobsTensors]:
        """Request → rows for all its positions; those after the last token that stands are cut off by the scheduler."""
        needs = self.sampler.needs[batch.idx_mapping_np]
        wanted = np.flatnonzero((needs & LOGPROBS > 0) & batch.is_sampled_np).tolist()
        return {
            batch.req_ids[row]: self.sampler.compute_logprobs(
                raw_logits.narrow(0, int(first_np[row]), int(num_logits_np[row])),
                sampled.narrow(0, int(first_np[row]), int(num_logits_np[row])),
                int(batch.idx_mapping_np[row]),
            )
            for row in wanted
        }


def expand_batch(batch: InputBatch, num_logits_np: np.ndarray, first_np: np.ndarray) -> InputBatch:
    """The batch as the sampler is to see it: a row for each position that gets a token."""
    assert batch.logits_indices is not None
    row_np = np.repeat(np.arange(batch.num_reqs), num_logits_np)
    local_np = np.arange(len(row_np)) - first_np[row_np]
    drafts_after_np = num_logits_np[row_np] - 1 - local_np
    return dataclasses.replace(
        batch,
        req_ids=[batch.req_ids[row] for row in row_np],
        num_reqs=len(row_np),
        idx_mapping=batch.token_slots.index_select(0, batch.logits_indices),
        idx_mapping_np=batch.idx_mapping_np[row_np],
        seq_lens=batch.positions.index_select(0, batch.logits_indices) + 1,
        seq_lens_np=batch.seq_lens_np[row_np] - drafts_after_np,
        is_sampled_np=batch.is_sampled_np[row_np],
        num_draft_tokens_np=None,
    )
