"""What a model runner hands back to the scheduler after one step.

vLLM 0.25.1: vllm/v1/outputs.py (ModelRunnerOutput, AsyncModelRunnerOutput, LogprobsLists, DraftTokenIds)
Articles: part 2 §2.3.4, §2.4.10

No torch at module level: EngineCore unpickles these objects and never imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass(slots=True)
class LogprobsLists:
    """Log-probabilities of `n` positions, as plain lists so that any serializer carries them.

    Attributes:
        token_ids: `[n][k + 1]`; the sampled (or prompt) token first, then the k most likely ones.
        logprobs: `[n][k + 1]`, natural logarithm.
        ranks: `[n]`; 1-based rank of the first token of each row.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of one step, for the requests that were scheduled in it.

    Attributes:
        req_ids: requests in the order of the batch.
        sampled_token_ids: per request the new tokens; empty while its prompt is only partly computed.
        logprobs: request id -> rows for its new tokens, only for requests that asked.
        prompt_logprobs: request id -> rows for prompt positions (row i tells the probability of prompt token i + 1 of
            that span; the first prompt token has none). Model Runner V2 sends all of a prompt's rows at once, in
            the step that completes the prompt.
    """

    req_ids: list[str] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)


class AsyncModelRunnerOutput(ABC):
    """A result whose tokens may still be on their way from the device."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy and return the output; called once, from the worker's output thread."""


@dataclass(slots=True)
class DraftTokenIds:
    """Speculative tokens proposed for the next step: `draft_token_ids[i]` belongs to `req_ids[i]`."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]
