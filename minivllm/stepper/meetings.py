"""Who is still missing where ranks meet: the step that no rank can leave before all have come.

vLLM 0.25.1: no counterpart
Articles: part 1 §5, part 2 §4.4
"""

from __future__ import annotations

import ast

from minivllm.timeline.meetings import COLLECTIVES, START_UP_MEETINGS
from minivllm.trace_store import Process, Span, TraceStore

MEETINGS = (START_UP_MEETINGS - {"worker.mq_handshake"}) | COLLECTIVES
_What = tuple[str, object, Process]


class Meetings:
    """The meetings of one run: the n-th step of a name and group on one rank is the n-th of it on the others."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._workers = {p.rank: p for p in store.processes() if p.role == "worker" and p.rank is not None}
        self._turns: dict[_What, list[Span]] = {}
        self._turn_of: dict[str, tuple[object, int]] = {}
        self._known: set[str] = set()
        self._members: dict[tuple[Process, object], list[int]] = {
            (span.process, span.get("group")): _ranks(span.get("ranks"))
            for span in store.spans("dist.new_group")
        }

    def missing(self, span: Span, time_ns: int) -> list[Process]:
        """The other ranks that have not come to this meeting at that time, by rank."""
        if span.name not in MEETINGS or span.process.rank is None:
            return []
        self._learn(span.name)
        group, turn = self._turn_of[span.span_id]
        members = self._members.get((span.process, group)) or sorted(self._workers)
        late = []
        for rank in members:
            process = self._workers.get(rank)
            if process is None or process is span.process:
                continue
            turns = self._turns.get((span.name, group, process), [])
            if turn >= len(turns) or turns[turn].start_ns > time_ns:
                late.append(process)
        return late

    def _learn(self, name: str) -> None:
        if name in self._known:
            return
        self._known.add(name)
        for span in self._store.spans(name):
            group = span.get("group")
            turns = self._turns.setdefault((name, group, span.process), [])
            self._turn_of[span.span_id] = (group, len(turns))
            turns.append(span)


def _ranks(text: object) -> list[int]:
    """`[0, 1]` as a list or as text; empty when it is neither."""
    if isinstance(text, list):
        return [int(rank) for rank in text]
    try:
        return [int(rank) for rank in ast.literal_eval(str(text))]
    except (ValueError, SyntaxError, TypeError):
        return []
