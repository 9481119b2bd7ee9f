"""View `step`: one engine step across processes: schedule, execute on every rank, update.

vLLM 0.25.1: no counterpart
Articles: part 1 §2, §8.3, part 2 §2.3.4, §2.3.10
"""

from __future__ import annotations

from minivllm.exceptions import ConfigError
from minivllm.timeline import meetings
from minivllm.timeline import text as words
from minivllm.timeline.batches import engine_steps
from minivllm.timeline.messages import Messages, written_ns
from minivllm.timeline.run import Run
from minivllm.timeline.view import View
from minivllm.trace_store import Span

# Waiting in collectives shorter than this share of the picture is not worth a sentence.
_WORTH_SAYING = 0.02


def build(run: Run) -> View:
    view = View("step", "One engine step")
    steps = run.all("engine_core.step")
    if not steps:
        view.missing.append(run.missing("rpc", "engine steps"))
        return view
    numbered = engine_steps(run)
    step = _choose(run, steps, numbered)
    number = next((number for number, span in numbered.items() if span is step), None)
    which = "one that schedules nothing" if number is None else f"step {number} of {max(numbered):,}"
    view.title = (
        f"One engine step across processes: {which}, "
        f"{words.instant(run.at(step.start_ns), 3)} after the start of the run"
    )
    executions = [s for s in run.below(step) if s.name == "rpc.execute"]
    messages = Messages(run, step.start_ns, max([step.end_ns, *(s.end_ns for s in executions)]))
    inside = [s for execution in executions for s in run.below(execution)]
    met = meetings.collectives(run, inside)
    waits = {d: written_ns(e) for d, e in messages.sender.items()} | meetings.until(met)
    view.rows += [run.heading(step.process), *run.tree(step, 1, waits, step.process)]
    for process in run.workers:
        own = sorted((s for s in executions if s.process is process), key=lambda s: s.start_ns)
        if not own:
            continue
        view.rows.append(run.heading(process))
        for execution in own:
            view.rows += run.tree(execution, 1, waits, process)
    view.fit()
    view.zero_ns = run.at(step.start_ns)
    view.explanation = _explain(run, step, executions)
    view.explanation += meetings.sentences(inside, met, (view.end_ns - view.start_ns) * _WORTH_SAYING)
    return view


def _choose(run: Run, steps: list[Span], numbered: dict[int, Span]) -> Span:
    focus = run.options.focus
    if focus is None:
        return steps[len(steps) // 2]
    if focus.isdigit() and int(focus) in numbered:
        return numbered[int(focus)]
    if len(focus) >= 4:
        target = next((s for s in run.store.spans() if s.span_id.startswith(focus.lower())), None)
        if target is not None:
            for step in steps:
                if step is target or step.start_ns <= target.start_ns < step.end_ns:
                    return step
    raise ConfigError(
        f"--focus {focus}: no such step in this trace; steps are numbered {min(numbered)} to {max(numbered)}"
    )


def _explain(run: Run, step: Span, executions: list[Span]) -> list[str]:
    total = max(step.end_ns - step.start_ns, 1)
    sentences = []
    inside = list(run.below(step))
    schedule = next((s for s in inside if s.name == "scheduler.schedule"), None)
    if schedule is not None:
        tokens = schedule.get("num_tokens", schedule.get("total_num_scheduled_tokens"))
        requests = schedule.get("num_reqs")
        if tokens is not None and requests is not None:
            sentences.append(
                f"{words.count(int(tokens), 'token')} of {words.count(int(requests), 'request')} were scheduled"
            )
    parts = []
    for name, what in (
        ("scheduler.schedule", "scheduling"),
        ("rpc.await_responses", "waiting for the workers"),
        ("future.result", "waiting for the workers"),
        ("scheduler.update_from_output", "taking in the new tokens"),
    ):
        spans = [s for s in inside if s.name == name and s.process is step.process]
        if spans:
            took = sum(s.end_ns - s.start_ns for s in spans)
            parts.append(f"{what} {words.duration(took)} ({took / total:.0%})")
    if parts:
        sentences.append(f"of {words.duration(total)}, EngineCore spent on {words.listing(parts)}")
    numbers = {s.get("seq") for s in inside if s.name == "rpc.call"}
    later = [s for s in run.all("future.result") if s.get("seq") in numbers and s.start_ns > step.end_ns]
    if later:
        sentences.append(
            "it did not wait for them: a later step asked for the results, "
            f"{words.duration(min(s.start_ns for s in later) - step.end_ns)} after this one had ended"
        )
    forwards = sorted((s for s in inside if s.name == "model.forward"), key=lambda s: s.end_ns - s.start_ns)
    if forwards:
        text = f"model.forward took {words.duration(forwards[-1].end_ns - forwards[-1].start_ns)} on rank {forwards[-1].rank or 0}"
        if len(forwards) > 1:
            text += f" and {words.duration(forwards[0].end_ns - forwards[0].start_ns)} on rank {forwards[0].rank or 0}"
        sentences.append(text)
    if executions:
        last = max(executions, key=lambda s: s.end_ns)
        sentences.append(
            f"rank {last.rank or 0} was the last to finish, at {words.duration(last.end_ns - step.start_ns)}"
        )
    return sentences
