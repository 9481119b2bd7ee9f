"""What the scheduler tells the workers to do in one step; the payload of the broadcast queue.

vLLM 0.25.1: vllm/v1/core/sched/output.py (SchedulerOutput, NewRequestData, CachedRequestData, GrammarOutput)
Articles: part 2 §2.3.4, §2.3.5
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class NewRequestData:
    """A request that the workers do not know yet: everything they need is sent once.

    Attributes:
        req_id: the request.
        prompt_token_ids: the prompt as the user gave it.
        prefill_token_ids: what must be computed before the next token can be sampled: the prompt, and after a
            preemption also the tokens generated so far (then longer than prompt_token_ids).
        block_ids: KV cache blocks of this request, in order of position.
        num_computed_tokens: tokens whose keys and values are already in those blocks.
    """

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the workers know: only what changed. Lists run in parallel, `[num_reqs]`.

    Attributes:
        new_block_ids: blocks to append to the request's table; None when there are none.
        num_computed_tokens: tokens computed before this step; more than there are while drafts are in flight.
    """

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        num_scheduled_tokens: request id -> tokens to compute in this step.
        scheduled_spec_decode_tokens: request id -> speculative tokens to verify, the first of those that the workers
            proposed last for it; -1 for one that only they know (async scheduling).
        finished_req_ids: requests that ended since the last step; their slots are free again.
        preempted_req_ids: requests whose blocks were taken; they come back as new requests.
        step: number of the step, by which traces tell batches in flight apart.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    has_structured_output_requests: bool = False
    step: int = 0

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        """A step without work (still broadcast when requests have finished, so that slots are freed)."""
        return cls()


@dataclass(slots=True)
class GrammarOutput:
    """Which requests are constrained and by what.

    Attributes:
        structured_output_request_ids: requests, in the order of the rows of the mask.
        grammar_bitmask: `[num_rows, ceil(vocab_size / 32)]` int32; bit = token allowed. A request has one row, and
            one more for each of its drafts in scheduled_spec_decode_tokens.
    """

    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray
