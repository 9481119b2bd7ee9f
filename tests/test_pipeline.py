"""Pipeline parallelism: the same tokens as without, stages that overlap, and stages that fail."""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from greedy_reference import greedy_params, reference
from mixed_load import HARRIED, check_with_aborts
from runner_harness import SpawnedWorkers, rendezvous
from scenario import children, raises, scenario, wait_until

from minivllm import LLM, SamplingParams
from minivllm.trace_store import TraceStore

pytestmark = pytest.mark.timeout(180)
PROMPTS = ["def f(", "class A", "the function returns", "import"]
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


def start(**kwargs: Any) -> LLM:
    kwargs = {"device": "cpu", "max_model_len": 200, "max_num_seqs": 8, **kwargs}
    return LLM(distributed_executor_backend="mp", **kwargs)


# --- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_workers")
def test_three_stages_verify_drafts() -> None:
    """Four batches in flight, and two stages that hear from the last. Two stages: test_product.py."""
    expected = reference()
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with LLM(
        pipeline_parallel_size=3,
        distributed_executor_backend="mp",
        async_scheduling=True,
        speculative_config=ngram,
        **HARRIED,
    ) as llm:
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        assert core.batch_queue_size == 4 and core.model_executor.output_rank == 2
        # The bundled model has four layers.
        assert [len(spec) for spec in core.model_executor.get_kv_cache_specs()] == [1, 2, 1]
        assert check_with_aborts(llm, expected) > 0
        assert core.scheduler.spec_decoding_stats.num_accepted_tokens > 0


def test_tokens_and_logprobs_over_processes(tmp_path: Path) -> None:
    """EngineCore in a process of its own; untied weights, of which each stage reads its part only; log-probabilities."""
    from minivllm.assets.random_checkpoint import PRESETS, make_random_checkpoint

    path = make_random_checkpoint(tmp_path / "model", **PRESETS["qwen3-untied"])
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 9, 30, 40)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)

    def run(pp: int, backend: str) -> list[Any]:
        with LLM(
            path,
            device="cpu",
            dtype="float32",
            max_model_len=100,
            max_num_batched_tokens=20,
            max_num_seqs=4,
            pipeline_parallel_size=pp,
            distributed_executor_backend=backend,
        ) as llm:
            return llm.generate(prompts, params, use_tqdm=False)

    for one, two in zip(run(1, "uni"), run(2, "mp"), strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        for a, b in zip(one.outputs[0].logprobs, two.outputs[0].logprobs, strict=True):
            assert {k: v.logprob for k, v in a.items()} == pytest.approx(
                {k: v.logprob for k, v in b.items()}, abs=1e-5
            )
        assert len(one.prompt_logprobs) == len(two.prompt_logprobs)


# --- channels -----------------------------------------------------------------------------------------------------


def join(rank: int, worker: Any, size: int, method: str) -> str:
    import torch

    from minivllm.distributed import parallel_state

    parallel_state.init_distributed_environment(size, rank, method, torch.device("cpu"), "gloo")
    parallel_state.initialize_model_parallel(1, size)
    channels = parallel_state.get_pp_group().cpu_channels
    return channels.transport if channels is not None else "gloo"


def use_gloo(rank: int, worker: Any) -> None:
    """What remains on hosts without shared memory."""
    import torch.distributed as dist

    from minivllm.distributed import parallel_state

    group = parallel_state.get_pp_group()
    assert group.cpu_channels is not None
    group.cpu_channels.close()
    group.cpu_channels = None
    group.broadcast_group = dist.new_group(group.ranks)


def exchange(rank: int, worker: Any, rounds: int) -> int:
    """Hidden states down the pipeline and tokens back, of all sizes; a stage lags behind now and then."""
    import random

    import torch

    from minivllm.distributed import parallel_state

    group = parallel_state.get_pp_group()
    shared, own = random.Random(5), random.Random(rank)
    transfers: list[Any] = []
    for number in range(rounds):
        # The largest takes more slots than a ring has, and none of the sizes fills a slot exactly.
        rows, dtype = shared.choice([0, 1, 7, 300, 3001]), shared.choice([torch.float32, torch.bfloat16])
        message = {
            "hidden_states": torch.full((rows, 500), float(number), dtype=dtype),
            "residual": torch.arange(rows * 500, dtype=dtype).view(rows, 500),
        }
        if not group.is_first_rank:
            received = {name: torch.zeros_like(tensor) for name, tensor in message.items()}
            group.recv_tensor_dict(received)
            assert all(torch.equal(received[name], message[name]) for name in message), f"message {number}"
        if not group.is_last_rank:
            group.send_tensor_dict(message)
        if own.random() < 0.1:
            time.sleep(0.005)
        tokens = torch.arange(rows + 1) + number if group.is_last_rank else torch.zeros(rows + 1).long()
        transfers.append((group.broadcast_from_last(tokens), tokens, number))
        while transfers and (len(transfers) > group.world_size or transfers[0][0] is None):
            transfer, tokens, of = transfers.pop(0)
            if transfer is not None:
                transfer.wait()
            assert torch.equal(tokens, torch.arange(len(tokens)) + of)
    for transfer, _, _ in transfers:
        transfer.wait()
    return rounds


def leave(rank: int, worker: Any) -> None:
    from minivllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture(scope="module")
def three() -> Iterator[SpawnedWorkers]:
    workers = SpawnedWorkers(3)
    yield workers
    workers.close()


def test_messages_arrive_whole_and_in_order(three: SpawnedWorkers) -> None:
    assert set(three.call(join, 3, rendezvous())) == {"shared memory"}
    assert three.call(exchange, 60) == [60] * 3
    three.call(use_gloo)
    assert three.call(exchange, 20) == [20] * 3
    three.call(leave)


# --- failure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "failpoint", "rank"),
    [
        (1, "model.forward@rank0#20=kill", 0),
        (1, "runner.sample_tokens@rank1#20=kill", 1),
        (2, "model.forward@rank3#20=kill", 3),
    ],
)
@scenario(limit_s=60)
def test_a_killed_stage_is_named(tp: int, failpoint: str, rank: int) -> None:
    from minivllm.exceptions import EngineDeadError

    os.environ["MINIVLLM_FAILPOINTS"] = failpoint
    with start(pipeline_parallel_size=2, tensor_parallel_size=tp) as llm:
        # The failpoint comes within a few milliseconds, so the whole call is an upper bound of the delay.
        with raises(EngineDeadError, f"rank {rank}", "SIGKILL", within_s=1.0):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    wait_until(lambda: not children(), 1.0, "processes are left")


