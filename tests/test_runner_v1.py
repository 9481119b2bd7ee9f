"""The V1 runner: its batch stays dense and in order, and its tokens are V2's and transformers'."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from runner_harness import (
    Driver,
    LocalWorker,
    Reference,
    Request,
    SpawnedWorkers,
    assert_logprobs_close,
    local_worker,
    make_config,
)

from minivllm import LLM
from minivllm.assets.make_checkpoint import PRESETS, make_random_checkpoint
from minivllm.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from minivllm.exceptions import ConfigError
from minivllm.outputs import ModelRunnerOutput
from minivllm.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu_input_batch import BatchMoves, CachedRequestState, InputBatch
from minivllm.worker.gpu_model_runner import GPUModelRunner

VARIABLE = "MINIVLLM_USE_V2_MODEL_RUNNER"
GREEDY = SamplingParams(temperature=0, max_tokens=20)
MIXED_PARAMS = [
    SamplingParams(temperature=0, max_tokens=25),
    SamplingParams(temperature=0.9, seed=7, max_tokens=18, logprobs=2),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.9, max_tokens=22, seed=-1),
    SamplingParams(temperature=0, repetition_penalty=1.8, frequency_penalty=0.5, max_tokens=30),
    SamplingParams(temperature=0.7, min_p=0.05, presence_penalty=1.0, max_tokens=9, seed=3),
    SamplingParams(temperature=0, min_tokens=4, logit_bias={5: 3.0}, max_tokens=12),
    SamplingParams(temperature=0, bad_words=["-"], bad_words_token_ids=[[1], [2, 3]], max_tokens=15),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=1.1, repetition_penalty=1.2, max_tokens=14),
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"token_budget": 7},
    "reversed": {"token_budget": 16, "reverse": True},
    "preempted": {"token_budget": 33, "preempt_at": (2, 5, 6, 9, 14, 20, 21, 30, 44)},
    "everything": {"token_budget": 5, "preempt_at": tuple(range(3, 90, 4)), "reverse": True},
}


def prompts_of(*lengths: int, seed: int = 2) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2048) for _ in range(n)] for n in lengths]


MIXED_PROMPTS = prompts_of(20, 3, 41, 17, 1, 16, 30, 50, 8)


@contextmanager
def forced(runner: str) -> Iterator[None]:
    """Configurations that are made inside get that runner, whatever the environment says otherwise."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1" if runner == "V2" else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@contextmanager
def worker_of(runner: str, model: str | None, **kwargs: Any) -> Iterator[LocalWorker]:
    with forced(runner), local_worker(model, **{"max_model_len": 128, "max_num_seqs": 4, **kwargs}) as worker:
        assert isinstance(worker.worker.model_runner, GPUModelRunner) == (runner == "V1")
        yield worker


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_random_checkpoint(tmp_path_factory.mktemp("model") / "m", **PRESETS["qwen3-gqa2"], seed=5)
    )


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def answers_of_v2(checkpoint: str) -> list[Request]:
    """The mixed batch on V2, where it is known not to depend on the schedule (test_runner)."""
    with worker_of("V2", checkpoint) as worker:
        return Driver(worker).generate(MIXED_PROMPTS, MIXED_PARAMS)


@pytest.fixture
def worker(checkpoint: str) -> Iterator[LocalWorker]:
    with worker_of("V1", checkpoint) as worker:
        yield worker


def outputs(requests: list[Request]) -> list[list[int]]:
    return [r.output for r in requests]


