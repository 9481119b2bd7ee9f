"""Walkthrough 12: what stands still while a token is on its way: stages without a second batch, and an engine that waits.

python walkthroughs/12_async_and_pipeline.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import common
from common import closing, console, measured, say, step, table

from minivllm.timeline import intervals
from minivllm.timeline.batches import Batches, most_in_flight, queue_size
from minivllm.timeline.run import Run
from minivllm.trace_store import TraceStore

# A step has room for one of them, so that every batch has a request of its own to begin with.
PROMPTS = [
    f"{what} is a thing that the reference describes" for what in ("A class", "A name", "A scope", "A value")
]
ROOM = 12


def generate(device: str, trace: Path, batches: str, **settings: Any) -> list[list[int]]:
    """Four requests; with one stage, then the first twice more: its third token is a stop token, then the last by length."""
    from minivllm import LLM, SamplingParams

    os.environ["MINIVLLM_MAX_CONCURRENT_BATCHES"] = batches
    settings = {
        "max_num_batched_tokens": ROOM,
        "max_num_seqs": 8,
        "distributed_executor_backend": "mp",
        **settings,
    }
    with LLM(device=device, trace=trace, trace_level="rpc", **settings) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        tokens = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, greedy, use_tqdm=False)]
        if "pipeline_parallel_size" not in settings:
            third = tokens[0][2]
            assert third not in tokens[0][:2]
            for params in ({"max_tokens": 10, "stop_token_ids": [third]}, {"max_tokens": 3}):
                llm.generate(
                    PROMPTS[0], SamplingParams(temperature=0, ignore_eos=True, **params), use_tqdm=False
                )
    del os.environ["MINIVLLM_MAX_CONCURRENT_BATCHES"]
    return tokens


def four_requests(trace: Path) -> tuple[Run, Batches]:
    """The run, and the batches of its first four requests."""
    run = Run(TraceStore.open(trace))
    batches = Batches.of(run)
    end = max(span.end_ns for span in run.all("request")[: len(PROMPTS)])
    for steps in batches.spans.values():
        for number in [n for n, spans in steps.items() if spans[0].start_ns > end]:
            del steps[number]
    batches.steps = sorted({number for steps in batches.spans.values() for number in steps})
    return run, batches


def share(part: int, whole: int) -> str:
    return measured(f"{part / max(whole, 1):.0%}")


def stages(trace: Path) -> None:
    step("Two stages, with one batch and with a queue of batches")
    say("MINIVLLM_MAX_CONCURRENT_BATCHES=1 takes the queue away.")
    shown = table("batches", "in flight, at most", "stage 0 computes", "stage 1", "both at once")
    for label, directory in (("one", trace / "one-batch"), ("a queue", trace)):
        run, batches = four_requests(directory)
        first, last = (batches.busy(process) for process in batches.first_of_stage(run))
        whole = intervals.span_of([*first, *last])
        shown.add_row(
            label,
            f"{most_in_flight(run)} of {queue_size(run)}",
            share(intervals.total(first), whole),
            share(intervals.total(last), whole),
            share(intervals.overlap(first, last), whole),
        )
    console.print(shown)
    say(
        "Shares of the time from the first step to the last. With one batch, one stage works at a time: the second waits for hidden "
        "states, the first for the token. A second batch, of other requests, fills the gaps."
    )


def order(trace: Path) -> None:
    step("The first steps through both stages")
    run, batches = four_requests(trace)
    rows = table("step", *(f"stage {batches.stage_of[process]}" for process in batches.first_of_stage(run)))
    zero = min(
        span.start_ns for process in batches.spans for span in batches.spans[process][batches.steps[0]]
    )
    for number in batches.steps[:6]:
        cells = []
        for process in batches.first_of_stage(run):
            spans = batches.spans[process][number]
            begin, end = spans[0].start_ns - zero, spans[-1].end_ns - zero
            cells.append(measured(f"{begin / 1e6:5.1f} to {end / 1e6:5.1f} ms"))
        rows.add_row(measured(str(number)), *cells)
    console.print(rows)
    say(
        "Both stages have the same steps in the same order. Stage 0 begins a step before stage 1 has finished the one before."
    )


def scheduling(trace: Path) -> None:
    step("One stage, scheduled in turn and one step ahead")
    shown = table("scheduling", "in flight, at most", "scheduled while a step was in flight", "steps")
    for label, directory in (("in turn", trace / "one-stage"), ("async", trace / "async")):
        run, batches = four_requests(directory)
        ahead = sum(
            span.get("in_flight") == 2 and span.get("scheduled_step") in batches.steps
            for span in run.all("engine_core.step")
        )
        shown.add_row(
            label,
            f"{most_in_flight(run)} of {queue_size(run)}",
            measured(ahead),
            measured(len(batches.steps)),
        )
    console.print(shown)
    say(
        "To schedule a step, EngineCore needs to know how many tokens a request has, and not which. Not scheduled ahead: the first "
        "step, and what comes after a moment without anything to schedule."
    )


def wasted(trace: Path) -> None:
    step("A step for nothing")
    say(
        "The same request twice, three tokens each. Once a stop token ends it, which happens to be the third; once max_tokens=3."
    )
    shown = table("scheduling", "ended by", "tokens", "steps")
    for label, directory in (("in turn", trace / "one-stage"), ("async", trace / "async")):
        store = TraceStore.open(directory)
        for request in store.spans("request")[len(PROMPTS) :]:
            name = request.get("request_id")
            steps = [span for span in store.spans("runner.prepare_inputs") if span.get("req_ids") == name]
            (reason,) = request.attributes["gen_ai.response.finish_reasons"]
            tokens = request.attributes["gen_ai.usage.output_tokens"]
            shown.add_row(label, reason, str(tokens), str(len(steps)))
    console.print(shown)
    say(
        "A length is known beforehand. A stop token is known when it is there, and by then the next step is on its way."
    )


def main() -> None:
    args = common.options(__doc__ or "")
    trace, device = args.trace, args.device
    say("Four runs of the same four requests: two stages and one, each in two ways.")
    tokens = [
        generate(device, trace, "", pipeline_parallel_size=2),
        generate(device, trace / "one-batch", "1", pipeline_parallel_size=2),
        generate(device, trace / "one-stage", ""),
        generate(device, trace / "async", "", async_scheduling=True),
    ]
    assert all(run == tokens[0] for run in tokens)
    say(f"All four give the same {sum(map(len, tokens[0]))} tokens.")
    stages(trace)
    order(trace)
    scheduling(trace)
    wasted(trace)
    closing(
        trace,
        "minivllm timeline {trace} --view pipeline               two stages and a queue",
        "minivllm timeline {trace}/one-batch --view pipeline     the same without the queue",
        "minivllm timeline {trace}/async --view async            a step ahead",
    )


if __name__ == "__main__":
    main()
