"""What the user gets back.

vLLM 0.25.1: vllm/outputs.py (RequestOutput, CompletionOutput), vllm/logprobs.py (Logprob)
Articles: part 1 intro
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One alternative at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 is the most likely token of the vocabulary.
        decoded_token: the token's text (None without a tokenizer).
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """The generated continuation.

    Attributes:
        text: without the stop string and without special tokens, unless asked for.
        token_ids: all generated tokens, the one that stopped the request included.
        cumulative_logprob: sum over the generated tokens (None when logprobs were not asked for).
        logprobs: per generated token: token id -> Logprob; the generated token itself is always there.
        finish_reason: "stop", "length" or "abort"; None while the request runs.
        stop_reason: the stop string or stop token that ended it; None for the end-of-text token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and what became of it.

    Attributes:
        prompt: the text (None when token ids were given).
        prompt_logprobs: per prompt token: token id -> Logprob; None for the first, which nothing predicts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
