"""View `shutdown`: who was asked to end, how, and how long each process took.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3.8, §2.3.9, §2.4.6
"""

from __future__ import annotations

from minivllm.timeline import text as words
from minivllm.timeline.run import Run
from minivllm.timeline.view import Mark, Row, Segment, View
from minivllm.trace_store import Process, Span

_LEVELS = ("executor.terminate_graceful", "executor.terminate_sigterm", "executor.terminate_sigkill")


def build(run: Run) -> View:
    view = View("shutdown", "Shutdown: who was asked to end, and how long each took", shorten="idle")
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
    heading = run.heading(process)
    life, main = _life(run, process), run.first("worker.main", process)
    if life is not None:
        heading.note = words.fate(str(life.get("ended") or "")) or heading.note
        heading.marks.append(Mark(run.at(life.end_ns), "ended", "the parent saw it end"))
        if main is not None and not main.unfinished and rows:
            leaving = Segment(run.at(main.end_ns), max(run.at(life.end_ns), run.at(main.end_ns)))
            rows.append(Row("interpreter exits", run.actor(process), 1, [leaving]))
    return [heading, *rows] if rows else []


def _life(run: Run, process: Process) -> Span | None:
    """The span in which the parent watched this process; None while it has not ended."""
    return next((s for s in run.all("worker.process") if s.rank == process.rank and not s.unfinished), None)


def _explain(run: Run) -> list[str]:
    sentences = []
    shutdown = run.first("executor.shutdown")
    if shutdown is not None:
        name = run.actor(shutdown.process).name
        sentences.append(
            f"{name} had shut its executor down after {words.duration(shutdown.end_ns - shutdown.start_ns)}"
        )
    closings = [s for p in run.workers for s in run.all("worker.shutdown", p)[:1]]
    if len(closings) > 1:
        took = sorted(s.end_ns - s.start_ns for s in closings)
        together = max(s.start_ns for s in closings) < min(s.end_ns for s in closings)
        sentences.append(
            f"the workers closed down {'side by side' if together else 'one after another'}, in "
            f"{words.duration(took[0])} to {words.duration(took[-1])}"
        )
    exits = [
        (life.end_ns - main.end_ns, process.rank or 0)
        for process in run.workers
        if (life := _life(run, process))
        and (main := run.first("worker.main", process))
        and not main.unfinished
    ]
    if exits and max(exits)[0] > 0:
        sentences.append(
            f"after its last instruction rank {max(exits)[1]} took {words.duration(max(exits)[0])} to leave "
            "(interpreter and libraries shut down)"
        )
    used = [name for name in _LEVELS if run.first(name)]
    if used == [_LEVELS[0]]:
        sentences.append(
            "all workers left by themselves when their death pipes were closed; no signal was needed"
        )
    elif _LEVELS[2] in used:
        sentences.append(
            f"{_asked(run, _LEVELS[2])} had to be killed: neither the closed death pipe nor SIGTERM was answered"
        )
    elif _LEVELS[1] in used:
        sentences.append(
            f"{_asked(run, _LEVELS[1])} did not leave in time when the death pipes were closed, and got SIGTERM"
        )
    return sentences


def _asked(run: Run, level: str) -> str:
    """The ranks that a level of ending was needed for."""
    return words.ranks(sorted({int(rank) for span in run.all(level) for rank in span.get("ranks", ())}))
