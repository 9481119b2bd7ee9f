"""Logits that a request changes by itself: biases, and no end before min_tokens.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/logit_bias.py (LogitBiasState)
Articles: part 1 §8.2
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu


class LogitBiasState:
    """Token ids and values per slot; only slots that use them are ever looked at.

    Args:
        eos_token_ids: suppressed, like a request's own stop tokens, until it has min_tokens.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.stop_token_ids: dict[int, np.ndarray] = {}
        self.min_lens = np.zeros(max_num_reqs, dtype=np.int64)

    def add_request(self, slot: int, params: SamplingParams, prompt_len: int) -> bool:
        """Returns whether the request has biases or a minimum length."""
        self.bias.pop(slot, None)
        self.stop_token_ids.pop(slot, None)
        self.min_lens[slot] = prompt_len + params.min_tokens
        bias = {t: v for t, v in (params.logit_bias or {}).items() if 0 <= t < self.vocab_size}
        if bias:
            self.bias[slot] = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        if params.min_tokens:
            stop = {*self.eos_token_ids, *(params.stop_token_ids or [])}
            self.stop_token_ids[slot] = np.array([t for t in stop if 0 <= t < self.vocab_size], np.int64)
        return bool(bias) or params.min_tokens > 0

    def apply_logit_bias(self, logits: Tensor, rows: np.ndarray, slots: np.ndarray, lens: Tensor) -> None:
        """Change the logits of the given rows in place.

        Args:
            logits: `[num_reqs, vocab_size]`.
            rows, slots: `[n]` rows that use this, and their slots.
            lens: `[n]` the number of tokens they have so far; on the device, since nobody else may know it.
        """
        device, vocab_size = logits.device, logits.shape[-1]
        biases = [
            (row, *self.bias[slot])
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True)
            if slot in self.bias
        ]
        if biases:
            entry = np.concatenate([tokens + row * vocab_size for row, tokens, _ in biases])
            values = np.concatenate([bias for _, _, bias in biases])
            logits.view(-1).index_add_(0, async_copy_to_gpu(entry, device), async_copy_to_gpu(values, device))
        stops = [
            (i, int(rows[i]), self.stop_token_ids[slot])
            for i, slot in enumerate(slots.tolist())
            if slot in self.stop_token_ids
        ]
        if stops:
            entry = np.concatenate([tokens + row * vocab_size for _, row, tokens in stops])
            each = np.concatenate([np.full(len(tokens), i) for i, _, tokens in stops])
            too_short = lens < async_copy_to_gpu(self.min_lens[slots], device)
            penalty = torch.zeros(len(slots), dtype=logits.dtype, device=device)
            penalty.masked_fill_(too_short, float("-inf"))
            logits.view(-1).index_add_(
                0, async_copy_to_gpu(entry, device), penalty.index_select(0, async_copy_to_gpu(each, device))
            )
