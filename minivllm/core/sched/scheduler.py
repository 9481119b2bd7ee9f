"""What runs in the next step: continuous batching, chunked prefill, preemption.

vLLM 0.25.1: vllm/v1/core/sched/scheduler.py (Scheduler), vllm/v1/core/sched/async_scheduler.py (AsyncScheduler)
Articles: part 1 §2, part 2 §2.3.10
"""

from __future__ import annotations

from collections.abc import Iterable

from minivllm import tracing
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request import Request, RequestStatus
from minivllm.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from minivllm.core.sched.request_queue import FCFSRequestQueue
from minivllm.engine import EngineCoreLogprobs, EngineCoreOutput
from minivllm.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from minivllm.spec_decode.metrics import SpecDecodingStats
from minivllm.structured_output import StructuredOutputManager


class Scheduler:
    """Decides in each step how many tokens of which request are computed.

    There is no prefill phase and no decode phase: every request has tokens (prompt, then output) of which some
    are computed, and a step moves it forward by as many as the budget allows.

    Invariants, kept by schedule():
        1. The tokens of a step are at most max_num_batched_tokens, and each scheduled request gets at least one.
        2. At most max_num_seqs requests run.
        3. Running requests come before waiting ones, and waiting ones keep their order of arrival.
        4. A request is scheduled only when blocks for all its tokens of the step are its own.
        5. Blocks run out: the request that started last gives all of its own back and goes to the front of the
           queue. A step that preempts starts no waiting request, or the two would take turns for ever.
        6. The workers hear of each end exactly once, if they knew the request: finished_req_ids or
           preempted_req_ids of the next step, even when nothing else runs.
        7. A preempted request starts again only when no step of its former life is in flight, so that no
           token of it is still unknown here.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        num_gpu_blocks: int,
        structured_output_manager: StructuredOutputManager | None = None,
    ) -> None:
        self.structured_output_manager = structured_output_manager
        speculative_config = vllm_config.speculative_config
        self.num_lookahead_tokens = speculative_config.num_lookahead_tokens if speculative_config else 0
        self.spec_decoding_stats = SpecDecodingStats() if speculative_config is not None else None
        self.draft_placeholders = [-1] * vllm_config.num_speculative_tokens
        self.scheduler_config = vllm_config.scheduler_config
        self.max_num_running_reqs = self.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens
        self.kv_cache_manager = KVCacheManager(num_gpu_blocks, vllm_config.cache_config.block_size)
        self.pp_size = vllm_config.parallel_config.pipeline_parallel_size
        self.current_step = 0
        self.requests: dict[str, Request] = {}
        self.waiting = FCFSRequestQueue()
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        # Ended requests of which steps are still in flight: their outputs must not be taken for a new namesake's.
        self._outliving_steps: dict[str, int] = {}

    # --- requests come and go

    def add_request(self, request: Request) -> None:
        """Raises ValueError for an id that is in use."""
        if request.request_id in self.requests or request.request_id in self._outliving_steps:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[str]:
        """End requests from outside, for instance on abort; unknown ids are ignored.

        Returns:
            The ids that were alive.
        """
        requests = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        waiting = [request for request in requests if request.status != RequestStatus.RUNNING]
        if waiting:
            self.waiting.remove_requests(waiting)
        for request in requests:
            request.status = status
            self._free_request(request)
        if len(waiting) < len(requests):
            self.running = [request for request in self.running if not request.is_finished]
        return [request.request_id for request in requests]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Whether a step is due: for requests, or only to tell the workers which ones ended."""
        return bool(self.requests) or bool(self.finished_req_ids)

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        if request.known_to_workers:
            self.finished_req_ids.add(request.request_id)
        if request.num_in_flight:
            self._outliving_steps[request.request_id] = request.num_in_flight
        del self.requests[request.request_id]

    # --- one step

    def schedule(self) -> SchedulerOutput:
        if tracing.calls:
            with tracing.hot_span("scheduler.schedule") as span:
                output = self._schedule()
                span.attributes = {
                    "step": output.step,
                    "num_reqs": len(output.num_scheduled_tokens),
                    "num_tokens": output.total_num_scheduled_tokens,
                    "num_new": len(output.scheduled_new_reqs),
                    "num_running": len(self.running),
                    "num_waiting": len(self.waiting),
                    "num_preempted": len(output.preempted_req_ids),
                }
                return output
        return self._schedule()

    def _schedule(self) -> SchedulerOutput:
        token_budget = self.max_num_scheduled_tokens
        self.current_step += 1
        output = SchedulerOutput(finished_req_ids=self.finished_req_ids, step=self.current_step)
        self.finished_req_ids = set()

        token_budget = self._schedule_running(output, token_budget)
        if self.waiting and not output.preempted_req_ids:
            token_budget = self._schedule_waiting(output, token_budget)
        output.total_num_scheduled_tokens = self.max_num_scheduled_tokens - token_budget
        return output

    def _schedule_running(self, output: SchedulerOutput, token_budget: int) -> int:
        allocate_slots = self.kv_cache_manager.allocate_slots
        cached = output.scheduled_cached_reqs
        num_scheduled_tokens = output.num_scheduled_tokens
        running = self.running
        index = 0
        # Preemption shortens the list while it is walked.
        while index < len(running) and token_budget > 0:
            request = running[index]
            index += 1
            num_certain_tokens = self._num_new_tokens(request)
            if num_certain_tokens <= 0:
                # All its tokens are computed or in flight: it waits for the one that is being sampled.
                continue
            # The last token that is wanted is not computed; verifying drafts beyond it would only cost time.
            num_new_tokens = min(
                num_certain_tokens + len(request.spec_token_ids),
                token_budget,
                request.num_prompt_tokens + request.max_tokens - 1 - request.num_computed_tokens,
            )
            if num_new_tokens <= 0:
                # If all drafts in flight stand, its end is in flight, too.
                continue
            num_drafts = max(0, num_new_tokens - num_certain_tokens)
            lookahead = self._lookahead(request, num_new_tokens)
            new_blocks = allocate_slots(request, num_new_tokens, lookahead)
            while new_blocks is None:
                victim = running.pop()
                self._preempt_request(victim, output)
                if victim is request:
                    return token_budget
                new_blocks = allocate_slots(request, num_new_tokens, lookahead)
            if num_drafts:
                output.scheduled_spec_decode_tokens[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(new_blocks or None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens
            self._advance(request, num_new_tokens, output)
        return token_budget

    def _schedule_waiting(self, output: SchedulerOutput, token_budget: int) -> int:
        while self.waiting and token_budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            if request.num_in_flight:
                break
            num_new_tokens = request.num_tokens
            if num_new_tokens > token_budget:
                if not self.scheduler_config.enable_chunked_prefill:
                    break
                num_new_tokens = token_budget
            lookahead = self._lookahead(request, num_new_tokens)
            if self.kv_cache_manager.allocate_slots(request, num_new_tokens, lookahead) is None:
                break
            self.waiting.pop_request()
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.known_to_workers = True
            request.prompt_logprobs_seen = 0
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    prefill_token_ids=request.all_token_ids
                    if request.output_token_ids
                    else request.prompt_token_ids,
                    sampling_params=request.sampling_params,
                    block_ids=self.kv_cache_manager.get_block_ids(request.request_id),
                    num_computed_tokens=0,
                )
            )
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens
            self._advance(request, num_new_tokens, output)
        return token_budget

    def _num_new_tokens(self, request: Request) -> int:
        """Tokens known but not computed, drafts not among them; at most 0 while the next one is still being sampled."""
        return request.num_tokens - request.num_computed_tokens

    def _lookahead(self, request: Request, num_new_tokens: int) -> int:
        """Room for a draft model behind the tokens of a step, but not beyond the last token that can be computed, or
        a request that just fits would never run."""
        if not self.num_lookahead_tokens:
            return 0
        last = request.num_prompt_tokens + request.max_tokens - 1
        return max(0, min(self.num_lookahead_tokens, last - request.num_computed_tokens - num_new_tokens))

    def _advance(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed at once: the next step may be scheduled before this one has run."""
        request.num_computed_tokens += num_new_tokens
        request.num_in_flight += 1
        if request.grammar is not None:
            output.has_structured_output_requests = True

    def _preempt_request(self, request: Request, output: SchedulerOutput) -> None:
        """Take all blocks of a request; its tokens are kept and computed again later (V2: as a new request)."""
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.spec_token_ids = []
        request.known_to_workers = False
        self.waiting.prepend_request(request)
        output.preempted_req_ids.add(request.request_id)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Which tokens the step may choose, for those of its requests that have a grammar and get a token.

        To be called while the step's forward pass runs. All tokens before the one to be chosen are known here: a
        request with a grammar is not scheduled while one of its tokens is in flight.

        Returns:
            None when the step has no such request.
        """
        if not scheduler_output.has_structured_output_requests:
            return None
        requests = [self.requests[req_id] for req_id in scheduler_output.num_scheduled_tokens]
        drafts = scheduler_output.scheduled_spec_decode_tokens
        rows = {
            request.request_id: (request.grammar, drafts.get(request.request_id, []))
            for request in requests
            if request.grammar is not None and request.num_computed_tokens >= request.num_tokens
        }
        if not rows:
            return None
        assert self.structured_output_manager is not None
        return GrammarOutput(list(rows), self.structured_output_manager.grammar_bitmask(list(rows.values())))

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take over what is proposed to come next; the next step that a request is in verifies it."""
        for req_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(req_id)
            if request is None or not request.known_to_workers:
                # Ended with this step.
                continue
            self._take_drafts(request, drafts)

    def _take_drafts(self, request: Request, drafts: list[int]) -> None:
        request.spec_token_ids = (
            drafts if request.grammar is None else request.grammar.validate_tokens(drafts)
        )

    # --- its result

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        if tracing.calls:
            with tracing.hot_span("scheduler.update_from_output") as span:
                if self.spec_decoding_stats is not None:
                    drafts_before = self.spec_decoding_stats.num_draft_tokens
                    accepted_before = self.spec_decoding_stats.num_accepted_tokens
                outputs = self._update_from_output(scheduler_output, model_runner_output)
                span.attributes = {
                    "num_new_tokens": sum([len(o.new_token_ids) for o in outputs]),
                    "num_finished": sum([o.finish_reason is not None for o in outputs]),
                }
                if self.spec_decoding_stats is not None:
                    stats = self.spec_decoding_stats
                    span.set(
                        num_draft_tokens=stats.num_draft_tokens - drafts_before,
                        num_accepted_tokens=stats.num_accepted_tokens - accepted_before,
                        acceptance_rate=round(stats.acceptance_rate, 4),
                    )
                return outputs
        return self._update_from_output(scheduler_output, model_runner_output)

    def _update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        requests = self.requests
        all_logprobs = model_runner_output.logprobs
        all_prompt_logprobs = model_runner_output.prompt_logprobs
        any_finished = False
        if len(model_runner_output.req_ids) != len(scheduler_output.num_scheduled_tokens):
            raise RuntimeError(
                f"the workers answered for {model_runner_output.req_ids}, scheduled were "
                f"{list(scheduler_output.num_scheduled_tokens)}"
            )
        for req_id, token_ids in zip(
            model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=True
        ):
            request = requests.get(req_id)
            if request is None:
                # Ended (aborted, or stopped by the step before) while this step ran.
                self._forget_outliving_step(req_id)
                continue
            request.num_in_flight -= 1
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(req_id)
            if drafts:
                self._drafts_verified(request, len(drafts), len(token_ids) - 1)
            prompt_logprobs = all_prompt_logprobs.get(req_id) if all_prompt_logprobs else None
            if not token_ids and prompt_logprobs is None:
                continue
            new_token_ids: list[int] = []
            finished = False
            for token_id in token_ids:
                new_token_ids.append(token_id)
                finished = request.append_output_token(token_id)
                if finished:
                    break
            if token_ids:
                self._token_arrived(request)
            output = EngineCoreOutput(req_id, new_token_ids)
            if all_logprobs and req_id in all_logprobs:
                output.logprobs = _wire_logprobs(all_logprobs[req_id], 0, len(new_token_ids))
            if prompt_logprobs is not None:
                output.prompt_logprobs = self._new_prompt_logprobs(request, prompt_logprobs)
            if finished:
                output.finish_reason = request.status.finish_reason
                output.stop_reason = request.stop_reason
                output.ended_by_grammar = request.ended_by_grammar
                output.error = request.error
                if request.known_to_workers:
                    any_finished = True
                else:
                    # Preempted while its last token was in flight.
                    self.waiting.remove_requests([request])
                self._free_request(request)
            outputs.append(output)
        if any_finished:
            self.running = [request for request in self.running if not request.is_finished]
        return outputs

    def _forget_outliving_step(self, req_id: str) -> None:
        remaining = self._outliving_steps.pop(req_id, 1) - 1
        if remaining:
            self._outliving_steps[req_id] = remaining

    def _drafts_verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Take back what _advance counted for drafts that do not stand."""
        if request.known_to_workers:
            # Otherwise it was preempted while the step ran, and nothing of it is computed any more.
            request.num_computed_tokens -= num_drafts - num_accepted
        assert self.spec_decoding_stats is not None
        self.spec_decoding_stats.observe_draft(num_drafts, num_accepted)

    def _token_arrived(self, request: Request) -> None:
        """For AsyncScheduler, which counts tokens that it has not seen. One, since the others were drafts before."""

    def _new_prompt_logprobs(self, request: Request, rows: LogprobsLists) -> EngineCoreLogprobs | None:
        """The rows that the client has not had: a preempted prompt is computed, and reported, a second time.

        Rows are counted from the start of the request's present life. Those that arrive after a preemption still
        belong to the life before it, since the next one starts only when no step is in flight (invariant 7).
        """
        num_rows = len(rows.token_ids)
        skip = min(max(0, request.prompt_logprobs_sent - request.prompt_logprobs_seen), num_rows)
        request.prompt_logprobs_seen += num_rows
        request.prompt_logprobs_sent += num_rows - skip
        return _wire_logprobs(rows, skip, num_rows) if skip < num_rows else None

    def check_invariants(self) -> None:
        """Raises RuntimeError when the books do not balance; for tests and failure reports."""
        self.kv_cache_manager.check_invariants()
        owners = set(self.kv_cache_manager.req_to_blocks)
        running = {request.request_id for request in self.running}
        waiting = {request.request_id for request in self.waiting}
        if owners != running:
            raise RuntimeError(f"blocks are owned by {owners}, but {running} run")
        if running & waiting or running | waiting != set(self.requests):
            raise RuntimeError(f"running {running} and waiting {waiting} are not {set(self.requests)}")
        if len(self.running) > self.max_num_running_reqs:
            raise RuntimeError(f"{len(self.running)} requests run, {self.max_num_running_reqs} may")


class AsyncScheduler(Scheduler):
    """Schedules step n + 1 before the tokens of step n are known here.

    That works because the workers keep sampled tokens on the device: a step needs to be told only how many
    tokens a request has, and placeholders count those that nobody here has seen.

    With speculation a step is told how many drafts to verify (each is -1 here), and which ones they are is for the
    workers to know, too. Until it is known how many of them stand, all are taken to: num_computed_tokens is then
    an upper bound, for which there is room in the cache, and the workers count for themselves. Drafts of a request
    with a grammar do come here, since the grammar has to be asked about them.

    With a pipeline, a request decodes at most once in as many steps as there are stages: its next token can enter
    the first stage only when the one before has left the last. Without that rule all requests would soon be in every
    batch, each batch would wait for the one before, and one stage at a time would work.
    """

    def _num_new_tokens(self, request: Request) -> int:
        if self.current_step < request.next_decode_eligible_step:
            return 0
        placeholders = request.num_output_placeholders
        num_output_tokens = request.num_tokens - request.num_prompt_tokens + placeholders
        if placeholders and num_output_tokens >= request.max_tokens:
            # The token in flight is the last one for sure; another step would be for nothing.
            return 0
        if placeholders and request.grammar is not None:
            # What may follow depends on the token in flight.
            return 0
        return (
            request.num_tokens + placeholders + request.num_draft_placeholders - request.num_computed_tokens
        )

    def _advance(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> None:
        super()._advance(request, num_new_tokens, output)
        request.num_draft_placeholders += len(output.scheduled_spec_decode_tokens.get(request.request_id, ()))
        known = request.num_tokens + request.num_output_placeholders + request.num_draft_placeholders
        if request.num_computed_tokens == known:
            request.num_output_placeholders += 1
            request.next_decode_eligible_step = self.current_step + self.pp_size
            if request.grammar is None:
                request.spec_token_ids = self.draft_placeholders

    def _take_drafts(self, request: Request, drafts: list[int]) -> None:
        if request.grammar is not None:
            super()._take_drafts(request, drafts)

    def _drafts_verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        super()._drafts_verified(request, num_drafts, num_accepted)
        request.num_draft_placeholders -= num_drafts

    def _token_arrived(self, request: Request) -> None:
        request.num_output_placeholders -= 1


def _wire_logprobs(rows: LogprobsLists, start: int, end: int) -> EngineCoreLogprobs:
    return EngineCoreLogprobs(rows.token_ids[start:end], rows.logprobs[start:end], rows.ranks[start:end])