@pytest.mark.parametrize(
    ("point", "rank"), [("model.forward@rank0#20", 0), ("runner.sample_tokens@rank1#20", 1)]
)
@pytest.mark.usefixtures("warm_workers")
def test_an_exception_on_a_stage_reaches_the_caller(
    point: str, rank: int, failpoints: Callable[[str], None]
) -> None:
    """And the other stage, which may be waiting for the one that failed, does not stay in its call."""
    from minivllm.exceptions import EngineDeadError

    failpoints(f"{point}=raise")
    with start(pipeline_parallel_size=2) as llm:
        with raises(EngineDeadError, f"rank {rank}", f"failpoint {point}", within_s=1.5) as caught:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        if rank == 0 and sys.version_info >= (3, 11):
            text = "".join(traceback.format_exception(caught.error))
            assert "receive 20 of group pp cannot finish on rank 1: rank 0 failed" in text


# --- overlap ------------------------------------------------------------------------------------------------------


def overlapping_steps(directory: Path) -> tuple[int, int]:
    """(steps of the first stage that began before the last stage had finished the step before, all such pairs).

    The last stage has finished a step when it has sampled.
    """
    store = TraceStore.open(directory)
    begun: dict[int, int] = {}
    finished: dict[int, int] = {}
    for span in [*store.spans(name="model.forward"), *store.spans(name="runner.sample_tokens")]:
        step, stage = span.attributes["minivllm.step"], span.attributes["minivllm.pp_rank"]
        if step > 0 and stage == 0 and span.name == "model.forward":
            begun[step] = span.start_ns
        if step > 0 and stage == 1:
            finished[step] = max(span.end_ns, finished.get(step, 0))
    assert sorted(begun) == sorted(finished)
    pairs = list(itertools.pairwise(sorted(begun)))
    return sum(begun[b] < finished[a] for a, b in pairs), len(pairs)


def take_long(worker: Any) -> None:
    """Each forward pass from now on, so that whatever else this machine is at does not matter."""
    import time

    model = worker.model_runner.model
    forward = model.forward

    def slow_forward(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return forward(*args, **kwargs)

    model.forward = slow_forward


def check_view(directory: Path, overlapping: int, pairs: int, batches: int) -> None:
    """`minivllm timeline --view pipeline` says what the spans say."""
    from minivllm.timeline import build_views
    from minivllm.timeline.compare import compare
    from minivllm.timeline.run import Options

    store = TraceStore.open(directory)
    (view,) = build_views(store, ["pipeline"])
    assert [row.label for row in view.rows if row.depth == 1] == ["stage 0", "stage 1"]
    text = " ".join(view.explanation)
    assert f"in {overlapping} of {pairs} cases the first stage began a step before" in text
    assert ("no batch queue" in text) == (batches == 1)
    assert ("had up to 2" in text) == (batches == 2)
    assert "future" in [v.name for v in build_views(store, ["all"])] or batches == 1
    summary, first, second = compare((store, store), ("A", "B"), ["pipeline"], Options())
    steps = len(store.spans("scheduler.schedule"))
    assert f"steps: A {steps}, B {steps} (the same)" in summary.explanation
    assert f"over the {pairs + 1} steps that had a batch" in text
    assert first.title.startswith("A: ") and second.title.startswith("B: ")
    (narrow,) = build_views(store, ["pipeline"], Options(focus="3"))
    assert "Steps 3 to " in narrow.title


@pytest.mark.parametrize("batches", ["", "1"])
@pytest.mark.usefixtures("warm_workers")
def test_a_trace_shows_the_bubbles(batches: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a batch queue the first stage works on the next batch while the last one has this one; without, never."""
    monkeypatch.setenv("MINIVLLM_MAX_CONCURRENT_BATCHES", batches)
    # A step holds one prompt, which keeps the requests in batches of their own.
    with start(pipeline_parallel_size=2, max_num_batched_tokens=16, trace=tmp_path) as llm:
        llm.collective_rpc(take_long)
        prompts = [{"prompt_token_ids": [5 + i] * 15} for i in range(4)]
        llm.generate(prompts, greedy_params(), use_tqdm=False)
    overlapping, pairs = overlapping_steps(tmp_path)
    check_view(tmp_path, overlapping, pairs, 1 if batches else 2)
    if batches:
        assert overlapping == 0 and pairs >= 10
    else:
        assert overlapping >= pairs // 2 and pairs >= 20
