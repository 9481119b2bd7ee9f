"""Async scheduling: step n + 1 is scheduled before the tokens of step n are known, and nobody can tell by the tokens."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from greedy_reference import MAX_TOKENS, greedy_params, reference
from mixed_load import HARRIED, check_generate, check_with_aborts

from minivllm import LLM, SamplingParams
from minivllm.timeline import build_views
from minivllm.trace_store import TraceStore

pytestmark = pytest.mark.timeout(180)


@pytest.mark.usefixtures("warm_workers")
def test_tokens_are_those_of_synchronous_scheduling() -> None:
    """Here on one rank over processes; all others are in test_product.py."""
    expected = reference()
    with LLM(distributed_executor_backend="mp", async_scheduling=True, **HARRIED) as llm:
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        assert type(core.scheduler).__name__ == "AsyncScheduler" and core.batch_queue_size == 2
        assert check_with_aborts(llm, expected) > 0
        check_generate(llm, expected)
        check_stops(llm, core)


def check_stops(llm: LLM, core: Any) -> None:
    """A stop condition is seen one step late: the step in flight is computed for nothing, its token dropped."""
    expected = reference()
    steps: list[dict[str, int]] = []
    schedule = core.scheduler.schedule

    def recording() -> Any:
        output = schedule()
        if output.num_scheduled_tokens:
            steps.append(dict(output.num_scheduled_tokens))
        return output

    core.scheduler.schedule = recording
    try:
        for prompt, greedy, (stop, tokens) in itertools.islice(
            zip(expected.prompts, expected.greedy, expected.stop, strict=True), 3
        ):
            for params, wanted, reason, wasted in (
                (
                    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[stop]),
                    tokens,
                    "stop",
                    1,
                ),
                (greedy_params(), greedy, "length", 0),
            ):
                steps.clear()
                output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
                assert list(output.token_ids) == wanted
                assert output.finish_reason == reason
                chunks = -(-len(prompt) // HARRIED["max_num_batched_tokens"])
                assert len(steps) == chunks + len(wanted) - 1 + wasted
    finally:
        core.scheduler.schedule = schedule


def test_scheduling_overlaps_execution(tmp_path: Path) -> None:
    """In the trace, step n + 1 is scheduled and sent before step n has been awaited."""
    with LLM(
        device="cpu",
        max_model_len=100,
        max_num_seqs=4,
        distributed_executor_backend="mp",
        async_scheduling=True,
        trace=tmp_path,
    ) as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy_params(), use_tqdm=False)
    store = TraceStore.open(tmp_path)
    check_views(store)
    spans = store.spans(name="engine_core.step")
    both = [
        (s.attributes["minivllm.scheduled_step"], s.attributes["minivllm.awaited_step"])
        for s in spans
        # The last one may carry no tokens, only the news that the request has ended.
        if s.attributes.get("minivllm.scheduled") and "minivllm.awaited_step" in s.attributes
    ]
    assert len(both) == MAX_TOKENS - 1
    assert all(scheduled == awaited + 1 for scheduled, awaited in both)


def check_views(store: TraceStore) -> None:
    views = {view.name: view for view in build_views(store, ["all"])}
    assert {"async", "future"} <= views.keys() and "pipeline" not in views
    text = " ".join(views["async"].explanation)
    assert "the engine may have 2 batches in flight, and had up to 2" in text
    assert "one step ahead" in views["async"].title
    text = " ".join(views["future"].explanation)
    assert "up to 4 of them were pending at once" in text
    assert "taken in the order in which they were sent" in text
