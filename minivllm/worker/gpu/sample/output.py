"""What the sampler returns, still on the device.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/output.py (SamplerOutput), vllm/v1/outputs.py (LogprobsTensors)
Articles: part 1 §8.3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class LogprobsTensors:
    """Log-probabilities of n positions.

    Attributes:
        token_ids: `[n, k + 1]` the chosen token, then the k most likely ones.
        logprobs: `[n, k + 1]` natural logarithms, float32.
        ranks: `[n]` how many tokens are at least as likely as the chosen one.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> LogprobsTensors:
        return LogprobsTensors(f(self.token_ids), f(self.logprobs), f(self.ranks))

    def row(self, index: int, num_logprobs: int) -> LogprobsTensors:
        """One position with its `num_logprobs` most likely tokens."""
        rows, columns = slice(index, index + 1), slice(num_logprobs + 1)
        return LogprobsTensors(self.token_ids[rows, columns], self.logprobs[rows, columns], self.ranks[rows])


@dataclass(slots=True)
class SamplerOutput:
    """Attributes:
    sampled_token_ids: `[num_reqs]` int64, the last new token of each row.
    logprobs: request → a row for each new token, for requests that asked; after a verification perhaps some more.
    token_ids: `[num_reqs, most new tokens]` all new tokens, filled up with -1; None when there is one per row.
    num_rejected: `[num_reqs]` draft tokens that do not stand; None together with token_ids.
    """

    sampled_token_ids: Tensor
    logprobs: dict[str, LogprobsTensors] = field(default_factory=dict)
    token_ids: Tensor | None = None
    num_rejected: Tensor | None = None
