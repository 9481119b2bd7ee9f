"""View `failure`: what broke first, what was open then, who noticed, and how long it took.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3.2, §2.3.3, §2.6
"""

from __future__ import annotations

from minivllm.timeline import text as words
from minivllm.timeline.run import Run, found_nothing, kind_of
from minivllm.timeline.view import Kind, Mark, Row, View
from minivllm.trace_store import Process, Span

# Steps that belong in the picture although they themselves went well.
_REACTIONS = (
    "monitor.worker_died",
    "executor.failure_callback",
    "executor.shutdown",
    "executor.terminate_graceful",
    "executor.terminate_sigterm",
    "executor.terminate_sigkill",
    "engine_core.shutdown",
)
# Their status is about another process.
_REPORTS = ("worker.process", "monitor.worker_died")
# How much of the picture lies before the failure.
_BEFORE_SHARE = 0.35
_LEAST_NS = 20_000_000


def applies(run: Run) -> bool:
    """Whether this run holds a failed or unfinished span."""
    return bool(_broken(run))


def _broken(run: Run) -> list[Span]:
    return [s for s in run.store.spans() if (s.is_error or s.unfinished) and not found_nothing(s)]


def build(run: Run) -> View:
    view = View("failure", "Failure: what broke, who noticed, and when", shorten="idle")
    broken = _broken(run)
    if not broken:
        view.missing.append(
            'nothing failed in this run; MINIVLLM_FAILPOINTS="rpc.execute@rank1#3=kill" makes one fail'
        )
        return view
    first, began = _first_failure(run, broken)
    wanted = run.options.ranks
    for process in run.store.processes():
        if process.role != "worker" or wanted is None or process.rank in wanted:
            rows = _rows(run, process, broken, began)
            if rows:
                view.rows += [run.heading(process, _heading(run, process)), *rows]
    end = max(s.end_ns for s in [*broken, *(s for name in _REACTIONS for s in run.all(name))])
    lead = max(int((end - began) * _BEFORE_SHARE), _LEAST_NS)
    earliest = min(row.start_ns for row in view.rows if row.start_ns is not None)
    view.start_ns, view.end_ns = max(run.at(began - lead), earliest), run.at(end)
    view.zero_ns = run.at(began)
    view.title += f" (0 is {words.instant(run.at(began), 3)} after the start of the run)"
    view.explanation = _explain(run, first, began, broken)
    return view


def _first_failure(run: Run, broken: list[Span]) -> tuple[Span, int]:
    """The innermost step in which it began, and the moment (absolute).

    Of a process that was killed two moments are known: its last sign of life, and when its parent saw the end of
    it. Other ranks may feel the death in between, so that neither moment alone tells cause from consequence.
    """
    errors = sorted(
        (s for s in broken if not s.unfinished and s.name not in _REPORTS),
        key=lambda s: (s.end_ns, -s.start_ns),
    )
    cut_off = [s for s in broken if s.unfinished]
    if not errors and not cut_off:
        # A worker that had to be ended in the shutdown, and left nothing open.
        report = min(broken, key=lambda s: s.end_ns)
        return report, report.end_ns
    shutdown = min((s.start_ns for s in run.all("executor.shutdown")), default=None)
    reported = {s.rank for s in run.all("monitor.worker_died")}

    def seen_ns(process: Process) -> int:
        life = _life(run, process)
        return life.end_ns if life is not None else process.end_ns

    # Who dies in the shutdown is no cause.
    victims = [
        p
        for p in dict.fromkeys(s.process for s in cut_off)
        if shutdown is None or seen_ns(p) <= shutdown or (p.role == "worker" and p.rank in reported)
    ]
    if victims or not errors:
        victim = min(victims or [s.process for s in cut_off], key=seen_ns)
        if not errors or errors[0].end_ns >= victim.end_ns:
            first = max((s for s in cut_off if s.process is victim), key=lambda s: s.start_ns)
            return first, min([seen_ns(victim), *(s.end_ns for s in errors)])
    return errors[0], errors[0].end_ns


def _life(run: Run, process: Process) -> Span | None:
    """The span in which its parent watched a worker; None for other processes, or when the parent died, too."""
    if process.role != "worker":
        return None
    return next((s for s in run.all("worker.process") if s.rank == process.rank and not s.unfinished), None)


def _fate(run: Run, process: Process) -> str | None:
    """How a worker ended, for a sentence."""
    life = _life(run, process)
    return str(life.get("ended")).removeprefix("was ") if life is not None and life.get("ended") else None


def _heading(run: Run, process: Process) -> str | None:
    life = _life(run, process)
    return words.fate(str(life.get("ended"))) if life is not None and life.get("ended") else None


