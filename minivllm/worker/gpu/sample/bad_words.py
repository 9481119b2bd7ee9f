"""Words that must not be generated.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/bad_words.py (BadWordsState)
Articles: part 1 §8.2
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu
from minivllm.worker.gpu.states import RequestState

_ANY = -1


class BadWordsState:
    """Forbids the last token of a word when the output ends with the tokens before it.

    Attributes:
        words: slot → prefixes `[num_words, longest prefix]`, aligned to the right and filled up with _ANY, lengths of
            the prefixes `[num_words]`, and last tokens `[num_words]`; all on the device.
    """

    def __init__(self, req_states: RequestState, vocab_size: int) -> None:
        self.req_states = req_states
        self.vocab_size = vocab_size
        self.words: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Returns whether the request has bad words."""
        words = [
            w for w in params.bad_words_token_ids or [] if w and all(0 <= t < self.vocab_size for t in w)
        ]
        if not words:
            self.words.pop(slot, None)
            return False
        longest = max(len(word) for word in words) - 1
        prefixes = np.full((len(words), longest), _ANY, dtype=np.int64)
        for row, word in zip(prefixes, words, strict=True):
            row[longest - len(word) + 1 :] = word[:-1]
        lens = np.array([len(word) - 1 for word in words], np.int64)
        last = np.array([word[-1] for word in words], np.int64)
        device = self.req_states.all_token_ids.device
        self.words[slot] = (
            async_copy_to_gpu(prefixes, device),
            async_copy_to_gpu(lens, device),
            async_copy_to_gpu(last, device),
        )
        return True

    def apply_bad_words(self, logits: Tensor, rows: np.ndarray, slots: np.ndarray, lens: Tensor) -> None:
        """Set the forbidden tokens of the given rows to -inf, in place.

        Args:
            logits: `[num_reqs, vocab_size]`.
            rows, slots: `[n]` rows with bad words, and their slots.
            lens: `[n]` the number of tokens they have so far; on the device, since nobody else may know it.
        """
        for i, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
            prefixes, prefix_lens, last = self.words[slot]
            length = lens[i : i + 1]
            # The positions of the last tokens; in front of the first there is nothing to compare, and no prefix fits.
            position = length + torch.arange(-prefixes.shape[1], 0, device=logits.device)
            recent = self.req_states.all_token_ids.gpu[slot].index_select(0, position.clamp(min=0))
            matches = ((prefixes == recent) | (prefixes == _ANY)).all(dim=-1)
            # Only the output is looked at: the prompt may hold the word's first half.
            matches &= prefix_lens <= length - int(self.req_states.prompt_len.np[slot])
            penalty = torch.zeros(matches.shape, dtype=logits.dtype, device=logits.device)
            penalty.masked_fill_(matches, float("-inf"))
            logits[row].index_add_(0, last, penalty)
