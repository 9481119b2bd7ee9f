"""Every way to run a model, against transformers: both runners, ranks, stages, scheduling, executors, speculation.

Each way gets the load in which everything happens at once (mixed_load): the greedy tokens are transformers', the seeded
ones those of the simplest engine, and log-probabilities of prompts agree to 1e-4. CASES pair each value of one factor with
each of every other; `pytest -m slow` runs all ways.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
from draft_checkpoint import make_draft_checkpoint
from greedy_reference import Reference, reference
from mixed_load import HARRIED, check_generate, check_with_aborts

from minivllm import LLM

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("warm_workers")]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Way:
    runner: str
    tp: int
    pp: int
    scheduling: str
    backend: str
    method: str

    @property
    def id(self) -> str:
        return f"{self.runner}-tp{self.tp}-pp{self.pp}-{self.scheduling}-{self.backend}-{self.method}"

    @property
    def exists(self) -> bool:
        return self.backend == "mp" or self.tp == self.pp == 1


PRODUCT = [
    way
    for values in itertools.product(
        ("V1", "V2"), (1, 2), (1, 2), ("sync", "async"), ("uni", "mp"), ("plain", "ngram", "draft")
    )
    if (way := Way(*values)).exists
]
CASES = [
    Way("V1", 1, 1, "async", "uni", "plain"),
    Way("V1", 1, 1, "async", "uni", "ngram"),
    Way("V1", 1, 1, "async", "uni", "draft"),
    Way("V2", 1, 1, "async", "uni", "plain"),
    Way("V2", 1, 1, "async", "uni", "ngram"),
    Way("V2", 1, 1, "async", "uni", "draft"),
    Way("V1", 1, 1, "sync", "uni", "plain"),
    Way("V2", 2, 2, "async", "mp", "draft"),
    Way("V1", 1, 2, "async", "mp", "ngram"),
    Way("V1", 2, 1, "sync", "mp", "draft"),
    Way("V2", 2, 1, "async", "mp", "plain"),
    Way("V2", 1, 2, "sync", "mp", "plain"),
    Way("V2", 2, 1, "sync", "mp", "ngram"),
]


@pytest.fixture(scope="module", autouse=True)
def expected() -> Reference:
    """Before any environment is changed: the seeded tokens come from an engine, too."""
    return reference()


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft_checkpoint(tmp_path_factory.mktemp("draft") / "draft", num_layers=2)


def check(way: Way, draft_model: Path, monkeypatch: pytest.MonkeyPatch, thorough: bool) -> None:
    monkeypatch.setenv("MINIVLLM_USE_V2_MODEL_RUNNER", str(int(way.runner == "V2")))
    speculative: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "ngram": NGRAM,
        "draft": {"model": str(draft_model), "num_speculative_tokens": 3},
    }
    asynchronous = way.scheduling == "async"
    with LLM(
        tensor_parallel_size=way.tp,
        pipeline_parallel_size=way.pp,
        async_scheduling=asynchronous,
        distributed_executor_backend=way.backend,
        speculative_config=speculative[way.method],
        **HARRIED,
    ) as llm:
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        assert type(core.scheduler).__name__ == ("AsyncScheduler" if asynchronous else "Scheduler")
        in_flight = way.pp + asynchronous if way.runner == "V2" else max(way.pp, 1 + asynchronous)
        assert core.batch_queue_size == in_flight
        assert core.model_executor.output_rank == way.tp * (way.pp - 1)
        layers = [len(spec) for spec in core.model_executor.get_kv_cache_specs()]
        # The draft model is whole on the last stage, and nowhere else.
        own = [0] * (way.pp - 1) + [2 if way.method == "draft" else 0]
        assert layers == [4 // way.pp + n for n in own for _ in range(way.tp)]
        assert check_with_aborts(llm, reference()) > 0
        if thorough:
            check_generate(llm, reference())
        stats = core.scheduler.spec_decoding_stats
        if way.method != "plain":
            assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("way", CASES, ids=lambda way: way.id)
def test_tokens_do_not_depend_on_the_way(
    way: Way, draft_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(way, draft_model, monkeypatch, thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("way", PRODUCT, ids=lambda way: way.id)
def test_full_product(way: Way, draft_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(way, draft_model, monkeypatch, thorough=True)


def test_the_cases_pair_all_values() -> None:
    def pairs(ways: list[Way]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
        return {pair for way in ways for pair in itertools.combinations(enumerate(astuple(way)), 2)}

    assert len(PRODUCT) == 60 and set(CASES) <= set(PRODUCT)
    assert pairs(CASES) == pairs(PRODUCT)
