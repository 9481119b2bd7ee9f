"""View `spawn`: who was started when, who was ready when, and where the parent waited.

vLLM 0.25.1: no counterpart
Articles: part 1 §2–§4, part 2 §2.3.1, §2.4.3, §2.4.4
"""

from __future__ import annotations

from minivllm.timeline import text as words
from minivllm.timeline.run import Run, last_arrival
from minivllm.timeline.view import Kind, Mark, Row, Segment, View
from minivllm.trace_store import Process

_WORKER_STEPS = ("worker.bootstrap", "worker.init", "worker.send_ready", "worker.mq_handshake")


def build(run: Run) -> View:
    view = View("spawn", "Spawn: who was started when, who was ready when, and who waited for whom")
    client, core = run.process("client"), run.process("engine_core")
    parent = core or client
    if client is not None and core is not None:
        view.rows += _client_rows(run, client)
    if parent is not None:
        view.rows += _parent_rows(run, parent, core)
    for process in run.workers:
        view.rows += _worker_rows(run, process)
    if not run.all("executor.make_worker_process"):
        view.missing.append(
            "this run started no worker processes (one rank in the parent's own process)"
            if run.all("executor.init")
            else run.missing("lifecycle", "spawn spans")
        )
    view.fit()
    view.start_ns = min(view.start_ns, 0)
    if parent is not None:
        view.explanation = _explain(run, parent)
    return view


def _client_rows(run: Run, client: Process) -> list[Row]:
    rows = [run.heading(client)]
    for name in ("engine_core.spawn", "engine_core.ready"):
        span = run.first(name, client)
        if span:
            rows.append(run.row(span))
    return rows


def _parent_rows(run: Run, parent: Process, core: Process | None) -> list[Row]:
    rows = [run.heading(parent)]
    spawn, init = run.first("engine_core.spawn"), run.first("engine_core.init", parent)
    if core is not None and spawn and init and init.start_ns > spawn.end_ns:
        actor = run.actor(parent)
        rows.append(
            Row("interpreter, imports", actor, 1, [Segment(run.at(spawn.end_ns), run.at(init.start_ns))])
        )
    spawn_workers = run.first("executor.spawn_workers", parent)
    if spawn_workers:
        rows.append(run.row(spawn_workers))
    for make in run.all("executor.make_worker_process", parent):
        rows.append(run.row(make, 2, f"make_worker_process {make.rank}"))
    wait = run.first("executor.wait_for_ready", parent)
    if wait:
        row = run.row(wait)
        row.marks = [
            Mark(run.at(at), "ready", f"rank {rank}") for rank, at in sorted(_ready_events(run).items())
        ]
        rows.append(row)
    handshake = run.first("executor.mq_handshake", parent)
    if handshake:
        rows.append(run.row(handshake, wait_until_ns=_handshake_meeting(run)))
    return rows


def _worker_rows(run: Run, process: Process) -> list[Row]:
    rows = [run.heading(process)]
    for name in _WORKER_STEPS:
        span = run.first(name, process)
        if span is None:
            continue
        row = run.row(span, wait_until_ns=_handshake_meeting(run) if name == "worker.mq_handshake" else None)
        if name == "worker.send_ready" and row.segments[0].kind is Kind.WORK:
            row.marks.append(Mark(run.at(span.end_ns), "ready", f"rank {process.rank}"))
        rows.append(row)
    return rows


def _handshake_meeting(run: Run) -> int | None:
    meeting = [*run.all("executor.mq_handshake"), *run.all("worker.mq_handshake")]
    return last_arrival(meeting) if meeting else None


def _ready_events(run: Run) -> dict[int, int]:
    """Rank -> when its READY reached the parent (absolute); when it was sent if the parent has no event."""
    ready = {
        rank: span.end_ns
        for span in run.all("worker.send_ready")
        if (rank := span.rank) is not None and not span.is_error
    }
    for wait in run.all("executor.wait_for_ready"):
        for event in wait.events:
            rank = event.attributes.get("minivllm.rank")
            if event.name == "ready" and rank is not None:
                ready[int(rank)] = event.time_ns
    return ready


def _explain(run: Run, parent: Process) -> list[str]:
    sentences = []
    makes = [(s.rank, run.at(s.start_ns)) for s in run.all("executor.make_worker_process", parent)]
    started = sorted((rank, at) for rank, at in makes if rank is not None)
    wait = run.first("executor.wait_for_ready", parent)
    ready = {rank: run.at(at) for rank, at in _ready_events(run).items()}
    if started and wait:
        sentences.append(_order_of_start(started, run.at(wait.start_ns)))
    if ready:
        sentences.append(_order_of_ready(ready))
    if wait:
        name = run.actor(parent).name
        sentences.append(f"{name} waited {words.duration(wait.end_ns - wait.start_ns)} for READY")
        client_wait = run.first("engine_core.ready")
        if client_wait:
            sentences[-1] += (
                f", and the client {words.duration(client_wait.end_ns - client_wait.start_ns)} for EngineCore"
            )
    longest = _longest_phase(run)
    if longest:
        sentences.append(longest)
    return sentences


def _order_of_start(started: list[tuple[int, int]], waited_ns: int) -> str:
    times = words.instants([at for _, at in started] + [waited_ns])
    late = [rank for rank, at in started if at >= waited_ns]
    if late:
        return (
            f"not all workers were started before the first was waited for (at {times[-1]}): "
            + words.listing(
                [
                    f"rank {r} was started at {t}"
                    for (r, _), t in zip(started, times, strict=False)
                    if r in late
                ]
            )
        )
    if len(started) == 1:
        return f"the worker was started at {times[0]} and waited for from {times[-1]}"
    if len(started) <= 4:
        at = f"at {words.listing(times[:-1])}"
    else:
        at = f"between {min(times[:-1])} and {max(times[:-1])}"
    return (
        f"{words.every(len(started), 'worker')} were started ({at}) before the first was waited for (at {times[-1]}): "
        "each waits for the others in init_device, so that starting one and waiting for it would never end"
    )


def _order_of_ready(ready: dict[int, int]) -> str:
    order = sorted(ready, key=lambda rank: ready[rank])
    if len(order) == 1:
        return f"rank {order[0]} was ready at {words.instant(ready[order[0]])}"
    first, last = order[0], order[-1]
    lead = words.duration(ready[last] - ready[first])
    if len(order) == 2:
        return f"rank {last} was ready last, {lead} after rank {first}"
    return f"READY came in the order {words.listing([str(r) for r in order])}; rank {last} was last, {lead} after rank {first}"


_GLOSS = {
    "worker.bootstrap": "interpreter and imports",
    "worker.init_worker": "importing the worker class, and with it torch",
    "worker.init_device": "device, process groups and runner",
    "worker.load_model": "model and weights",
}


def _longest_phase(run: Run) -> str:
    """Which part of the workers' way to READY took longest."""
    phases = [
        phase
        for process in run.workers
        for outer in run.all("worker.init", process)[:1]
        for phase in [*run.all("worker.bootstrap", process)[:1], *run.store.children(outer)]
    ]
    if not phases:
        return ""
    longest = max(phases, key=lambda s: s.end_ns - s.start_ns)
    gloss = f" ({_GLOSS[longest.name]})" if longest.name in _GLOSS else ""
    return (
        f"the longest part of a worker's way to READY was {longest.name}{gloss}: "
        f"{words.duration(longest.end_ns - longest.start_ns)} on rank {longest.rank}"
    )
