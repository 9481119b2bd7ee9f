"""A request as the scheduler sees it.

vLLM 0.25.1: vllm/v1/request.py (Request, RequestStatus)
Articles: part 1 §2
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from minivllm.engine import EngineCoreRequest, FinishReason
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.structured_output.backend_guidance import GuidanceGrammar


class RequestStatus(enum.IntEnum):
    """Everything after PREEMPTED is an end state."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class Request:
    """Attributes:
    max_tokens: the limit that holds: the user's, or what the model's length and the block pool leave.
    stop_token_ids: tokens that end the request, end-of-text tokens not among them.
    num_computed_tokens: tokens whose keys and values are in the cache once all scheduled steps have run, if all
        drafts that these verify stand.
    num_output_placeholders: tokens that scheduled steps will sample and nobody has seen yet, one for each such step,
        whatever becomes of its drafts; async scheduling only.
    num_draft_placeholders: drafts that those steps verify; async scheduling only.
    spec_token_ids: proposed tokens that the next step verifies; -1 for one that only the workers know.
    num_in_flight: scheduled steps whose output has not been processed.
    next_decode_eligible_step: number of the first step in which its next token may be computed (async scheduling).
    known_to_workers: the workers hold a slot for it, so its end must be reported to them.
    grammar: what its output obeys, advanced with each token; None for most requests.
    ended_by_grammar: its last token completed what the grammar describes, and belongs to the text.
    error: why it cannot go on (status FINISHED_ERROR).
    """

    __slots__ = (
        "arrival_time",
        "ended_by_grammar",
        "eos_token_ids",
        "error",
        "grammar",
        "known_to_workers",
        "max_tokens",
        "min_tokens",
        "next_decode_eligible_step",
        "num_computed_tokens",
        "num_draft_placeholders",
        "num_in_flight",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "prompt_logprobs_seen",
        "prompt_logprobs_sent",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        max_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival_time: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        self.min_tokens = sampling_params.min_tokens
        self.eos_token_ids = frozenset() if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids or ())
        self.arrival_time = arrival_time

        self.output_token_ids: list[int] = []
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.grammar: GuidanceGrammar | None = None
        self.ended_by_grammar = False
        self.error: str | None = None

        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_draft_placeholders = 0
        self.num_in_flight = 0
        self.next_decode_eligible_step = 0
        self.num_preemptions = 0
        self.spec_token_ids: list[int] = []
        self.known_to_workers = False
        # After a preemption the prompt is computed again and its log-probabilities arrive a second time.
        self.prompt_logprobs_sent = 0
        self.prompt_logprobs_seen = 0

    @classmethod
    def from_engine_core_request(
        cls, request: EngineCoreRequest, max_tokens: int, eos_token_ids: frozenset[int]
    ) -> Request:
        return cls(
            request.request_id,
            request.prompt_token_ids,
            request.sampling_params,
            max_tokens,
            eos_token_ids,
            request.arrival_time,
        )

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def append_output_token(self, token_id: int) -> bool:
        """Take one sampled token; True when it ends the request (status and stop_reason are set then)."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        # First, since the token that completes a document may also be the last one that max_tokens leaves.
        if self.grammar is not None and self._advance_grammar(self.grammar, token_id):
            return True
        if num_output_tokens >= self.min_tokens:
            if token_id in self.eos_token_ids:
                self.status = RequestStatus.FINISHED_STOPPED
                return True
            if token_id in self.stop_token_ids:
                self.status = RequestStatus.FINISHED_STOPPED
                self.stop_reason = token_id
                return True
        if num_output_tokens >= self.max_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False

    def _advance_grammar(self, grammar: GuidanceGrammar, token_id: int) -> bool:
        """Deviation from vLLM: a request ends with the token after which its grammar allows nothing more. There, one
        more step is run for the end-of-text token, and with ignore_eos there is no end.
        """
        error = grammar.accept_token(token_id)
        if error is not None:
            self.status = RequestStatus.FINISHED_ERROR
            self.error = (
                f"the grammar does not allow token {token_id}, which was the best of those left: {error}"
            )
            return True
        if grammar.is_terminated():
            self.status = RequestStatus.FINISHED_STOPPED
            self.ended_by_grammar = token_id not in self.eos_token_ids
            return True
        return False
