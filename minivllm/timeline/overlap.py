"""View `async`: what EngineCore does while the workers compute, over several steps.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3.10, §2.4.10–§2.4.12
"""

from __future__ import annotations

from minivllm.timeline import intervals
from minivllm.timeline import text as words
from minivllm.timeline.batches import Batches, most_in_flight, queue_size
from minivllm.timeline.intervals import Interval
from minivllm.timeline.run import WAITING, Run, sum_note
from minivllm.timeline.view import View
from minivllm.trace_store import Span

_ENGINE_WORK = (
    "scheduler.schedule",
    "executor.execute_model",
    "executor.sample_tokens",
    "future.result",
    "scheduler.update_from_output",
)


def applies(run: Run) -> bool:
    """Whether the run scheduled ahead."""
    span = run.first("engine_core.init_scheduler")
    return span is not None and span.get("scheduler") == "AsyncScheduler"


def build(run: Run) -> View:
    view = View("async", "Scheduling and execution")
    batches = Batches.of(run)
    engine = run.process("engine_core") or run.process("client")
    steps = run.all("engine_core.step")
    if not batches.steps or not steps or engine is None:
        view.missing.append(run.missing("rpc", "engine steps with forward passes"))
        return view
    shown = batches.shown(run)
    spans = [span for p in batches.spans for step in shown for span in batches.spans[p].get(step, ())]
    start, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    ahead = "one step ahead" if applies(run) else "in turn"
    view.title = f"{batches.title(shown)}: scheduling and execution, {ahead}"
    view.rows.append(run.heading(steps[0].process))
    for name in _ENGINE_WORK:
        inside = [s for s in run.all(name, steps[0].process) if start <= s.start_ns <= end]
        if inside:
            row = run.row(inside, 1, name)
            row.note = sum_note(row)
            view.rows.append(row)
    for process in run.workers:
        if process in batches.spans:
            view.rows.append(run.heading(process))
            for step in shown:
                if step in batches.spans[process]:
                    view.rows.append(run.row(batches.spans[process][step], 1, f"step {step}"))
    view.fit()
    view.zero_ns = view.start_ns
    view.explanation = _explain(run, batches, steps)
    return view


def working(run: Run, steps: list[Span]) -> list[Interval]:
    """When EngineCore was in a step and did not wait."""
    engine = steps[0].process
    waits = [(s.start_ns, s.end_ns) for name in WAITING for s in run.all(name, engine)]
    inside = intervals.union((s.start_ns, s.end_ns) for s in steps)
    found: list[Interval] = []
    for start, end in inside:
        at = start
        for a, b in intervals.union(waits):
            if b <= at or a >= end:
                continue
            if a > at:
                found.append((at, a))
            at = max(at, b)
        if at < end:
            found.append((at, end))
    return found


def _explain(run: Run, batches: Batches, steps: list[Span]) -> list[str]:
    size = queue_size(run)
    sentences = [
        f"the engine may have {words.count(size, 'batch', 'batches')} in flight, and had up to {most_in_flight(run)}"
    ]
    computing = intervals.union(i for process in batches.spans for i in batches.busy(process))
    own = working(run, steps)
    if intervals.total(own):
        hidden = intervals.overlap(own, computing) / intervals.total(own)
        sentences.append(
            f"EngineCore worked for {words.duration(intervals.total(own))} in {words.count(batches.num_engine_steps, 'step')}, "
            f"{hidden:.0%} of it while a worker computed"
        )
    for process in run.workers[:2]:
        if process in batches.spans:
            busy = batches.busy(process)
            share = intervals.total(busy) / max(intervals.span_of(busy), 1)
            sentences.append(
                f"rank {process.rank or 0} computed {share:.0%} of the time from its first step to its last"
            )
    return sentences
