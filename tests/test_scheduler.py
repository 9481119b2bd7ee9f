"""The scheduler, driven by a model that raises when the protocol with the workers is broken."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
from counting_model import CountingModel, expected_tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, ParallelConfig, SchedulerConfig, VllmConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.core.sched.output import SchedulerOutput
from minivllm.core.sched.scheduler import AsyncScheduler, Scheduler
from minivllm.engine import EngineCoreOutput, FinishReason
from minivllm.sampling_params import SamplingParams

VOCAB = 50
EOS = frozenset({7})


class Engine:
    """Scheduler and model with `depth` batches in flight, as EngineCore has them."""

    def __init__(
        self,
        num_blocks: int = 100,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        depth: int = 1,
        asynchronous: bool = False,
        enable_chunked_prefill: bool = True,
        stages: int = 1,
    ) -> None:
        config = VllmConfig(
            parallel_config=ParallelConfig(pipeline_parallel_size=stages),
            cache_config=CacheConfig(block_size=block_size),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_chunked_prefill=enable_chunked_prefill,
            ),
        )
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(config, num_blocks)
        self.model = CountingModel(VOCAB, block_size, num_blocks, max_num_seqs, max_num_batched_tokens)
        self.depth = depth
        self.in_flight: deque[tuple[SchedulerOutput, object]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.prompt_rows: dict[str, list[int]] = {}

    def add(self, req_id: str, prompt: list[int], **params: object) -> Request:
        params.setdefault("max_tokens", 8)
        sampling = SamplingParams(**params)
        request = Request(req_id, prompt, sampling, sampling.max_tokens or 8, EOS)
        self.scheduler.add_request(request)
        self.tokens[req_id] = []
        self.prompt_rows[req_id] = []
        return request

    def step(self) -> SchedulerOutput | None:
        """Schedule one batch, run it, and process the oldest one when the pipe is full or nothing was sent."""
        sent = None
        if self.scheduler.has_requests():
            sent = self.scheduler.schedule()
            if sent.num_scheduled_tokens or sent.finished_req_ids or sent.preempted_req_ids:
                result = self.model.execute_model(sent)
                if result is None:
                    result = self.model.sample_tokens()
                self.in_flight.append((sent, result))
        self.scheduler.check_invariants()
        if self.in_flight and (
            len(self.in_flight) >= self.depth or sent is None or not sent.num_scheduled_tokens
        ):
            self.receive()
        return sent

    def receive(self) -> None:
        scheduler_output, result = self.in_flight.popleft()
        if scheduler_output.num_scheduled_tokens:
            for output in self.scheduler.update_from_output(scheduler_output, result):
                self.take(output)
        self.scheduler.check_invariants()

    def take(self, output: EngineCoreOutput) -> None:
        self.tokens[output.request_id] += output.new_token_ids
        if output.prompt_logprobs is not None:
            self.prompt_rows[output.request_id] += [row[0] for row in output.prompt_logprobs.token_ids]
        if output.finish_reason is not None:
            assert output.request_id not in self.ends
            self.ends[output.request_id] = output.finish_reason

    def run(self, limit: int = 10_000) -> None:
        while self.scheduler.has_requests() or self.in_flight:
            self.step()
            limit -= 1
            assert limit, "the scheduler makes no progress"
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_usable_blocks
        assert not self.model.slots, "the workers still hold slots"


def expected(prompt: list[int], **params: object) -> list[int]:
    params.setdefault("max_tokens", 8)
    return expected_tokens(prompt, SamplingParams(**params), VOCAB, EOS, 10_000)


def test_one_request_runs_to_its_end() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], ignore_eos=True)
    engine.run()
    assert engine.tokens["a"] == expected([1, 2, 3], ignore_eos=True)
    assert engine.ends == {"a": FinishReason.LENGTH}


def test_chunked_prefill_stays_within_the_budget() -> None:
    """Invariant 1."""
    engine = Engine(max_num_batched_tokens=5)
    prompt = list(range(17))
    engine.add("a", prompt, ignore_eos=True)
    sizes = []
    for _ in range(4):
        step = engine.step()
        assert step is not None
        sizes.append(step.total_num_scheduled_tokens)
    assert sizes == [5, 5, 5, 2]
    assert len(engine.tokens["a"]) == 1
    engine.run()
    assert engine.tokens["a"] == expected(prompt, ignore_eos=True)


def test_without_chunked_prefill_a_prompt_waits_for_a_step_of_its_own() -> None:
    engine = Engine(max_num_batched_tokens=8, enable_chunked_prefill=False)
    engine.add("a", [1] * 6)
    engine.add("b", [2] * 6)
    first = engine.step()
    assert first is not None and first.num_scheduled_tokens == {"a": 6}
    second = engine.step()
    assert second is not None and second.num_scheduled_tokens == {"a": 1, "b": 6}
    engine.run()


def test_running_requests_come_first_and_waiting_ones_in_order() -> None:
    """Invariants 2 and 3."""
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=10)
    for name in "abcd":
        engine.add(name, [ord(name)] * 4, ignore_eos=True, max_tokens=3)
    step = engine.step()
    assert step is not None and list(step.num_scheduled_tokens) == ["a", "b"]
    step = engine.step()
    assert step is not None and list(step.num_scheduled_tokens) == ["a", "b"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["c", "d"]
    engine.run()
    assert list(engine.ends) == ["a", "b", "c", "d"]


def test_preemption_takes_the_last_and_puts_it_in_front() -> None:
    """Invariant 5: the one that started last gives way, and comes back before those that wait."""
    engine = Engine(num_blocks=8, block_size=2, max_num_seqs=3, max_num_batched_tokens=16)
    prompts = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8], "c": [9, 10]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, ignore_eos=True, max_tokens=6)
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["a", "b", "c"]
    preempted: list[str] = []
    while not preempted:
        step = engine.step()
        assert step is not None
        preempted = sorted(step.preempted_req_ids)
        if preempted:
            assert not step.scheduled_new_reqs
    assert preempted == ["c"]
    engine.add("d", [11, 12], ignore_eos=True, max_tokens=2)
    assert [r.request_id for r in engine.scheduler.waiting] == ["c", "d"]
    engine.run()
    for name, prompt in prompts.items():
        assert engine.tokens[name] == expected(prompt, ignore_eos=True, max_tokens=6)


def test_a_resumed_request_is_sent_with_its_output() -> None:
    """Contract with Model Runner V2: it comes back as a new request."""
    engine = Engine(num_blocks=6, block_size=2, max_num_seqs=2)
    engine.add("a", [1, 2], ignore_eos=True, max_tokens=8)
    engine.add("b", [3, 4], ignore_eos=True, max_tokens=8)
    resumed = []
    while engine.scheduler.has_requests():
        step = engine.step()
        resumed += [new for new in step.scheduled_new_reqs if len(new.prefill_token_ids) > 2] if step else []
    assert resumed
    for new in resumed:
        assert (
            new.prefill_token_ids
            == new.prompt_token_ids + engine.tokens[new.req_id][: len(new.prefill_token_ids) - 2]
        )
        assert new.num_computed_tokens == 0
    engine.run()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stop_conditions(asynchronous: bool) -> None:
    prompt = [3, 1, 4]
    free = expected(prompt, max_tokens=300, ignore_eos=True)
    first_eos = free.index(7)
    stop = free[5]
    first_stop = free.index(stop)
    engine = Engine(depth=2 if asynchronous else 1, asynchronous=asynchronous, max_num_seqs=6)
    engine.add("eos", prompt, max_tokens=300)
    engine.add("stop", prompt, max_tokens=300, ignore_eos=True, stop_token_ids=[stop])
    engine.add("length", prompt, max_tokens=4, ignore_eos=True)
    engine.add("min", prompt, max_tokens=300, min_tokens=first_eos + 2)
    engine.run()
    assert engine.tokens["eos"] == free[: first_eos + 1]
    assert engine.tokens["stop"] == free[: first_stop + 1]
    assert engine.tokens["length"] == free[:4]
    assert len(engine.tokens["min"]) >= first_eos + 2
    assert engine.ends["eos"] == engine.ends["stop"] == FinishReason.STOP
    assert engine.ends["length"] == FinishReason.LENGTH


def test_abort_frees_blocks_at_once_and_slots_with_the_next_step() -> None:
    """Invariant 6: also when nothing else runs."""
    engine = Engine()
    engine.add("a", [1, 2, 3], ignore_eos=True)
    engine.add("waiting", [1], ignore_eos=True)
    engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert engine.scheduler.finish_requests(
        ["a", "waiting", "unknown", "a"], RequestStatus.FINISHED_ABORTED
    ) == [
        "a",
        "waiting",
    ]
    assert pool.get_num_free_blocks() == pool.num_usable_blocks
    assert engine.scheduler.has_requests() and not engine.scheduler.has_unfinished_requests()
    step = engine.step()
    assert step is not None and step.finished_req_ids == {"a", "waiting"} and not step.num_scheduled_tokens
    assert not engine.scheduler.has_requests()


def test_a_request_that_never_ran_is_not_reported_to_the_workers() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [1], ignore_eos=True)
    engine.add("b", [1], ignore_eos=True)
    engine.step()
    engine.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    step = engine.step()
    assert step is not None and not step.finished_req_ids


def test_an_id_is_taken_until_its_last_step_is_back() -> None:
    engine = Engine(depth=2, asynchronous=True)
    engine.add("a", [1, 2], ignore_eos=True)
    engine.step()
    assert engine.in_flight
    engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    with pytest.raises(ValueError, match="in use"):
        engine.add("a", [1, 2])
    engine.run()
    engine.add("a", [1, 2])
    engine.run()
    assert engine.tokens["a"] == expected([1, 2])


def test_a_wrong_answer_of_the_workers_is_noticed() -> None:
    engine = Engine()
    engine.add("a", [1])
    step = engine.scheduler.schedule()
    engine.model.execute_model(step)
    result = engine.model.sample_tokens()
    result.req_ids, result.sampled_token_ids = [], []
    with pytest.raises(RuntimeError, match="scheduled were"):
        engine.scheduler.update_from_output(step, result)


def test_prompt_logprobs_come_once_although_the_prompt_is_computed_twice() -> None:
    engine = Engine(num_blocks=7, block_size=2, max_num_seqs=2, max_num_batched_tokens=3)
    prompts = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, ignore_eos=True, max_tokens=6, prompt_logprobs=1)
    requests = dict(engine.scheduler.requests)
    engine.run()
    assert any(request.num_preemptions for request in requests.values())
    for name, prompt in prompts.items():
        assert engine.prompt_rows[name] == prompt[1:]


def test_async_scheduling_does_not_run_past_the_last_token() -> None:
    """With the length as the only limit no step is wasted."""
    engine = Engine(depth=2, asynchronous=True)
    engine.add("a", [1, 2, 3], ignore_eos=True, max_tokens=5)
    engine.run()
    assert [step["a"] for step in engine.model.log] == [3, 1, 1, 1, 1]


request_strategy = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        "max_tokens": st.integers(1, 10),
        "ignore_eos": st.booleans(),
        "stop": st.one_of(st.none(), st.integers(0, VOCAB - 1)),
        "min_tokens": st.integers(0, 3),
        "arrives": st.integers(0, 15),
        "aborted": st.one_of(st.none(), st.none(), st.integers(0, 25)),
        "prompt_logprobs": st.sampled_from([None, 0]),
    }
)


def plain(prompt: list[int], max_tokens: int, prompt_logprobs: int | None = None) -> dict[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": False,
        "stop": None,
        "min_tokens": 0,
        "arrives": 0,
        "aborted": None,
        "prompt_logprobs": prompt_logprobs,
    }


# HYPOTHESIS_PROFILE=explore is the way to look further than this.
@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(request_strategy, min_size=1, max_size=8),
    num_blocks=st.integers(12, 40),
    block_size=st.integers(2, 5),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(5, 20),
    pipeline=st.sampled_from([(1, False), (2, False), (3, False), (2, True), (3, True), (4, True)]),
)
# Preempted twice, the second time with rows in flight that the client has had from the first life.
@example([plain([0] * 3, 7), plain([0] * 10, 6, 0)], 12, 2, 2, 5, (3, False))
@example([plain([0] * 3, 7), plain([0] * 10, 6, 0)], 12, 2, 2, 5, (2, True))
def test_any_mixture_yields_the_tokens_of_each_request_alone(
    requests: list[dict[str, object]],
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    pipeline: tuple[int, bool],
) -> None:
    """All invariants at each step, for arbitrary arrivals, aborts, chunking, preemption and batches in flight."""
    depth, asynchronous = pipeline
    # As VllmConfig.max_concurrent_batches: one batch per stage, and one more with async scheduling.
    stages = depth - asynchronous
    engine = Engine(num_blocks, block_size, max_num_seqs, budget, depth, asynchronous, stages=stages)
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for now in range(2000):
        for index, spec in enumerate(requests):
            name = f"r{index}"
            if spec["arrives"] == now:
                prompt = spec["prompt"]
                params = {
                    "max_tokens": max(spec["max_tokens"], spec["min_tokens"]),
                    "min_tokens": spec["min_tokens"],
                    "ignore_eos": spec["ignore_eos"],
                    "stop_token_ids": None if spec["stop"] is None else [spec["stop"]],
                    "prompt_logprobs": spec["prompt_logprobs"],
                }
                assert isinstance(prompt, list)
                engine.add(name, prompt, **params)
                wanted[name] = expected(prompt, **params)
            if spec["aborted"] == now and engine.scheduler.finish_requests(
                [name], RequestStatus.FINISHED_ABORTED
            ):
                aborted.add(name)
        engine.step()
        if now > 30 and not engine.scheduler.has_requests() and not engine.in_flight:
            break
    engine.run()
    for index, spec in enumerate(requests):
        name = f"r{index}"
        if name in aborted:
            assert engine.tokens[name] == wanted[name][: len(engine.tokens[name])]
            assert name not in engine.ends
        else:
            assert engine.tokens[name] == wanted[name]
            assert name in engine.ends
            if spec["prompt_logprobs"] is not None:
                assert engine.prompt_rows[name] == spec["prompt"][1:]


def test_no_torch_here() -> None:
    import subprocess
    import sys

    code = "import sys, minivllm.entrypoints.llm, minivllm.engine.core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
