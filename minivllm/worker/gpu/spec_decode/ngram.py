"""Proposals from the text itself: what followed the last tokens when they occurred before.

vLLM 0.25.1: vllm/v1/spec_decode/ngram_proposer.py (NgramProposer), ngram_proposer_gpu.py
Articles: part 2 §2.3.6
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.config.speculative import SpeculativeConfig
from minivllm.worker.gpu.input_batch import InputBatch
from minivllm.worker.gpu.spec_decode.speculator import Speculator
from minivllm.worker.gpu.states import RequestState


class NgramSpeculator(Speculator):
    """Costs no forward pass, and is right where texts repeat themselves: code, quotations, summaries."""

    method = "ngram"

    def __init__(self, config: SpeculativeConfig, req_states: RequestState) -> None:
        super().__init__(config.num_speculative_tokens, req_states)
        self.max_ngram = config.prompt_lookup_max
        self.min_ngram = config.prompt_lookup_min

    def propose(self, batch: InputBatch) -> tuple[Tensor, Tensor]:
        states, slots = self.req_states, batch.idx_mapping
        # Everything computed, and the token sampled last.
        lens = states.num_computed_tokens.gpu.index_select(0, slots) + 1
        longest = int(batch.seq_lens_np.max()) + 1
        tokens = states.all_token_ids.gpu.narrow(1, 0, longest).index_select(0, slots)
        return propose_ngram(tokens, lens, self.min_ngram, self.max_ngram, self.num_speculative_tokens)


def propose_ngram(
    tokens: Tensor, lens: Tensor, min_ngram: int, max_ngram: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Find the longest repetition of each row's end, the first one if there are several, and return what follows it.

    Deviation from vLLM: on the device, all rows at once, so that the tokens need not come to the CPU first. The
    result is that of vLLM's search.

    Args:
        tokens: `[n, longest]`; what stands behind a row's end does not matter.
        lens: `[n]` tokens of each row.

    Returns:
        `[n, num_tokens]` tokens, and how many of each row count, `[n]`; 0 stands behind them.
    """
    n, longest = tokens.shape
    position = torch.arange(longest, device=tokens.device)
    last = (lens - 1).view(-1, 1)
    # A repetition ends before the row's last token, or nothing would follow it.
    matches = position < last
    length = torch.zeros_like(tokens)
    for back in range(min(max_ngram, longest)):
        wanted = tokens.gather(1, (last - back).clamp(min=0))
        shifted = tokens.new_full((n, longest), -1)
        shifted[:, back:] = tokens[:, : longest - back]
        matches = matches & (shifted == wanted) & (last >= back)
        length += matches
    # Longer wins; among equals, the smaller position.
    score = torch.where(length >= min_ngram, length.long() * longest + (longest - 1 - position), -1)
    best, end = score.max(dim=1, keepdim=True)
    follows = end + 1 + torch.arange(num_tokens, device=tokens.device)
    counts = torch.where(best >= 0, (last - end).clamp(max=num_tokens), 0).view(-1)
    found = tokens.gather(1, follows.clamp(max=longest - 1))
    return found.masked_fill(follows > end + counts.view(-1, 1), 0), counts
