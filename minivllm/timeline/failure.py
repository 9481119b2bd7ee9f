"""View `failure`: what broke first, what was open then, who noticed, and how long it took.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3.2, §2.3.3, §2.6
"""

from __future__ import annotations

from minivllm.timeline import text as words
from minivllm.timeline.run import Run, failure_note, found_nothing, kind_of
from minivllm.timeline.view import Kind, Mark, Row, View
from minivllm.trace_store import Process, Span

_NOTICED = ("monitor.worker_died", "executor.failure_callback", "executor.shutdown")
# What happened before and after the failure that still belongs in the picture.
_BEFORE_SHARE = 0.35
_LEAST_NS = 20_000_000


def has_failure(run: Run) -> bool:
    """Whether this run holds a failed or unfinished span."""
    return bool(run.all("monitor.worker_died") or run.all("worker.exception") or _broken(run))


def _broken(run: Run) -> list[Span]:
    return [s for s in run.store.spans() if (s.is_error or s.unfinished) and not found_nothing(s)]


def build(run: Run) -> View:
    view = View("failure", "Failure: what broke, who noticed, and when", compress_idle=True)
    broken = _broken(run)
    deaths = run.all("monitor.worker_died")
    if not broken and not deaths:
        view.missing.append(
            'nothing failed in this run; MINIVLLM_FAILPOINTS="rpc.execute@rank1#3=kill" makes it fail'
        )
        return view
    for process in run.store.processes():
        wanted = run.options.ranks
        if process.role == "worker" and wanted is not None and process.rank not in wanted:
            continue
        rows = _rows(run, process, broken, deaths)
        if rows:
            view.rows += [run.heading(process, _fate(run, process)), *rows]
    first = _first(broken, deaths)
    end = max([s.end_ns for s in broken] + [s.end_ns for name in _NOTICED for s in run.all(name)])
    lead = max(int((end - first) * _BEFORE_SHARE), _LEAST_NS)
    view.start_ns, view.end_ns = run.at(first - lead), run.at(end)
    view.zero_ns = run.at(first)
    view.title += f" (0 is {words.instant(run.at(first), 3)} after the start of the run)"
    view.explanation = _explain(run, broken, deaths)
    return view


def _first(broken: list[Span], deaths: list[Span]) -> int:
    ends = [s.end_ns for s in broken if s.process.role == "worker"] or [s.end_ns for s in broken]
    return min(ends + [s.start_ns for s in deaths])


def _rows(run: Run, process: Process, broken: list[Span], deaths: list[Span]) -> list[Row]:
    rows: list[Row] = []
    ids = {s.span_id for s in broken}
    depths: dict[str, int] = {}
    for span in sorted((s for s in broken if s.process is process), key=lambda s: s.start_ns):
        depth = depths[span.span_id] = depths.get(span.parent_span_id, 0) + 1
        row = run.row(span, depth)
        row.note = failure_note(span)
        died = next((d for d in deaths if d.rank == process.rank and process.role == "worker"), None)
        if kind_of(span) is Kind.UNFINISHED:
            row.marks.append(
                Mark(run.at(died.start_ns if died else span.end_ns), "died", "the process ended here")
            )
        rows.append(row)
    for name in _NOTICED:
        rows += [run.row(s) for s in run.all(name, process) if s.span_id not in ids]
    return rows


def _fate(run: Run, process: Process) -> str | None:
    if process.role != "worker":
        return None
    for death in run.all("monitor.worker_died"):
        if death.rank == process.rank:
            return str(death.get("signal") or f"exit {death.get('exit_code', '?')}")
    return None


def _explain(run: Run, broken: list[Span], deaths: list[Span]) -> list[str]:
    sentences = []
    for death in deaths[:3]:
        rank = death.rank
        how = death.get("signal") or f"exit code {death.get('exit_code', '?')}"
        open_spans = [s for s in broken if s.process.role == "worker" and s.process.rank == rank]
        innermost = max(open_spans, key=lambda s: s.start_ns, default=None)
        inside = innermost.name if innermost else death.get("open_span")
        sentences.append(f"rank {rank} died ({how})" + (f" in {inside}" if inside else ""))
    errors = [s for s in broken if kind_of(s) is Kind.ERROR and s.process.role == "worker"]
    if not deaths and errors:
        first = min(errors, key=lambda s: s.end_ns)
        message = first.status_message.splitlines()[0] if first.status_message else "no message"
        sentences.append(f"{first.name} failed on rank {first.rank or 0}: {message}")
    shutdown = run.first("executor.shutdown")
    if deaths and shutdown is not None and shutdown.start_ns >= deaths[0].start_ns:
        sentences.append(
            f"the executor began to shut down {words.duration(shutdown.start_ns - deaths[0].start_ns)} after the "
            f"monitor had noticed, and was done after {words.duration(shutdown.end_ns - deaths[0].start_ns)}"
        )
    unfinished = [s for s in broken if kind_of(s) is Kind.UNFINISHED]
    if unfinished:
        sentences.append(
            f"{words.count(len(unfinished), 'span')} never finished; the reader of the trace ended them"
        )
    return sentences
