"""View `pipeline`: the stages of a pipeline over several steps, and the bubbles in which they stand still.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3.10, part 1 §8.1
"""

from __future__ import annotations

from itertools import pairwise

from minivllm.timeline import intervals
from minivllm.timeline import text as words
from minivllm.timeline.batches import Batches, most_in_flight, queue_size
from minivllm.timeline.run import Run
from minivllm.timeline.view import Kind, Row, Segment, View
from minivllm.trace_store import Process


def applies(run: Run) -> bool:
    """Whether the run has several stages."""
    return any(span.get("pp_rank") for span in run.all("model.forward"))


def build(run: Run) -> View:
    view = View("pipeline", "The stages of a pipeline")
    batches = Batches.of(run)
    if not batches.steps:
        view.missing.append(run.missing("rpc", "forward passes"))
        return view
    if batches.num_stages == 1:
        view.missing.append("this run has one pipeline stage; record one with pipeline_parallel_size=2")
        return view
    steps = batches.shown(run)
    processes = batches.first_of_stage(run)
    view.title = f"{batches.title(steps)} through {batches.num_stages} pipeline stages; waiting is a bubble"
    for process in processes:
        view.rows += _stage_rows(run, batches, process, steps)
    view.fit()
    view.zero_ns = view.start_ns
    view.explanation = _explain(run, batches, processes)
    return view


def _stage_rows(run: Run, batches: Batches, process: Process, steps: list[int]) -> list[Row]:
    actor, stage = run.actor(process), batches.stage_of[process]
    busy = intervals.union(batches.busy(process, set(steps)))
    row = Row(f"stage {stage}", actor, 1)
    row.segments = [Segment(run.at(a), run.at(b)) for a, b in busy]
    row.segments += [Segment(run.at(a), run.at(b), Kind.WAIT) for a, b in intervals.gaps(busy)]
    row.segments.sort(key=lambda segment: segment.start_ns)
    row.note = f"{intervals.total(busy) / max(intervals.span_of(busy), 1):.0%} busy"
    rows = [run.heading(process), row]
    for step in steps:
        spans = batches.spans[process].get(step)
        if spans:
            rows.append(run.row(spans, 2, f"step {step}"))
    return rows


def _explain(run: Run, batches: Batches, processes: list[Process]) -> list[str]:
    size = queue_size(run)
    sentences = [
        f"the engine may have {words.count(size, 'batch', 'batches')} in flight"
        + (f", and had up to {most_in_flight(run)}" if size > 1 else ": no batch queue")
    ]
    whole = [interval for process in processes for interval in batches.busy(process)]
    length = max(intervals.span_of(whole), 1)
    shares = [
        f"stage {batches.stage_of[p]} {intervals.total(batches.busy(p)) / length:.0%}" for p in processes
    ]
    sentences.append(
        f"over the {words.count(len(batches.steps), 'step')} that had a batch, the stages computed: "
        f"{words.listing(shares)}"
    )
    if len(processes) > 1:
        first, last = batches.spans[processes[0]], batches.spans[processes[-1]]
        pairs = [(a, b) for a, b in pairwise(batches.steps) if b in first and a in last]
        ahead = sum(min(s.start_ns for s in first[b]) < max(s.end_ns for s in last[a]) for a, b in pairs)
        sentences.append(
            f"in {ahead} of {len(pairs)} cases the first stage began a step before the last one had finished the "
            "step before"
        )
    return sentences
