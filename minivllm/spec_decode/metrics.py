"""How often speculation was right.

vLLM 0.25.1: vllm/v1/spec_decode/metrics.py (SpecDecodingStats)
Articles: part 2 §2.3.6
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SpecDecodingStats:
    """Attributes:
    num_drafts: requests that a step verified drafts of, summed over steps.
    num_draft_tokens: tokens verified.
    num_accepted_tokens: those of them that the target model would have chosen, too.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)
