"""Model Runner V2's data path: slots, batches, chunks, preemption, and what a worker promises around it."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

from minivllm.assets.make_checkpoint import PRESETS, make_random_checkpoint
from minivllm.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from minivllm.outputs import ModelRunnerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu import model_runner

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def prompts_of(*lengths: int, seed: int = 2) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2048) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_random_checkpoint(tmp_path_factory.mktemp("model") / "m", **PRESETS["qwen3-gqa2"], seed=5)
    )


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> Reference:
    return Reference(checkpoint)


# A process belongs to one world at a time, so that no two workers can live side by side here.
@pytest.fixture
def worker(checkpoint: str) -> Iterator[LocalWorker]:
    with local_worker(checkpoint, max_model_len=128, max_num_seqs=4) as worker:
        yield worker


def outputs(requests: list[Request]) -> list[list[int]]:
    return [r.output for r in requests]


def alone(worker: LocalWorker, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Each request as the only one, its prompt in one step."""
    return [Driver(worker).generate([p], [s])[0].output for p, s in zip(prompts, params, strict=True)]


MIXED_PARAMS = [
    SamplingParams(temperature=0, max_tokens=25),
    SamplingParams(temperature=0.9, seed=7, max_tokens=18),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.9, max_tokens=22, seed=-1),
    SamplingParams(temperature=0, repetition_penalty=1.8, frequency_penalty=0.5, max_tokens=30),
    SamplingParams(temperature=0.7, min_p=0.05, presence_penalty=1.0, max_tokens=9, seed=3),
    SamplingParams(temperature=0, min_tokens=4, logit_bias={5: 3.0}, max_tokens=12),
    SamplingParams(temperature=0, bad_words=["-"], bad_words_token_ids=[[1], [2, 3]], max_tokens=15),
    SamplingParams(temperature=0, max_tokens=1),
]


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"token_budget": 7},
        {"token_budget": 16, "reverse": True},
        {"token_budget": 33, "preempt_at": (2, 5, 6, 9, 14, 20, 21, 30, 44)},
        {"token_budget": 5, "preempt_at": tuple(range(3, 90, 4)), "reverse": True},
    ],
    ids=["plain", "chunks", "reversed", "preempted", "everything"],
)
def test_tokens_do_not_depend_on_the_schedule(worker: LocalWorker, schedule: dict[str, Any]) -> None:
    """All kinds of sampling, in any company, with chunked prompts and after preemptions."""
    prompts = prompts_of(20, 3, 41, 17, 1, 16, 30, 50)
    expected = alone(worker, prompts, MIXED_PARAMS)
    assert len({tuple(o) for o in expected}) == len(expected)
    assert outputs(Driver(worker, **schedule).generate(prompts, MIXED_PARAMS)) == expected


