"""View `shutdown`: who was asked to end, how, and how long each process took.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3.8, §2.3.9, §2.4.6
"""

from __future__ import annotations

from minivllm.timeline import text as words
from minivllm.timeline.run import Run
from minivllm.timeline.view import Mark, Row, View
from minivllm.trace_store import Process

_LEVELS = ("executor.terminate_graceful", "executor.terminate_sigterm", "executor.terminate_sigkill")


def build(run: Run) -> View:
    view = View("shutdown", "Shutdown: who was asked to end, and how long each took", compress_idle=True)
    for process in run.store.processes():
        if process.role != "worker":
            rows: list[Row] = []
            for span in run.all("engine_core.shutdown", process) + run.all("executor.shutdown", process):
                parents = {s.span_id for s in run.all("engine_core.shutdown", process)}
                if span.name == "executor.shutdown" and span.parent_span_id in parents:
                    continue
                rows += run.tree(span, 1, {}, process)
            if rows:
                view.rows += [run.heading(process), *rows]
    for process in run.workers:
        view.rows += _worker_rows(run, process)
    if not any(row.segments for row in view.rows):
        view.rows = []
        view.missing.append(
            "the trace has no shutdown: the run was still going on, or was killed, when it was read"
        )
        return view
    view.fit()
    view.zero_ns = view.start_ns
    view.title += f" (0 is {words.instant(view.start_ns, 3)} after the start of the run)"
    view.explanation = _explain(run)
    return view


def _worker_rows(run: Run, process: Process) -> list[Row]:
    rows: list[Row] = []
    for span in run.all("worker.parent_died", process):
        rows.append(run.row(span))
    for span in run.all("worker.shutdown", process):
        rows += run.tree(span, 1, {}, process)
    life = next((s for s in run.all("worker.process") if s.rank == process.rank), None)
    main = run.first("worker.main", process)
    heading = run.heading(process)
    if life is not None:
        heading.note = _exit_text(life.attributes)
        heading.marks.append(Mark(run.at(life.end_ns), "event", "the parent saw it end"))
    elif main is not None:
        heading.marks.append(Mark(run.at(main.end_ns), "event", "end of worker_main"))
    return [heading, *rows] if rows else []


def _exit_text(attributes: dict[str, object]) -> str:
    signal, code = attributes.get("minivllm.signal"), attributes.get("process.exit.code")
    if signal:
        return str(signal)
    return f"exit {code}" if code is not None else ""


def _explain(run: Run) -> list[str]:
    sentences = []
    shutdown = run.first("executor.shutdown")
    if shutdown is not None:
        name = run.actor(shutdown.process).name
        sentences.append(
            f"{name} had shut its executor down after {words.duration(shutdown.end_ns - shutdown.start_ns)}"
        )
    ends = [(s.end_ns - s.start_ns, s.rank or 0) for p in run.workers for s in run.all("worker.shutdown", p)]
    if len(ends) > 1:
        longest = max(ends)
        sentences.append(
            f"the workers closed down side by side; rank {longest[1]} took longest ({words.duration(longest[0])})"
        )
    used = [name for name in _LEVELS if _did_something(run, name)]
    if used == [_LEVELS[0]] or (not used and run.first(_LEVELS[0])):
        sentences.append(
            "all workers left by themselves when their death pipes were closed; no signal was needed"
        )
    elif _LEVELS[2] in used:
        sentences.append(
            "some worker had to be killed: it answered neither to the closed death pipe nor to SIGTERM"
        )
    elif _LEVELS[1] in used:
        sentences.append("some worker did not leave by itself in time and got SIGTERM")
    return sentences


def _did_something(run: Run, name: str) -> bool:
    """Whether a level of the termination had a worker to deal with."""
    spans = run.all(name)
    return any(s.get("ranks") or s.get("alive") for s in spans)