def _rows(run: Run, process: Process, broken: list[Span], began: int) -> list[Row]:
    own = {s.span_id: s for s in broken if s.process is process and s.name != "worker.process"}
    for name in _REACTIONS:
        own.update((s.span_id, s) for s in run.all(name, process) if s.end_ns >= began)
    paths: dict[str, tuple[int, ...]] = {}
    for span in sorted(own.values(), key=lambda s: s.start_ns):
        paths[span.span_id] = (*paths.get(span.parent_span_id, ()), span.start_ns)
    life = _life(run, process)
    rows = []
    for span in sorted(own.values(), key=lambda s: paths[s.span_id]):
        row = run.row(span, len(paths[span.span_id]))
        kind = kind_of(span)
        if kind is Kind.UNFINISHED:
            row.note = "never finished"
            at = life.end_ns if life is not None else span.end_ns
            row.marks.append(Mark(run.at(at), "died", "the process ended here"))
        elif kind is Kind.ERROR:
            row.note = "error"
        rows.append(row)
    return rows


def _who(process: Process, run: Run) -> str:
    return f"rank {process.rank}" if process.rank is not None else run.actor(process).name


def _explain(run: Run, first: Span, began: int, broken: list[Span]) -> list[str]:
    who = _who(first.process, run)
    if first.name == "worker.process":
        sentences = [f"no step failed; rank {first.rank} {first.get('ended')}, when all were to end"]
    elif first.unfinished:
        how = _fate(run, first.process) or "ended"
        how = how if how == "ended" or how.startswith("exited") else f"was {how}"
        sentences = [f"{who} {how} in {first.name}"]
    else:
        sentences = [f"the first thing to fail was {first.name} on {who}: {_message(first)}"]
    sentences += _noticed(run, began)
    sentences += _consequences(run, first, broken)
    shutdown = next((s for s in run.all("executor.shutdown") if s.end_ns >= began), None)
    if shutdown is not None:
        later = [
            s for s in run.all("rpc.call") if began <= s.start_ns <= shutdown.start_ns and not s.is_error
        ]
        if later:
            went = "call" if len(later) == 1 else f"{len(later)} calls"
            sentences.append(f"the executor went on: the next {went} succeeded")
        done = f"was done after {words.duration(shutdown.end_ns - began)}"
        after = words.duration(abs(shutdown.start_ns - began))
        if shutdown.start_ns < began:
            sentences.append(f"the executor had begun to shut down {after} before that and {done}")
        else:
            sentences.append(f"the executor began to shut down {after} after the failure and {done}")
        for level, what in (
            ("executor.terminate_sigterm", "SIGTERM"),
            ("executor.terminate_sigkill", "SIGKILL"),
        ):
            ranks = [int(r) for s in run.all(level) for r in s.get("ranks", ())]
            if ranks:
                sentences.append(f"{words.ranks(ranks)} did not leave in time and got {what}")
    unfinished = sum(s.unfinished for s in broken)
    if unfinished:
        sentences.append(
            f"{words.count(unfinished, 'span')} never finished; their end is the last moment known of their process"
        )
    return sentences


def _noticed(run: Run, began: int) -> list[str]:
    """Who heard of it first: the monitor, the wait for READY, or a reply that carries the exception."""
    heard: list[tuple[int, str]] = []
    for span in run.all("monitor.worker_died"):
        heard.append((span.start_ns, f"{span.name} noticed"))
    for span in run.all("executor.wait_for_ready"):
        if span.is_error:
            heard.append((span.end_ns, f"{run.actor(span.process).name} noticed in {span.name}"))
    for name in ("rpc.call", "future.result", "engine_core.step"):
        for span in run.all(name):
            if span.is_error and span.end_ns >= began:
                heard.append((span.end_ns, f"{run.actor(span.process).name} had the error in {name}"))
    sentences = []
    if heard:
        at, what = min(heard)
        sentences.append(f"{what} {words.duration(max(0, at - began))} later")
    ready = run.first("engine_core.ready")
    if ready is not None and ready.is_error:
        sentences.append(
            f"the client had the error {words.duration(max(0, ready.end_ns - began))} after the failure"
        )
    return sentences


def _consequences(run: Run, first: Span, broken: list[Span]) -> list[str]:
    """On other ranks, the first step that failed because of it."""
    sentences = []
    for process in run.store.processes():
        if process.role != "worker" or process is first.process:
            continue
        own = [s for s in broken if s.process is process]
        if own:
            span = min(own, key=lambda s: (s.unfinished, s.end_ns, -s.start_ns))
            verb = "was cut off" if span.unfinished else "failed"
            sentences.append(f"after that {span.name} {verb} on rank {process.rank}: {_message(span)}")
    return sentences[:3]


def _message(span: Span) -> str:
    """The first line of a span's status, without the module of the exception."""
    line = span.status_message.splitlines()[0] if span.status_message else "no message"
    kind, colon, rest = line.partition(": ")
    return f"{kind.rpartition('.')[2]}: {rest}" if colon and " " not in kind else line
