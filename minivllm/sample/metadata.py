"""What V1's sampler needs of a batch.

vLLM 0.25.1: vllm/v1/sample/metadata.py (SamplingMetadata)
Articles: part 1 §7
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class SamplingMetadata:
    """What the sampler needs of the batch, on the device, row by row; made anew whenever a row has changed hands.

    Attributes:
        temperature, seeds: `[num_reqs]`; None when all are greedy.
        top_k, top_p, min_p: `[num_reqs]`; None when nobody asks.
        max_top_k: the largest entry of top_k.
        repetition_penalties, presence_penalties, frequency_penalties: `[num_reqs, 1]`; None when nobody asks.
        prompt_mask: `[num_reqs, vocab_size]` tokens of the prompt; None without penalties.
        output_token_ids: `[num_reqs]` the requests' own lists, so that they are up to date without a refresh.
        logit_bias, min_tokens, bad_words_token_ids: by row, for rows that ask; the batch's own tables.
        max_num_logprobs: None when nobody asks.
    """

    temperature: Tensor | None
    seeds: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    max_top_k: int
    repetition_penalties: Tensor | None
    presence_penalties: Tensor | None
    frequency_penalties: Tensor | None
    prompt_mask: Tensor | None
    output_token_ids: list[list[int]]
    logit_bias: dict[int, dict[int, float]]
    min_tokens: dict[int, tuple[int, list[int]]]
    bad_words_token_ids: dict[int, list[list[int]]]
    max_num_logprobs: int | None