# --- tokens


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_tokens_equal_those_of_v2(
    worker: LocalWorker, answers_of_v2: list[Request], schedule: dict[str, Any]
) -> None:
    """Greedy, seeded and unseeded, with everything the sampler has, in any company, chunked and preempted."""
    requests = Driver(worker, **schedule).generate(MIXED_PROMPTS, MIXED_PARAMS)
    assert outputs(requests) == outputs(answers_of_v2)
    for rows, expected in zip(requests[1].logprobs, answers_of_v2[1].logprobs, strict=True):
        assert rows.token_ids == expected.token_ids and rows.ranks == expected.ranks
        assert np.allclose(rows.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_greedy_tokens_equal_transformers(checkpoint: str, reference: Reference, block_size: int) -> None:
    """More requests than the blocks could hold at once, so that each block, and each row, serves several."""
    prompts = prompts_of(12, 30, 7, 25, 18, 9)
    with worker_of("V1", checkpoint, max_num_seqs=3, block_size=block_size) as worker:
        driver = Driver(worker, token_budget=20, num_blocks=1 + 3 * -(-50 // block_size))
        driver.generate(prompts_of(25, 25, 25, seed=9), GREEDY)
        assert outputs(driver.generate(prompts, GREEDY)) == [reference.greedy(p, 20) for p in prompts]


@pytest.mark.parametrize(
    "schedule", [{}, {"token_budget": 6}, {"token_budget": 6, "preempt_at": (2, 4, 9, 13)}]
)
def test_logprobs_equal_transformers(
    worker: LocalWorker, reference: Reference, schedule: dict[str, Any]
) -> None:
    """Prompt log-probabilities come once and complete, those of the output with each token."""
    prompts = prompts_of(19, 1, 11)
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=k) for k in (3, 3, 0)]
    requests = Driver(worker, **schedule).generate(prompts, params)
    assert [len(r.prompt_logprobs) for r in requests] == [1, 0, 1]
    for request, k in zip(requests, (3, 3, 0), strict=True):
        expected, n = reference.logprobs(request.tokens), len(request.prompt)
        for rows in request.prompt_logprobs:
            assert_logprobs_close(rows, expected[: n - 1], request.prompt[1:], k)
        for i, (rows, token) in enumerate(zip(request.logprobs, request.output, strict=True)):
            assert_logprobs_close(rows, expected[n - 1 + i : n + i], [token], 2)


@pytest.mark.timeout(120)
def test_two_ranks(checkpoint: str, answers_of_v2: list[Request]) -> None:
    workers = SpawnedWorkers(2)
    try:
        with forced("V1"):
            config = make_config(checkpoint, tp=2, max_num_seqs=4, max_model_len=128)
        # The children's environment says nothing: the decision travels with the configuration.
        workers.bring_up(config)
        assert workers.call(runner_module) == ["minivllm.worker.gpu_model_runner"] * 2
        requests = Driver(workers, **SCHEDULES["preempted"]).generate(MIXED_PROMPTS, MIXED_PARAMS)
        assert outputs(requests) == outputs(answers_of_v2)
        workers.shut_down_workers()
    finally:
        workers.close()


def runner_module(rank: int, worker: Any) -> str:
    return str(type(worker.model_runner).__module__)


ENGINES = {
    "sync": {},
    "async": {"async_scheduling": True},
    "preempting": {"num_gpu_blocks_override": 14, "block_size": 8, "max_num_batched_tokens": 24},
    "preempting async": {
        "num_gpu_blocks_override": 14,
        "block_size": 8,
        "max_num_batched_tokens": 24,
        "async_scheduling": True,
    },
}


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_an_engine_with_aborts_in_flight(
    checkpoint: str, reference: Reference, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the real scheduler: some requests are taken back at different moments, the others get their tokens."""
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "0")
    prompts = prompts_of(40, 7, 25, 18, 31, 12, 5, 22, seed=4)
    limits = {"max_model_len": 100, "max_num_seqs": 4, **settings}
    with forced("V1"), LLM(checkpoint, device="cpu", dtype="float32", **limits) as llm:
        engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            _, request = engine.process_input(str(i), {"prompt_token_ids": prompt}, params)
            engine.add_request(None, request)
        finished = {}
        for step in range(200):
            if step in (2, 5, 9):
                engine.abort_requests([str({2: 1, 5: 6, 9: 3}[step])])
            for output in engine.step():
                finished[int(output.request_id)] = output.outputs[0].token_ids
            if not engine.has_unfinished_requests():
                break
        core = engine.engine_core.engine_core
        while core.has_work():
            core.step_fn()
        runner = core.model_executor.driver_worker.worker.model_runner
        assert isinstance(runner, GPUModelRunner)
        assert not runner.requests and not runner.input_batch.num_reqs, "something of a request is left"
    expected = {i: reference.greedy(p, 15) for i, p in enumerate(prompts) if i not in (1, 6, 3)}
    assert {i: finished[i] for i in expected} == expected


def report_runner(worker: Any) -> tuple[str, list[str], int]:
    """What a rank has left of the requests."""
    runner = worker.model_runner
    return type(runner).__module__, list(runner.requests), len(runner.pending_tokens)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm_workers")
def test_pipeline_stages(checkpoint: str, reference: Reference) -> None:
    """Tokens come back from the last stage while rows move, requests are preempted and batches are in flight.

    Many requests end with their first token, so that nobody needs it, and it is taken all the same.
    """
    prompts = prompts_of(40, 7, 25, 18, 31, 12, 5, 22, *[3] * 20, seed=4)
    greedy = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    single = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    limits = {"max_model_len": 100, "max_num_seqs": 4, "dtype": "float32", **ENGINES["preempting async"]}
    with forced("V1"), LLM(checkpoint, device="cpu", pipeline_parallel_size=2, **limits) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, [greedy] * 8 + [single] * 20, use_tqdm=False)
        core = llm.llm_engine.engine_core.engine_core
        while core.has_work():
            core.step_fn()
        for module, requests, pending in llm.collective_rpc(report_runner):
            assert module == "minivllm.worker.gpu_model_runner" and not requests and pending <= 1
    assert [o.outputs[0].token_ids for o in outputs] == [
        reference.greedy(prompt, 15 if i < 8 else 1) for i, prompt in enumerate(prompts)
    ]


def repetitive(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    piece = [rng.randrange(2048) for _ in range(3)]
    return (piece * length)[:length]


def engine_answers(
    checkpoint: str, runner: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], Any]:
    """What eight requests of all kinds get, and the scheduler's statistics on drafts."""
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "0")
    prompts = [repetitive(5 + 3 * i, i) for i in range(8)]
    params = [msgspec.structs.replace(p, max_tokens=24, ignore_eos=True) for p in MIXED_PARAMS[:8]]
    with (
        forced(runner),
        LLM(checkpoint, device="cpu", dtype="float32", max_model_len=100, max_num_seqs=4, **settings) as llm,
    ):
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        stats = llm.llm_engine.engine_core.engine_core.scheduler.spec_decoding_stats
    return [output.outputs[0] for output in outputs], stats


@pytest.mark.parametrize("schedule", ["sync", "preempting"])
def test_speculation_with_n_grams_changes_no_token(
    checkpoint: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, seeded, penalised, biased, with forbidden words and log-probabilities: as V2 without speculation."""
    expected, _ = engine_answers(checkpoint, "V2", {}, monkeypatch)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    settings = {**ENGINES[schedule], "speculative_config": ngram}
    found, stats = engine_answers(checkpoint, "V1", settings, monkeypatch)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert stats.num_accepted_tokens > 10 and stats.num_draft_tokens > stats.num_accepted_tokens
    for position, other in zip(found[1].logprobs, expected[1].logprobs, strict=True):
        assert list(position) == list(other)
        assert np.allclose(
            [p.logprob for p in position.values()], [p.logprob for p in other.values()], atol=1e-4
        )


def test_a_grammar_decides(worker: LocalWorker) -> None:
    """Only the constrained request's tokens are limited, and only to what its bitmask allows."""
    new = [new_request("free", [1, 2, 3], 1), new_request("bound", [1, 2, 3], 2)]
    output = SchedulerOutput(new, CachedRequestData(), {"free": 3, "bound": 3}, 6)
    assert worker.worker.execute_model(output) is None
    mask = np.zeros((1, 2048 // 32), dtype=np.int32)
    mask[0, 1500 // 32] = np.uint32(1 << (1500 % 32)).astype(np.int32)
    mask[0, 0] = np.array(1 << 31, dtype=np.uint32).astype(np.int32)
    result = worker.worker.sample_tokens(GrammarOutput(["bound"], mask))
    tokens = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
    assert tokens["bound"][0] in (31, 1500)
    worker.step(SchedulerOutput(finished_req_ids={"free", "bound"}))
    assert tokens["free"] == outputs(Driver(worker).generate([[1, 2, 3]], GREEDY))[0][:1]


# --- the worker around it


def new_request(
    req_id: str, prompt: list[int], block: int, params: SamplingParams = GREEDY
) -> NewRequestData:
    return NewRequestData(req_id, prompt, prompt, params, [block], 0)


def test_rows_move_as_requests_come_and_go(worker: LocalWorker) -> None:
    """The step that test_runner's test_slots_never_move takes with V2: there nothing moves, here two rows do."""
    batch = worker.worker.model_runner.input_batch
    new = [new_request(r, [1, 2, 3], i + 1) for i, r in enumerate("abc")]
    worker.step(SchedulerOutput(new, CachedRequestData(), dict.fromkeys("abc", 3), 9))
    assert batch.req_ids == ["a", "b", "c"]
    output = SchedulerOutput(
        [new_request("d", [4, 5], 4)], CachedRequestData(["c", "a"], [None, None], [3, 3]), {"c": 1, "d": 2, "a": 1}, 4,
        finished_req_ids={"b"},
    )  # fmt: skip
    result = worker.step(output)
    # d has filled b's hole, and has then changed places with c: decode comes before prefill.
    assert result.req_ids == batch.req_ids == ["a", "c", "d"]
    assert batch.moves == BatchMoves(filled=1, condensed=0, swapped=1)
    only_c = SchedulerOutput([], CachedRequestData(["c"], [None], [4]), {"c": 1}, 1, finished_req_ids={"a"})
    worker.step(only_c)
    # a has ended and d is not scheduled: c is left, and is moved to the front.
    assert batch.req_ids == ["c"] and batch.moves == BatchMoves(condensed=1)
    assert set(worker.worker.model_runner.requests) == {"c", "d"}
    done = SchedulerOutput(finished_req_ids={"c", "d"})
    assert worker.worker.execute_model(done) == ModelRunnerOutput()
    assert worker.worker.sample_tokens(None) is None


def test_what_does_not_fit_is_refused(worker: LocalWorker) -> None:
    new = [new_request(str(i), [1], i + 1) for i in range(5)]
    with pytest.raises(RuntimeError, match="no row for request 4: all 4 are taken"):
        worker.step(SchedulerOutput(new, CachedRequestData(), {str(i): 1 for i in range(5)}, 5))
    worker.step(SchedulerOutput(finished_req_ids={str(i) for i in range(5)}))
    with pytest.raises(RuntimeError, match=r"scheduled are requests \['unknown'\], known are \[\]"):
        worker.step(SchedulerOutput(num_scheduled_tokens={"unknown": 1}, total_num_scheduled_tokens=1))


def test_the_models_length_can_be_filled(worker: LocalWorker, reference: Reference) -> None:
    prompts = prompts_of(120, 127)
    requests = Driver(worker).generate(prompts, SamplingParams(temperature=0, max_tokens=None))
    assert outputs(requests) == [reference.greedy(prompts[0], 8), reference.greedy(prompts[1], 1)]


@pytest.mark.parametrize("limits", [(1, 1, 2), (2, 2, 4)])
def test_smallest_limits(checkpoint: str, limits: tuple[int, int, int]) -> None:
    seqs, tokens, length = limits
    with worker_of(
        "V1", checkpoint, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length
    ) as worker:
        worker.worker.execute_dummy_batch()
        params = SamplingParams(temperature=0, max_tokens=length - 1)
        (request,) = Driver(worker, token_budget=tokens).generate([[5]], params)
        assert len(request.output) == length - 1


TRACED = """
import sys
from minivllm import tracing
tracing.configure("worker", rank=0, trace_dir=sys.argv[2], level="message")
from runner_harness import Driver, local_worker
from minivllm.sampling_params import SamplingParams
with local_worker(sys.argv[1]) as worker:
    Driver(worker).generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=3))
tracing.shutdown()
"""


def test_both_runners_show_the_same_steps(checkpoint: str, tmp_path: Path) -> None:
    """Timelines of V1 and V2 can be laid side by side; runner.select says who was chosen, and why."""
    shown = {}
    for runner in ("V1", "V2"):
        directory = tmp_path / runner
        with forced(runner):
            command = [sys.executable, "-c", TRACED, checkpoint, str(directory)]
            subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parent)
        shown[runner] = spans = read_spans(directory)
        select = spans["runner.select"][0]
        assert select["minivllm.runner"] == runner and select["minivllm.decided_by"] == "environment"
        assert select["minivllm.stage.environment"].endswith(f"{VARIABLE}={int(runner == 'V2')}")
        assert select["minivllm.stage.kernels"].startswith("not asked")
    # The warm-up of V1 is dummies, not steps; apart from their number, all is the same.
    assert set(shown["V1"]) == set(shown["V2"])
    moved = [int(s["minivllm.rows_swapped"]) for s in shown["V1"]["runner.update_states"]]
    assert len(moved) == 4 and moved[0] == 1, "the prompt of one token has gone to the front"


def read_spans(directory: Path) -> dict[str, list[dict[str, Any]]]:
    spans: dict[str, list[dict[str, Any]]] = {}
    for file in directory.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            for resource in json.loads(line).get("resourceSpans", []):
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        attributes = {
                            a["key"]: next(iter(a["value"].values())) for a in span.get("attributes", [])
                        }
                        spans.setdefault(span["name"], []).append(attributes)
    return spans


# --- what only V1 has


class NoRepeat(LogitsProcessor):
    """Forbids the token that a request got last. State by row, moved as the batch says."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, _, _, output_token_ids in batch_update.added:
            self.rows[row] = output_token_ids
        for source, target, directionality in batch_update.moved:
            if directionality is MoveDirectionality.SWAP:
                self.rows[source], self.rows[target] = self.rows[target], self.rows[source]
            else:
                self.rows[target] = self.rows.pop(source)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert sorted(self.rows) == list(range(logits.shape[0]))
        for row, output in self.rows.items():
            if output:
                logits[row, output[-1]] = float("-inf")
        return logits


class TopOne(NoRepeat):
    """Keeps the most likely token only: no concern of a greedy batch."""

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(logits < logits.amax(-1, keepdim=True), float("-inf"))


def no_repeat(reference: Reference, prompt: list[int], num_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        logprobs = reference.logprobs(prompt + tokens)[-1].clone()
        if tokens:
            logprobs[tokens[-1]] = float("-inf")
        tokens.append(int(logprobs.argmax()))
    return tokens


def test_logits_processors_follow_the_rows(checkpoint: str, reference: Reference) -> None:
    """Invariant 6 of the batch: while requests come, go, are preempted and change places."""
    prompts = prompts_of(9, 4, 17, 2, 30, 11)
    name = f"{__name__}:NoRepeat"
    with worker_of("V1", checkpoint, max_num_seqs=3, logits_processors=[name, TopOne]) as worker:
        requests = Driver(worker, token_budget=13, preempt_at=(3, 7, 8, 15)).generate(prompts, GREEDY)
        expected = [no_repeat(reference, p, 20) for p in prompts]
        assert outputs(requests) == expected
        hot = SamplingParams(temperature=3.0, seed=1, max_tokens=20)
        assert outputs(Driver(worker).generate(prompts[:2], hot)) == expected[:2], "TopOne leaves no choice"


@pytest.mark.parametrize("name", ["minivllm.nowhere:Class", "json:Nothing", "json:JSONDecoder", "json"])
def test_a_logits_processor_that_is_none(checkpoint: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"logits processor '{name}'"):
        with worker_of("V1", checkpoint, logits_processors=[name]):
            pass


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_modes(checkpoint: str, reference: Reference, mode: str, temperature: float) -> None:
    bias = {7: 4.0}
    params = SamplingParams(
        temperature=temperature, seed=5, max_tokens=3, logprobs=2, prompt_logprobs=1, logit_bias=bias
    )
    with worker_of("V1", checkpoint, logprobs_mode=mode) as worker:
        (request,) = Driver(worker).generate([[5, 6, 7, 8]], params)
    logits = reference.model(torch.tensor([request.tokens])).logits[0].detach()
    (prompt_rows,) = request.prompt_logprobs
    # A prompt is not sampled, so that nothing has processed its logits.
    given = logits if mode.endswith("logits") else logits.log_softmax(-1)
    assert_logprobs_close(prompt_rows, given[:3], request.prompt[1:], 1)
    expected = logits[3:-1].clone()
    if mode.startswith("processed"):
        expected[:, 7] += 4.0
        expected /= temperature or 1.0
    if mode.endswith("logprobs"):
        expected = expected.log_softmax(-1)
    for i, (rows, token) in enumerate(zip(request.logprobs, request.output, strict=True)):
        assert_logprobs_close(rows, expected[i : i + 1], [token], 2)


# --- the batch


class Model:
    """What the batch should hold: requests by id, and rows by number as a logits processor would follow them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.batch = InputBatch(6, 40, 50, 4, torch.device("cpu"))
        self.requests: dict[str, CachedRequestState] = {}
        self.followed: dict[int, list[int]] = {}
        self.next_id = 0

    def new_request(self) -> CachedRequestState:
        rng, self.next_id = self.rng, self.next_id + 1
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.0]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.1]),
            presence_penalty=rng.choice([0.0, 0.25]),
            logprobs=rng.choice([None, 2]),
            logit_bias=rng.choice([None, {rng.randrange(50): 1.0}]),
            min_tokens=rng.choice([0, 2]),
            bad_words_token_ids=rng.choice([None, [[rng.randrange(50)]]]),
        )
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        output = [rng.randrange(50) for _ in range(rng.randint(0, 5))]
        blocks = [rng.randrange(1, 99) for _ in range(rng.randint(1, 8))]
        return CachedRequestState(
            f"r{self.next_id}", prompt, params, self.next_id, blocks, 0, output, len(prompt)
        )

    def step(self) -> None:
        """What _update_states does: some leave, some come, some grow; condense, reorder, refresh."""
        rng, batch = self.rng, self.batch
        batch.moves = BatchMoves()
        before = dict(batch.req_id_to_index)
        leaving = [r for r in self.requests if rng.random() < 0.3]
        for req_id in leaving:
            assert batch.remove_request(req_id) == before[req_id]
            assert batch.remove_request(req_id) is None
            del self.requests[req_id]
        holes = sorted(before[r] for r in leaving)
        for request in self.requests.values():
            row = batch.req_id_to_index[request.req_id]
            if rng.random() < 0.3 and len(request.block_ids) < 10:
                request.block_ids.append(rng.randrange(1, 99))
                batch.block_table.append_row(request.block_ids[-1:], row)
        for _ in range(rng.randint(0, 6 - len(self.requests))):
            request = self.new_request()
            row = batch.add_request(request, [1, 2])
            self.requests[request.req_id] = request
            expected = holes.pop(0) if holes else row
            assert row == expected, "invariant 4: a new request takes the lowest hole"
        stay = {r: i for r, i in before.items() if r in self.requests}
        batch.condense()
        num_reqs = len(self.requests)
        fillable = [hole for hole in holes if hole < num_reqs]
        assert batch.moves.condensed == len(fillable), "invariant 4: one move for each hole that is left"
        moved = {r for r, i in stay.items() if batch.req_id_to_index[r] != i}
        assert moved == {r for r, i in stay.items() if i >= num_reqs}, "invariant 4: no other row moves"
        self.reorder()
        self.follow(batch.refresh_metadata())
        self.check()
        self.grow()

    def reorder(self) -> None:
        batch = self.batch
        scheduled = {r: self.rng.choice([1, 1, 5]) for r in self.requests}
        singles = sum(n == 1 for n in scheduled.values())
        wrong = sum(scheduled[r] != 1 for r in batch.req_ids[:singles])
        batch.reorder(scheduled)
        order = [scheduled[r] == 1 for r in batch.req_ids]
        assert order == sorted(order, reverse=True), "invariant 5: one token first"
        assert batch.moves.swapped == wrong, "invariant 5: no more swaps than rows on the wrong side"

    def follow(self, update: BatchUpdate | None) -> None:
        if update is None:
            return
        for row in update.removed:
            self.followed.pop(row, None)
        for row, _, _, output in update.added:
            self.followed[row] = output
        for source, target, direction in update.moved:
            if direction is MoveDirectionality.SWAP:
                self.followed[source], self.followed[target] = self.followed[target], self.followed[source]
            else:
                self.followed[target] = self.followed.pop(source)

    def grow(self) -> None:
        """Tokens arrive, as _bookkeeping_sync writes them."""
        for request in self.requests.values():
            row, token = self.batch.req_id_to_index[request.req_id], self.rng.randrange(50)
            if request.num_tokens < 40:
                self.batch.token_ids_cpu[row, self.batch.num_tokens[row]] = token
                self.batch.num_tokens[row] += 1
                request.output_token_ids.append(token)

    def check(self) -> None:
        batch, metadata = self.batch, self.batch.sampling_metadata
        ids = batch.req_ids
        assert len(ids) == batch.num_reqs == len(batch._req_ids) and set(ids) == set(self.requests), (
            "invariant 1"
        )
        assert {r: i for i, r in enumerate(ids)} == batch.req_id_to_index, "invariant 2"
        for row, req_id in enumerate(ids):
            request = self.requests[req_id]
            params, tokens = request.sampling_params, request.prompt_token_ids + request.output_token_ids
            assert batch.token_ids_cpu[row, : len(tokens)].tolist() == tokens, "invariant 3"
            assert batch.num_tokens[row] == len(tokens) and batch.seeds_cpu[row] == request.seed
            assert batch.num_prompt_tokens[row] == len(request.prompt_token_ids)
            table = batch.block_table.np[row].tolist()
            n = len(request.block_ids)
            assert table == request.block_ids + [0] * (len(table) - n), "invariant 3: blocks, and null beyond"
            assert batch.temperature_cpu[row] == np.float32(params.temperature)
            assert (req_id in batch.random_reqs) == (params.temperature > 0)
            assert batch.top_k_cpu[row] == (params.top_k or 50)
            assert batch.top_p_cpu[row] == np.float32(params.top_p)
            assert batch.min_p_cpu[row] == np.float32(params.min_p)
            assert batch.presence_penalties_cpu[row] == np.float32(params.presence_penalty)
            assert batch.logit_bias.get(row) == params.logit_bias
            assert batch.min_tokens.get(row) == ((2, [1, 2]) if params.min_tokens else None)
            assert batch.bad_words_token_ids.get(row) == params.bad_words_token_ids
            assert batch.num_logprobs.get(req_id) == params.logprobs
            assert metadata.output_token_ids[row] is request.output_token_ids
            assert self.followed[row] is request.output_token_ids, "invariant 6"
            if metadata.prompt_mask is not None:
                assert set(metadata.prompt_mask[row].nonzero().flatten().tolist()) == set(
                    request.prompt_token_ids
                )
        assert set(self.followed) == set(range(len(ids))), "invariant 6"
        for sparse in (batch.logit_bias, batch.min_tokens, batch.bad_words_token_ids):
            assert all(row < len(ids) for row in sparse)
        everybody = (
            batch.random_reqs | batch.top_p_reqs | batch.top_k_reqs | batch.min_p_reqs | batch.penalties_reqs
        )
        assert everybody <= set(ids) and set(batch.num_logprobs) <= set(ids)
        assert (metadata.temperature is None) == (not batch.random_reqs)
        if metadata.temperature is not None:
            assert metadata.temperature.tolist() == batch.temperature_cpu[: len(ids)].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_the_batch_stays_dense_and_in_order(seed: int) -> None:
    """All invariants of InputBatch after each of a hundred random steps."""
    model = Model(seed)
    for _ in range(100):
        model.step()


def test_a_row_is_as_good_as_new(checkpoint: str) -> None:
    """What a former owner had must not stay behind: all features on, then none, in the same rows."""
    with worker_of("V1", checkpoint) as worker:
        plain = outputs(Driver(worker).generate(MIXED_PROMPTS[:4], GREEDY))
        Driver(worker).generate(MIXED_PROMPTS, MIXED_PARAMS)
        assert outputs(Driver(worker).generate(MIXED_PROMPTS[:4], GREEDY)) == plain
