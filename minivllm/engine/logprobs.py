"""From rows of log-probabilities to what the user sees.

vLLM 0.25.1: vllm/v1/engine/logprobs.py (LogprobsProcessor)
Articles: part 1 §8.2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.engine import EngineCoreLogprobs
from minivllm.request_output import Logprob
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class LogprobsProcessor:
    """Collects the log-probabilities of one request.

    Attributes:
        logprobs: per generated token: token id -> Logprob (None when not asked for).
        prompt_logprobs: per prompt token, None for the first one (None when not asked for).
        cumulative_logprob: sum over the generated tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )

    def update(
        self, rows: EngineCoreLogprobs | None, prompt_rows: EngineCoreLogprobs | None, num_tokens: int
    ) -> None:
        """Args:
        num_tokens: tokens the request has now; rows of tokens after a stop string are left out.
        """
        if prompt_rows is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(self._positions(prompt_rows))
        if rows is not None and self.logprobs is not None and self.cumulative_logprob is not None:
            num_new = num_tokens - len(self.logprobs)
            self.logprobs.extend(self._positions(rows)[:num_new])
            # One by one: the sum is not to depend on how many come at once.
            for row in rows.logprobs[:num_new]:
                self.cumulative_logprob += row[0]

    def _positions(self, rows: EngineCoreLogprobs) -> list[dict[int, Logprob]]:
        decode = self._decode_token
        positions = []
        for token_ids, logprobs, rank in zip(rows.token_ids, rows.logprobs, rows.ranks, strict=True):
            position = {token_ids[0]: Logprob(logprobs[0], rank, decode(token_ids[0]))}
            for j in range(1, len(token_ids)):
                # The token itself may be among the most likely ones; its rank is known already.
                if token_ids[j] not in position:
                    position[token_ids[j]] = Logprob(logprobs[j], j, decode(token_ids[j]))
            positions.append(position)
        return positions

    def _decode_token(self, token_id: int) -> str | None:
        return (
            None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)
        )
