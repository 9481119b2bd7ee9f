"""Walkthrough 7: the same requests on the V1 runner and on Model Runner V2: what moves, and what stays.

python walkthroughs/07_two_runners.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

import common
from common import closing, console, measured, say, step, table

STAGES = (
    "runner.update_states",
    "runner.prepare_inputs",
    "model.forward",
    "runner.sample_tokens",
    "runner.postprocess",
)


def generate(runner: str, args: argparse.Namespace, trace: Path) -> list[list[int]]:
    """Twelve requests that end at different times, four at once, on the given runner; their tokens."""
    from minivllm import LLM, SamplingParams

    os.environ["MINIVLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    prompts = [[7 * i + j for j in range(3 + 5 * (i % 4))] for i in range(12)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=3 + 4 * (i % 5), ignore_eos=True)
        for i in range(12)
    ]
    with LLM(
        tensor_parallel_size=args.tp,
        device=args.device,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=128,
        trace=trace,
        trace_level="rpc",
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    args = common.options(__doc__ or "")
    from minivllm.trace_store import TraceStore

    traces = {"V1": args.trace, "V2": args.trace / "v2"}

    step("Run the same twelve requests on both")
    say(
        "Four run at once, they end at different times, and a step has room for twelve tokens, so that prompts come in chunks."
    )
    tokens = {runner: generate(runner, args, trace) for runner, trace in traces.items()}
    assert tokens["V1"] == tokens["V2"]
    say(f"Both give the same {sum(map(len, tokens['V1']))} tokens, greedy and sampled.")

    step("What V1 does with its rows")
    say(
        "Row i of V1's tables is row i of the batch. A request that leaves makes a hole: a new one fills it, or the last row "
        "moves there. Then rows change places until those with one token are in front."
    )
    # Rank 0 tells enough: all ranks do the same.
    spans = {
        runner: [span for span in TraceStore.open(trace).spans() if span.process.rank in (None, 0)]
        for runner, trace in traces.items()
    }
    by_parent = {
        (span.parent_span_id, span.name): span for span in spans["V1"] if span.name.startswith("runner.")
    }
    steps = [span for span in spans["V1"] if span.name == "runner.execute_model"]
    steps = [span for span in steps if (span.span_id, "runner.prepare_inputs") in by_parent]
    rows = table("step", "rows in the order of the batch", "filled", "condensed", "swapped")
    total = 0
    for number, span in enumerate(steps):
        update = by_parent[span.span_id, "runner.update_states"]
        moves = [update.get(f"rows_{what}") for what in ("filled", "condensed", "swapped")]
        total += moves[1] + moves[2]
        if number < 14:
            order = by_parent[span.span_id, "runner.prepare_inputs"].get("req_ids")
            # Which requests the first steps find is a matter of time, and with it all that follows.
            rows.add_row(str(number), measured(order), *(measured(n or "·") for n in moves))
    console.print(rows)
    say(
        f"In {measured(len(steps))} steps, rows moved {measured(total)} times. V2 moved nothing: a request keeps its slot, and a batch is a list of slots."
    )

    step("What a step consists of on both")
    times = table("step of the catalogue", "V1, median", "V2, median")
    for name in STAGES:
        cells = []
        for runner in traces:
            durations = [span.duration_ns for span in spans[runner] if span.name == name]
            cells.append(measured(f"{statistics.median(durations) / 1e3:.0f} µs"))
        times.add_row(name, *cells)
    console.print(times)
    say(
        "On a CPU the two cost about the same (the logits are computed before sample_tokens in V1, and inside it in V2). What V2 is for shows on a GPU: V1's postprocess waits there until the device is done, "
        "and only then can the next step be prepared."
    )
    closing(
        args.trace,
        "minivllm timeline {trace} --view step      a step of V1",
        "minivllm timeline {trace}/v2 --view step   a step of V2",
        "minivllm doctor --explain-runner           which of them an engine gets",
    )


if __name__ == "__main__":
    main()
