"""Tokens and log-probabilities equal transformers' in float32, for all kinds of checkpoints and TP 1, 2 and 4."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from runner_harness import (
    Driver,
    LocalWorker,
    Reference,
    SpawnedWorkers,
    assert_logprobs_close,
    local_worker,
    make_config,
)

from minivllm.assets.make_checkpoint import PRESETS, make_random_checkpoint
from minivllm.config import BUNDLED_CHECKPOINT
from minivllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2)
NAMES = ["bundled", *(name for name in PRESETS if name != "qwen3-1m")]


def _prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(2048) for _ in range(n)] for n in (1, 2, 15, 16, 17, 40, 61, 33, 5, 64)]


PROMPTS = _prompts()


class Checkpoints:
    """Directories and reference answers by name, made when first asked for."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.references: dict[str, Reference] = {}
        self.answers: dict[str, list[list[int]]] = {}

    def path(self, name: str) -> str:
        if name == "bundled":
            return str(BUNDLED_CHECKPOINT)
        path = self.home / name
        if not path.exists():
            make_random_checkpoint(path, **PRESETS[name], seed=3)
        return str(path)

    def reference(self, name: str) -> Reference:
        if name not in self.references:
            self.references[name] = Reference(self.path(name))
        return self.references[name]

    def greedy(self, name: str) -> list[list[int]]:
        if name not in self.answers:
            reference = self.reference(name)
            self.answers[name] = [reference.greedy(p, GREEDY.max_tokens or 0) for p in PROMPTS]
        return self.answers[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def tp2() -> Iterator[SpawnedWorkers]:
    workers = SpawnedWorkers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def tp4() -> Iterator[SpawnedWorkers]:
    workers = SpawnedWorkers(4)
    yield workers
    workers.close()


def check(workers: LocalWorker | SpawnedWorkers, checkpoints: Checkpoints, name: str) -> None:
    """More prompts than slots, a budget that chunks and mixes: tokens, logprobs and prompt logprobs are right."""
    requests = Driver(workers, token_budget=48).generate(PROMPTS, GREEDY)
    assert [r.output for r in requests] == checkpoints.greedy(name)
    reference = checkpoints.reference(name)
    for request in requests[2:6]:
        expected = reference.logprobs(request.tokens)
        n = len(request.prompt)
        (rows,) = request.prompt_logprobs
        assert_logprobs_close(rows, expected[: n - 1], request.prompt[1:], 2)
        for i, (rows, token) in enumerate(zip(request.logprobs, request.output, strict=True)):
            assert_logprobs_close(rows, expected[n - 1 + i : n + i], [token], 3)
    assert requests[0].prompt_logprobs == []


@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name: str, checkpoints: Checkpoints) -> None:
    with local_worker(checkpoints.path(name)) as worker:
        check(worker, checkpoints, name)


@pytest.mark.parametrize("name", ["bundled", "qwen3-gqa4", "qwen3-bias", "llama-gqa1", "llama-gqa2"])
def test_two_ranks(name: str, checkpoints: Checkpoints, tp2: SpawnedWorkers) -> None:
    tp2.bring_up(make_config(checkpoints.path(name), tp=2))
    check(tp2, checkpoints, name)
    tp2.shut_down_workers()


@pytest.mark.parametrize("name", ["bundled", "qwen3-kv2", "qwen3-untied"])
def test_four_ranks(name: str, checkpoints: Checkpoints, tp4: SpawnedWorkers) -> None:
    """qwen3-kv2 has two key/value heads: each lives on two ranks."""
    tp4.bring_up(make_config(checkpoints.path(name), tp=4))
    check(tp4, checkpoints, name)
    tp4.shut_down_workers()


def test_vocabulary_that_does_not_divide(checkpoints: Checkpoints, tp2: SpawnedWorkers) -> None:
    """2051 tokens on two ranks: the second rank's last row is padding and must never be chosen."""
    path = checkpoints.home / "odd-vocab"
    make_random_checkpoint(path, **{**PRESETS["qwen3-untied"], "vocab_size": 2051}, seed=4)
    reference = Reference(str(path))
    prompts = [[2050, 2049, 3], [1024, 1025, 1026, 7]]
    tp2.bring_up(make_config(str(path), tp=2))
    requests = Driver(tp2).generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    tp2.shut_down_workers()
    assert [r.output for r in requests] == [reference.greedy(p, 8) for p in prompts]


def test_bfloat16_runs_and_is_close(checkpoints: Checkpoints) -> None:
    """Other dtypes take F.rms_norm and bfloat16 caches; log-probabilities stay near float32's."""
    prompt = PROMPTS[3]
    with local_worker(None, dtype="bfloat16") as worker:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
        (request,) = Driver(worker).generate([prompt], params)
    expected = checkpoints.reference("bundled").logprobs(prompt)[-1]
    rows = request.logprobs[0]
    assert abs(float(expected[rows.token_ids[0][0]]) - rows.logprobs[0][0]) < 0.1