def test_a_batch_that_goes_on_is_the_one_that_would_be_made(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the same decoding requests takes the last batch and its pages on; nothing in them may be stale."""
    runner = worker.worker.model_runner
    buffers, builder = runner.input_buffers, runner.model_state.attn_metadata_builder
    made, kept = {"batches": 0, "pages": 0}, {"batches": 0, "pages": 0}

    def values(batch: Any) -> dict[str, Any]:
        return {
            f.name: (v.tolist() if hasattr(v := getattr(batch, f.name), "tolist") else v)
            for f in dataclasses.fields(batch)
        }

    def check_batch(*args: Any) -> Any:
        before = buffers.decoded
        batch = make_input_batch(*args)
        was_kept = before is not None and before[0] is batch
        (kept if was_kept else made)["batches"] += 1
        got, decoded, buffers.decoded = values(batch), buffers.decoded, None
        anew = values(make_input_batch(*args))
        assert got == anew
        buffers.decoded = decoded
        return batch

    def check_pages(batch: Any, longest: int, tables: Any) -> Any:
        before = builder._pages
        pages = pages_of_decodes(batch, longest, tables)
        (kept if pages is before else made)["pages"] += 1
        assert pages.tolist() == builder._gather_pages(batch.idx_mapping, longest, tables).tolist()
        return pages

    make_input_batch, pages_of_decodes = model_runner.make_input_batch, builder._pages_of_decodes
    monkeypatch.setattr(model_runner, "make_input_batch", check_batch)
    monkeypatch.setattr(builder, "_pages_of_decodes", check_pages)
    prompts = prompts_of(20, 3, 41, 17, 1, 16, 30, 50)
    expected = [[]] * len(prompts)
    for schedule in ({}, {"token_budget": 33, "preempt_at": (5, 9, 14, 20, 44), "reverse": True}):
        got = outputs(Driver(worker, **schedule).generate(prompts, MIXED_PARAMS))
        assert expected == [[]] * len(prompts) or got == expected
        expected = got
    assert kept["batches"] > made["batches"] / 2 and kept["pages"] > made["pages"]


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_block_sizes_and_reused_blocks(checkpoint: str, reference: Reference, block_size: int) -> None:
    """More requests than the blocks could hold at once: each block serves several of them."""
    prompts = prompts_of(12, 30, 7, 25, 18, 9)
    with local_worker(checkpoint, max_model_len=128, max_num_seqs=3, block_size=block_size) as worker:
        blocks = 1 + 3 * -(-50 // block_size)
        driver = Driver(worker, token_budget=20, num_blocks=blocks)
        driver.generate(prompts_of(25, 25, 25, seed=9), GREEDY)
        assert outputs(driver.generate(prompts, GREEDY)) == [reference.greedy(p, 20) for p in prompts]


@pytest.mark.parametrize(
    "schedule", [{}, {"token_budget": 6}, {"token_budget": 6, "preempt_at": (2, 4, 9, 13)}]
)
def test_prompt_logprobs_come_once_and_complete(
    worker: LocalWorker, reference: Reference, schedule: dict[str, Any]
) -> None:
    prompts = prompts_of(19, 1, 11)
    params = [
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=3),
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=3),
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0),
    ]
    requests = Driver(worker, **schedule).generate(prompts, params)
    assert [len(r.prompt_logprobs) for r in requests] == [1, 0, 1]
    for request, k in ((requests[0], 3), (requests[2], 0)):
        expected = reference.logprobs(request.prompt)[:-1]
        assert_logprobs_close(request.prompt_logprobs[0], expected, request.prompt[1:], k)


def test_the_models_length_can_be_filled(worker: LocalWorker, reference: Reference) -> None:
    """The last token is sampled with the cache full, and belongs to no position."""
    prompts = prompts_of(120, 127, 128)
    requests = Driver(worker).generate(prompts, SamplingParams(temperature=0, max_tokens=None))
    assert [len(r.output) for r in requests] == [8, 1, 0] or [len(r.tokens) for r in requests] == [
        128,
        128,
        129,
    ]
    assert requests[0].output == reference.greedy(prompts[0], 8)


def new_request(
    req_id: str, prompt: list[int], block: int, params: SamplingParams = GREEDY
) -> NewRequestData:
    return NewRequestData(req_id, prompt, prompt, params, [block], 0)


def test_slots_never_move(worker: LocalWorker) -> None:
    """A request that ends frees its slot and moves nobody; the next new request takes that slot."""
    states = worker.worker.model_runner.req_states
    new = [new_request(r, [1, 2, 3], i + 1) for i, r in enumerate("abc")]
    worker.step(SchedulerOutput(new, CachedRequestData(), dict.fromkeys("abc", 3), 9))
    slots = dict(states.req_id_to_index)
    output = SchedulerOutput(
        [new_request("d", [4, 5], 4)], CachedRequestData(["c", "a"], [None, None], [3, 3]), {"c": 1, "d": 2, "a": 1}, 4,
        finished_req_ids={"b"},
    )  # fmt: skip
    result = worker.step(output)
    assert result.req_ids == ["c", "a", "d"], "decode comes before prefill"
    assert states.req_id_to_index == {"a": slots["a"], "c": slots["c"], "d": slots["b"]}
    empty = worker.worker.execute_model(SchedulerOutput(finished_req_ids={"a", "c", "d"}))
    assert empty == ModelRunnerOutput() and states.num_reqs == 0
    assert worker.worker.sample_tokens(None) is None


def test_a_full_house_is_refused(worker: LocalWorker) -> None:
    new = [new_request(str(i), [1], i + 1) for i in range(5)]
    with pytest.raises(RuntimeError, match="no slot for request 4: all 4 are taken"):
        worker.step(SchedulerOutput(new, CachedRequestData(), {str(i): 1 for i in range(5)}, 5))
    worker.step(SchedulerOutput(finished_req_ids={str(i) for i in range(5)}))


def test_a_dummy_batch_changes_nothing(worker: LocalWorker) -> None:
    prompts = prompts_of(10, 20)
    expected = outputs(Driver(worker).generate(prompts, GREEDY))

    class Interrupted(LocalWorker):
        def __init__(self) -> None:
            self.config, self.worker = worker.config, worker.worker

        def step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            self.worker.execute_dummy_batch()
            return super().step(scheduler_output)

    assert outputs(Driver(Interrupted()).generate(prompts, GREEDY)) == expected


def test_a_grammar_decides(worker: LocalWorker) -> None:
    """Only the constrained request's tokens are limited, and only to what its bitmask allows."""
    new = [new_request("free", [1, 2, 3], 1), new_request("bound", [1, 2, 3], 2)]
    output = SchedulerOutput(new, CachedRequestData(), {"free": 3, "bound": 3}, 6)
    assert worker.worker.execute_model(output) is None
    mask = np.zeros((1, 2048 // 32), dtype=np.int32)
    mask[0, 1500 // 32] = np.uint32(1 << (1500 % 32)).astype(np.int32)
    mask[0, 31 // 32] |= np.array(1 << 31, dtype=np.uint32).astype(np.int32)
    result = worker.worker.sample_tokens(GrammarOutput(["bound"], mask)).get_output()
    tokens = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
    assert tokens["bound"][0] in (31, 1500)
    assert tokens["free"] == alone(worker, [[1, 2, 3]], [GREEDY])[0][:1]
    worker.step(SchedulerOutput(finished_req_ids={"free", "bound"}))


def test_start_up_values(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs, memory, and a warm-up that leaves no request behind."""

    with local_worker(checkpoint, max_num_seqs=4) as local:
        runner = local.worker.model_runner
        assert runner.req_states.num_reqs == 0 and sorted(runner.req_states.free_indices) == [0, 1, 2, 3]
        specs = local.worker.get_kv_cache_spec()
        assert list(specs) == [f"model.layers.{i}.self_attn.attn" for i in range(3)]
        assert {(s.block_size, s.num_kv_heads, s.head_size, s.dtype) for s in specs.values()} == {
            (16, 4, 16, "float32")
        }
        assert local.worker.determine_available_memory() == 8 << 20
        local.worker.cache_config.kv_cache_memory_bytes = None
        monkeypatch.setenv("MINIVLLM_CPU_KVCACHE_BYTES", "123456")
        assert local.worker.determine_available_memory() == 123456
        assert local.worker.check_health() is None
        assert local.worker.take_draft_token_ids() is None
    # Shut down, and once more.
    local.worker.shutdown()
    with pytest.raises(RuntimeError, match="no model runner"):
        local.worker.check_health()


@pytest.mark.parametrize("limits", [(1, 1, 2), (1, 2, 3), (2, 2, 4), (4, 64, 16)])
def test_smallest_limits(checkpoint: str, limits: tuple[int, int, int]) -> None:
    """Warm-up and profiling fit into whatever the limits allow."""
    max_num_seqs, max_num_batched_tokens, max_model_len = limits
    with local_worker(
        checkpoint,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    ) as worker:
        driver = Driver(worker, token_budget=max_num_batched_tokens)
        (request,) = driver.generate([[5]], SamplingParams(temperature=0, max_tokens=max_model_len - 1))
        assert len(request.output) == max_model_len - 1


def fail_on_rank_1(rank: int, worker: Any, output: SchedulerOutput) -> str:
    if rank == 1:
        # Unknown to the runner: it fails before its first collective, while rank 0 waits in its own.
        output.num_scheduled_tokens = {"unknown": 1}
    start = time.monotonic()
    try:
        worker.execute_model(output)
        worker.sample_tokens(None)
    except Exception as e:
        assert time.monotonic() - start < 2
        return f"{type(e).__name__}: {e}"
    return "no error"


@pytest.mark.timeout(120)
def test_a_rank_that_fails_in_a_step_takes_its_peers_along(checkpoint: str) -> None:
    workers = SpawnedWorkers(2)
    try:
        workers.bring_up(make_config(checkpoint, tp=2))
        output = SchedulerOutput([new_request("a", [1, 2], 1)], CachedRequestData(), {"a": 2}, 2)
        first, second = workers.call(fail_on_rank_1, output)
        assert second == "KeyError: 'unknown'"
        assert "rank 1 failed in the middle of a step" in first
        workers.shut_down_workers()
    finally:
        workers.close()


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


def test_spans(checkpoint: str, tmp_path: Path) -> None:
    """Every step of the catalogue that a worker takes by itself is recorded, with what it is there to show."""
    command = [sys.executable, "-c", TRACED, checkpoint, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parent)
    spans: dict[str, list[dict[str, Any]]] = {}
    for file in tmp_path.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            for resource in json.loads(line).get("resourceSpans", []):
                for scope in resource.get("scopeSpans", []):
                    for span in scope.get("spans", []):
                        attributes = {
                            a["key"]: next(iter(a["value"].values())) for a in span.get("attributes", [])
                        }
                        spans.setdefault(span["name"], []).append(attributes)
    expected = [
        "worker.init_device",
        "device.bind",
        "dist.rendezvous",
        "dist.init_process_group",
        "dist.new_group",
        "dist.init_communicator",
        "device.memory_snapshot",
        "runner.select",
        "runner.init",
        "worker.load_model",
        "model.initialize",
        "model.load_weights",
        "runner.init_model_state",
        "worker.get_kv_cache_spec",
        "worker.determine_available_memory",
        "runner.profile_run",
        "runner.initialize_kv_cache",
        "runner.warm_up",
        "runner.capture_model",
        "runner.execute_model",
        "runner.update_states",
        "runner.prepare_inputs",
        "model.forward",
        "runner.sample_tokens",
        "runner.postprocess",
        "dist.destroy",
    ]
    assert set(expected) <= set(spans)
    assert [s["minivllm.group"] for s in spans["dist.new_group"]] == ["world", "tp", "pp"]
    assert spans["runner.capture_model"][0]["minivllm.reason"] == "a CPU has no graphs"
    loaded = spans["model.load_weights"][0]
    assert int(loaded["minivllm.bytes"]) == int(loaded["minivllm.bytes_of_whole_tensors"]) > 100_000
    assert "self_attn.q_proj.weight" in loaded["minivllm.shards"]
    assert int(spans["runner.execute_model"][-2]["minivllm.num_reqs"]) == 2
