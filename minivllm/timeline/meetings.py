"""Steps that no rank can leave before the last one has come: who waited there for whom.

vLLM 0.25.1: no counterpart
Articles: part 1 §5, part 2 §4.4
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from minivllm.timeline import text as words
from minivllm.timeline.run import Run
from minivllm.trace_store import Process, Span

START_UP_MEETINGS: Final = frozenset(
    {
        "dist.rendezvous",
        "dist.init_process_group",
        "dist.new_group",
        "dist.init_communicator",
        "worker.mq_handshake",
    }
)
COLLECTIVES: Final = frozenset({"dist.all_reduce", "dist.all_gather"})


def start_up_meetings(run: Run) -> dict[str, Span]:
    """Span id -> the span of the rank that came last to the same meeting, for all ranks but that one."""
    spans = [s for name in START_UP_MEETINGS for s in run.all(name)]
    return _waits(run, spans, run.all("executor.mq_handshake"))


def collectives(run: Run, spans: Iterable[Span]) -> dict[str, Span]:
    """The same for the collectives among `spans`, which must be those of one RPC (or one step) on all ranks.

    What one stage of a pipeline receives is waited for until another one begins to send it.
    """
    inside = list(spans)
    waits = _waits(run, [s for s in inside if s.name in COLLECTIVES], [])
    if any(s.name == "dist.recv" for s in inside):
        sent = _senders(run)
        waits.update({s.span_id: sent[s.span_id] for s in inside if s.span_id in sent})
    return waits


def _senders(run: Run) -> dict[str, Span]:
    """Span id of each dist.recv -> the dist.send that it got its data from: the n-th of one is the n-th of the other."""
    queued: dict[tuple[object, ...], list[Span]] = {}
    for send in sorted(run.all("dist.send"), key=lambda s: s.start_ns):
        # Sampled tokens go to all other stages at once.
        queued.setdefault((send.rank, send.get("dst"), send.get("what")), []).append(send)
    found: dict[str, Span] = {}
    turns: dict[tuple[object, ...], int] = {}
    for recv in sorted(run.all("dist.recv"), key=lambda s: s.start_ns):
        for receiver in (recv.rank, None):
            sends = queued.get((recv.get("src"), receiver, recv.get("what")))
            if sends:
                key = (recv.rank, recv.get("src"), recv.get("what"))
                turn = turns[key] = turns.get(key, -1) + 1
                if turn < len(sends) and sends[turn].start_ns <= recv.end_ns:
                    found[recv.span_id] = sends[turn]
                break
    return found


def _waits(run: Run, spans: list[Span], handshakes: list[Span]) -> dict[str, Span]:
    members_of: dict[tuple[Process, object], object] = {
        (s.process, s.get("group")): str(s.get("ranks")) for s in run.all("dist.new_group")
    }
    meetings: dict[tuple[object, ...], list[Span]] = {}
    seen: dict[tuple[object, ...], int] = {}
    for span in sorted(spans, key=lambda s: s.start_ns):
        group = span.get("group")
        what = (span.name, group, members_of.get((span.process, group)))
        # The n-th meeting of a group on one rank is the n-th meeting of it on the others.
        on_rank = (*what, span.rank)
        turn = seen[on_rank] = seen.get(on_rank, -1) + 1
        meetings.setdefault((*what, turn), []).append(span)
    waits: dict[str, Span] = {}
    for (name, *_), members in meetings.items():
        if name == "worker.mq_handshake":
            members = [*members, *handshakes]
        last = max(members, key=lambda s: s.start_ns)
        waits.update({s.span_id: last for s in members if s is not last})
    return waits


def until(waits: dict[str, Span]) -> dict[str, int]:
    """Span id -> the (absolute) moment up to which that span only waited."""
    return {span_id: last.start_ns for span_id, last in waits.items()}


def sentences(spans: Iterable[Span], waits: dict[str, Span], threshold_ns: float) -> list[str]:
    """Who waited for whom in collectives, summed up per pair; waits below the threshold are left out."""
    totals: dict[tuple[str, int, int], int] = {}
    for span in spans:
        last = waits.get(span.span_id)
        if last is not None and span.rank is not None and last.rank is not None:
            waited = min(last.start_ns, span.end_ns) - span.start_ns
            key = (span.name, span.rank, last.rank)
            totals[key] = totals.get(key, 0) + max(0, waited)
    worth = sorted(((ns, key) for key, ns in totals.items() if ns >= threshold_ns), reverse=True)
    return [
        f"in {name} rank {rank} waited {words.duration(ns)} for rank {last}"
        for ns, (name, rank, last) in worth[:4]
    ]
