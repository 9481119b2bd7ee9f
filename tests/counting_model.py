"""A model without torch whose next token is a function of all tokens before it, behind the real runner protocol.

It keeps what Model Runner V2 keeps (slots, block tables, tokens) and raises when the scheduler breaks the protocol,
so that an engine over it proves: no token is lost, computed twice or computed in a foreign block.
"""

from __future__ import annotations

from minivllm.core.sched.output import SchedulerOutput
from minivllm.outputs import LogprobsLists, ModelRunnerOutput
from minivllm.sampling_params import SamplingParams


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The token that follows; depends on every token and on their order."""
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value % vocab_size


def expected_tokens(
    prompt: list[int], params: SamplingParams, vocab_size: int, eos: frozenset[int], limit: int
) -> list[int]:
    """What a request must yield, whatever else runs beside it."""
    tokens: list[int] = []
    max_tokens = min(limit - len(prompt), params.max_tokens or limit)
    while len(tokens) < max_tokens:
        tokens.append(next_token(prompt + tokens, vocab_size))
        if len(tokens) < params.min_tokens:
            continue
        if tokens[-1] in eos and not params.ignore_eos:
            break
        if tokens[-1] in (params.stop_token_ids or ()):
            break
    return tokens


class _Slot:
    def __init__(
        self, prompt: list[int], prefill: list[int], params: SamplingParams, blocks: list[int]
    ) -> None:
        self.prompt = prompt
        self.tokens = list(prefill)
        self.params = params
        self.blocks = list(blocks)
        self.computed = 0


class CountingModel:
    """One rank's runner.

    Attributes:
        scheduler_runs_ahead: it may take drafts for computed of which some turned out not to stand.
        log: per step, how many tokens of which request were computed.
    """

    def __init__(
        self, vocab_size: int, block_size: int, num_blocks: int, max_num_seqs: int, max_tokens: int
    ) -> None:
        self.scheduler_runs_ahead = False
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_tokens
        self.slots: dict[str, _Slot] = {}
        # Slot of the cache -> the token that was computed into it.
        self.cache: dict[tuple[int, int], int] = {}
        self.log: list[dict[str, int]] = []
        self._pending: SchedulerOutput | None = None

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        assert self._pending is None, "execute_model twice without sample_tokens"
        for req_id in sorted(step.finished_req_ids | step.preempted_req_ids):
            assert req_id in self.slots, f"{req_id} ended, but has no slot"
            del self.slots[req_id]
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.slots, f"{new.req_id} is new, but has a slot"
            assert new.num_computed_tokens == 0
            assert new.prefill_token_ids[: len(new.prompt_token_ids)] == new.prompt_token_ids
            self.slots[new.req_id] = _Slot(
                new.prompt_token_ids, new.prefill_token_ids, new.sampling_params, new.block_ids
            )
        assert len(self.slots) <= self.max_num_seqs, "more requests than slots"
        cached = step.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            slot = self.slots[req_id]
            assert blocks is None or blocks
            slot.blocks.extend(blocks or ())
            assert slot.computed == computed or (self.scheduler_runs_ahead and slot.computed < computed), (
                f"{req_id}: {slot.computed} computed here, {computed} there"
            )
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
        assert step.total_num_scheduled_tokens <= self.max_num_batched_tokens
        owned = [block for slot in self.slots.values() for block in slot.blocks]
        # A request that has ended may still hold blocks here until its end is reported, hence no check of those.
        scheduled = [b for r in step.num_scheduled_tokens for b in self.slots[r].blocks]
        assert len(set(scheduled)) == len(scheduled), "a block is owned twice"
        assert all(0 < block < self.num_blocks for block in owned)
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput()
        self.log.append(dict(step.num_scheduled_tokens))
        self._pending = step
        return None

    def sample_tokens(self) -> ModelRunnerOutput:
        step, self._pending = self._pending, None
        assert step is not None, "sample_tokens without execute_model"
        output = ModelRunnerOutput()
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            slot = self.slots[req_id]
            assert num_tokens > 0
            start, end = slot.computed, slot.computed + num_tokens
            assert end <= len(slot.tokens), f"{req_id}: {end} tokens to compute, {len(slot.tokens)} known"
            for position in range(start, end):
                block = slot.blocks[position // self.block_size]
                self.cache[block, position % self.block_size] = slot.tokens[position]
            slot.computed = end
            if slot.params.prompt_logprobs is not None:
                rows = [slot.prompt[p + 1] for p in range(start, end) if p + 1 < len(slot.prompt)]
                if rows:
                    output.prompt_logprobs[req_id] = _rows(rows)
            output.req_ids.append(req_id)
            if end < len(slot.tokens):
                output.sampled_token_ids.append([])
                continue
            # Attention reads the cache, so a block that someone else has written to would show.
            seen = [self.cache[slot.blocks[p // self.block_size], p % self.block_size] for p in range(end)]
            assert seen == slot.tokens, f"{req_id}: its blocks were overwritten"
            token = next_token(seen, self.vocab_size)
            slot.tokens.append(token)
            output.sampled_token_ids.append([token])
            if slot.params.logprobs is not None:
                output.logprobs[req_id] = _rows([token])
        return output


def _rows(token_ids: list[int]) -> LogprobsLists:
    return LogprobsLists([[t, t] for t in token_ids], [[-0.5, -0.5] for _ in token_ids], [1] * len(token_ids))
