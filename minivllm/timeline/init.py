"""View `init`: what each rank did until it could serve, with the waiting for slower ranks shown as waiting.

vLLM 0.25.1: no counterpart
Articles: part 1 §3–§5, §8, part 2 §2.4.2, §2.4.14
"""

from __future__ import annotations

from minivllm.timeline import text as words
from minivllm.timeline.meetings import START_UP_MEETINGS, start_up_meetings
from minivllm.timeline.run import Run, sum_note
from minivllm.timeline.view import Kind, Mark, Row, View
from minivllm.trace_store import Process, Span

# (span, depth of its row), in the order in which a worker goes through them.
_STEPS = (
    ("worker.bootstrap", 1),
    ("worker.init_worker", 1),
    ("worker.init_device", 1),
    ("device.bind", 2),
    ("dist.rendezvous", 2),
    ("dist.init_process_group", 2),
    ("dist.new_group", 2),
    ("dist.init_communicator", 2),
    ("device.memory_snapshot", 2),
    ("runner.init", 2),
    ("worker.load_model", 1),
    ("model.initialize", 2),
    ("model.load_weights", 2),
    ("worker.init_message_queues", 1),
    ("worker.send_ready", 1),
    ("worker.mq_handshake", 1),
    ("worker.determine_available_memory", 1),
    ("runner.profile_run", 2),
    ("runner.initialize_kv_cache", 1),
    ("runner.warm_up", 1),
    ("runner.capture_model", 1),
)
# Waiting shorter than this share of the picture is not worth a sentence.
_WORTH_SAYING = 0.01


def build(run: Run) -> View:
    view = View("init", "Initialisation: what each rank did until it could serve", shorten="steady")
    waits = start_up_meetings(run)
    places = _places(run)
    for process in places:
        rows = _rank_rows(run, process, waits)
        if rows:
            view.rows += [run.heading(process), *rows]
    if not view.rows:
        view.missing.append(run.missing("lifecycle", "worker spans"))
        return view
    view.fit()
    view.explanation = _explain(run, view, places, waits)
    return view


def _places(run: Run) -> list[Process]:
    """The processes that hold a worker: worker processes, or the one process of a UniProcExecutor."""
    if run.workers or run.options.ranks is not None:
        return run.workers
    return [p for p in run.store.processes() if run.first("worker.init_device", p)]


def _rank_rows(run: Run, process: Process, waits: dict[str, Span]) -> list[Row]:
    rows: list[Row] = []
    for name, depth in _STEPS:
        spans = run.all(name, process)
        if not spans:
            continue
        row = run.row(spans[0], depth, name if len(spans) == 1 else f"{name} ×{len(spans)}")
        row.segments = []
        for span in spans:
            last = waits.get(span.span_id)
            row.segments += run.segments(span, min(last.start_ns, span.end_ns) if last else None)
        if len(spans) > 1:
            row.note = sum_note(row)
        bad = [s for s in row.segments if s.kind in (Kind.ERROR, Kind.UNFINISHED)]
        if bad:
            row.note = "never finished" if bad[-1].kind is Kind.UNFINISHED else "error"
        elif name == "worker.send_ready":
            row.marks.append(Mark(run.at(spans[-1].end_ns), "ready", f"rank {process.rank}"))
        rows.append(row)
    return rows


def _explain(run: Run, view: View, places: list[Process], waits: dict[str, Span]) -> list[str]:
    sentences = [*_longest(run, places), *_waited(run, view, places, waits)]
    captures = [s for p in places for s in run.all("runner.capture_model", p)]
    reasons = {str(s.get("reason")) for s in captures if s.get("skipped") and s.get("reason")}
    sentences += [f"runner.capture_model was skipped: {reason}" for reason in sorted(reasons)]
    return sentences


def _longest(run: Run, places: list[Process]) -> list[str]:
    by_name: dict[str, list[Span]] = {}
    for name, depth in _STEPS:
        spans = [s for p in places for s in run.all(name, p)[:1]]
        if depth == 1 and spans and name not in START_UP_MEETINGS:
            by_name[name] = spans
    if not by_name:
        return []
    name, spans = max(by_name.items(), key=lambda item: max(s.end_ns - s.start_ns for s in item[1]))
    lengths = [f"{words.duration(s.end_ns - s.start_ns)} on rank {s.rank or 0}" for s in spans]
    if len(lengths) > 4:
        ordered = sorted(spans, key=lambda s: s.end_ns - s.start_ns)
        lengths = [
            f"{words.duration(s.end_ns - s.start_ns)} on rank {s.rank or 0}"
            for s in (ordered[0], ordered[-1])
        ]
        return [f"the longest step was {name}: from {lengths[0]} to {lengths[1]}"]
    return [f"the longest step was {name}: {words.listing(lengths)}"]


def _waited(run: Run, view: View, places: list[Process], waits: dict[str, Span]) -> list[str]:
    """One sentence per step in which a rank waited noticeably for another."""
    sentences: list[str] = []
    threshold = (view.end_ns - view.start_ns) * _WORTH_SAYING
    for name, _ in _STEPS:
        found: list[tuple[int, int, Span]] = []
        for process in places:
            for span in run.all(name, process):
                last = waits.get(span.span_id)
                waited = min(last.start_ns, span.end_ns) - span.start_ns if last else 0
                if last and waited > threshold:
                    found.append((waited, span.rank or 0, last))
        for waited, rank, last in found[:3]:
            whom = "EngineCore" if last.rank is None else f"rank {last.rank}"
            sentences.append(
                f"in {name} rank {rank} waited {words.duration(waited)} for {whom}, which came last"
            )
        if len(found) > 3:
            sentences.append(f"… and so did {words.count(len(found) - 3, 'other rank')}")
    if not sentences and len(places) > 1:
        sentences.append(
            f"no rank waited more than {words.duration(threshold)} for another one in any single step"
        )
    return sentences
