"""From logits to tokens.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/sampler.py (Sampler)
Articles: part 1 §8.2, §8.3
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from minivllm.core.sched.output import NewRequestData
from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu
from minivllm.worker.gpu.input_batch import InputBatch
from minivllm.worker.gpu.sample.bad_words import BadWordsState
from minivllm.worker.gpu.sample.gumbel import greedy_sample
from minivllm.worker.gpu.sample.logit_bias import LogitBiasState
from minivllm.worker.gpu.sample.logprob import compute_topk_logprobs
from minivllm.worker.gpu.sample.output import LogprobsTensors, SamplerOutput
from minivllm.worker.gpu.sample.penalties import PenaltiesState
from minivllm.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates
from minivllm.worker.gpu.states import RequestState

RANDOM: Final = 1
LOGPROBS: Final = 2
LOGIT_BIAS: Final = 4
PENALTIES: Final = 8
BAD_WORDS: Final = 16


class Sampler:
    """Applies what each request asks for and chooses a token per row.

    Deviation from vLLM: one word of flags per slot says what the request needs, so that a batch of plain greedy
    requests is recognised by one look and costs one argmax.

    Attributes:
        needs: `[max_num_reqs]` flags by slot.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        req_states: RequestState,
        eos_token_ids: list[int],
        seed: int,
    ) -> None:
        self.device = device
        self.needs = np.zeros(max_num_reqs, dtype=np.int32)
        self.sampling_states = SamplingStates(max_num_reqs, vocab_size, seed, device)
        self.penalties_state = PenaltiesState(max_num_reqs, vocab_size, device)
        self.logit_bias_state = LogitBiasState(max_num_reqs, vocab_size, eos_token_ids)
        self.bad_words_state = BadWordsState(req_states, vocab_size)

    def add_request(self, slot: int, request: NewRequestData) -> None:
        """Take over a request's settings. Visible on the device after apply_staged_writes."""
        params, prompt_len = request.sampling_params, len(request.prompt_token_ids)
        self.sampling_states.add_request(request.req_id, slot, params)
        output = request.prefill_token_ids[prompt_len:]
        needs = 0 if params.is_greedy else RANDOM
        if params.logprobs is not None:
            needs |= LOGPROBS
        if self.logit_bias_state.add_request(slot, params, prompt_len):
            needs |= LOGIT_BIAS
        if self.penalties_state.add_request(slot, params, request.prompt_token_ids, output):
            needs |= PENALTIES
        if self.bad_words_state.add_request(slot, params):
            needs |= BAD_WORDS
        self.needs[slot] = needs

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()
        self.penalties_state.apply_staged_writes()

    def __call__(self, logits: Tensor, batch: InputBatch) -> SamplerOutput:
        """Choose a token for each row; rows whose prompt is not done yet get one that means nothing.

        Args:
            logits: `[num_reqs, vocab_size]` float32; may be overwritten.
        """
        slots_np = batch.idx_mapping_np
        row_needs = self.needs[slots_np]
        needs = int(np.bitwise_or.reduce(row_needs))
        if not needs:
            return SamplerOutput(greedy_sample(logits))
        raw_logits, sampled = self.choose(logits, batch, row_needs)
        if needs & PENALTIES:
            self.count(batch, row_needs, sampled)
        output = SamplerOutput(sampled)
        if needs & LOGPROBS:
            rows = np.flatnonzero((row_needs & LOGPROBS > 0) & batch.is_sampled_np)
            output.logprobs = self._logprobs(raw_logits, sampled, batch, rows)
        return output

    def choose(
        self,
        logits: Tensor,
        batch: InputBatch,
        row_needs: np.ndarray,
        drafts: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A token for each row, `[n]`, after the logits as the model gave them, `[n, vocab_size]`, for log-probabilities.

        Args:
            row_needs: `[n]` flags.
            drafts: tokens that penalties count although they may not stand; pairs of row and token.
        """
        slots_np = batch.idx_mapping_np
        needs = int(np.bitwise_or.reduce(row_needs))
        raw_logits = logits.clone() if needs & LOGPROBS and needs != LOGPROBS else logits
        if needs & LOGIT_BIAS:
            rows = np.flatnonzero(row_needs & LOGIT_BIAS)
            lens = batch.seq_lens.index_select(0, async_copy_to_gpu(rows, self.device))
            self.logit_bias_state.apply_logit_bias(logits, rows, slots_np[rows], lens)
        if needs & PENALTIES:
            rows = np.flatnonzero(row_needs & PENALTIES)
            rows_gpu = async_copy_to_gpu(rows, self.device)
            self.penalties_state.apply_penalties(
                logits, rows_gpu, batch.idx_mapping.index_select(0, rows_gpu), drafts
            )
        if needs & BAD_WORDS:
            rows = np.flatnonzero(row_needs & BAD_WORDS)
            lens = batch.seq_lens.index_select(0, async_copy_to_gpu(rows, self.device))
            self.bad_words_state.apply_bad_words(logits, rows, slots_np[rows], lens)
        if needs & RANDOM:
            return raw_logits, self.sampling_states.sample(
                logits, batch.idx_mapping, slots_np, batch.seq_lens
            )
        return raw_logits, greedy_sample(logits)

    def count(
        self, batch: InputBatch, row_needs: np.ndarray, sampled: Tensor, stands: Tensor | None = None
    ) -> None:
        """Tell the penalties what was sampled; `stands` `[n]` says of which rows it is kept (None: of all)."""
        rows = np.flatnonzero((row_needs & PENALTIES > 0) & batch.is_sampled_np)
        rows_gpu = async_copy_to_gpu(rows, self.device)
        self.penalties_state.count(
            batch.idx_mapping.index_select(0, rows_gpu),
            sampled.index_select(0, rows_gpu),
            None if stands is None else stands.index_select(0, rows_gpu),
        )

    def compute_logprobs(self, logits: Tensor, token_ids: Tensor, slot: int) -> LogprobsTensors:
        """Those that one request asks for, `[n]` positions of it."""
        return compute_topk_logprobs(logits, int(self.sampling_states.num_logprobs[slot]), token_ids)

    def _logprobs(
        self, logits: Tensor, sampled: Tensor, batch: InputBatch, rows: np.ndarray
    ) -> dict[str, LogprobsTensors]:
        if not len(rows):
            return {}
        numbers = self.sampling_states.num_logprobs[batch.idx_mapping_np[rows]]
        assert NO_LOGPROBS not in numbers
        rows_gpu = async_copy_to_gpu(rows, self.device)
        tensors = compute_topk_logprobs(
            logits.index_select(0, rows_gpu), int(numbers.max()), sampled.index_select(0, rows_gpu)
        )
        return {
            batch.req_ids[row]: tensors.row(i, k)
            for i, (row, k) in enumerate(zip(rows.tolist(), numbers.tolist(), strict=True))
        }
