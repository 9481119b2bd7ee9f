"""What V1's sampler needs of a batch.

vLLM 0.25.1: vllm/v1/sample/metadata.py (SamplingMetadata)
Articles: part 1 §7
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

    def expand(self, drafts: list[list[int]]) -> SamplingMetadata:
        """The same for steps that verify drafts: a row for each token that is chosen. The n-th row of a request is to
        choose as if n of its drafts stood already.

        Args:
            drafts: `[num_reqs]`.
        """
        picked = self.pick([row for row, tokens in enumerate(drafts) for _ in range(len(tokens) + 1)])
        picked.output_token_ids = [
            output + tokens[:n] if n else output
            for output, tokens in zip(self.output_token_ids, drafts, strict=True)
            for n in range(len(tokens) + 1)
        ]
        return picked

    def pick(self, rows: list[int]) -> SamplingMetadata:
        """The given rows, in that order."""

        def pick(table: Tensor | None) -> Tensor | None:
            return None if table is None else table.index_select(0, torch.tensor(rows).to(table.device))

        return SamplingMetadata(
            temperature=pick(self.temperature),
            seeds=pick(self.seeds),
            top_k=pick(self.top_k),
            top_p=pick(self.top_p),
            min_p=pick(self.min_p),
            max_top_k=self.max_top_k,
            repetition_penalties=pick(self.repetition_penalties),
            presence_penalties=pick(self.presence_penalties),
            frequency_penalties=pick(self.frequency_penalties),
            prompt_mask=pick(self.prompt_mask),
            output_token_ids=[self.output_token_ids[row] for row in rows],
            logit_bias={i: self.logit_bias[row] for i, row in enumerate(rows) if row in self.logit_bias},
            min_tokens={i: self.min_tokens[row] for i, row in enumerate(rows) if row in self.min_tokens},
            bad_words_token_ids={
                i: self.bad_words_token_ids[row]
                for i, row in enumerate(rows)
                if row in self.bad_words_token_ids
            },
            max_num_logprobs=self.max_num_logprobs,
        )
