"""Whom a process of a recorded run waits for: those whose next steps would let it go on.

vLLM 0.25.1: no counterpart
Articles: part 1 §5, part 2 §2.4.4
"""

from __future__ import annotations

from functools import cached_property

from minivllm.stepper.meetings import Meetings
from minivllm.stepper.state import RunState
from minivllm.trace_store import Process, Span, TraceStore

_ENDED = "executor.terminate_"


class Waits:
    """Answers for one run, from the spans that are open and from those that are to come."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._meetings = Meetings(store)

    def on(self, state: RunState, process: Process) -> list[Process]:
        """Empty when it waits for nobody that is known. Somebody held by a failpoint waits for nobody."""
        stack = state.stack(process)
        if not stack or process in state.held or state.has_ended(process):
            return []
        if process.role == "worker":
            return self._worker(state, stack[-1])
        return self._parent(state, process, stack)

    def _worker(self, state: RunState, innermost: Span) -> list[Process]:
        if innermost.name != "worker.mq_handshake":
            return self._meetings.missing(innermost, state.time_ns)
        # The broadcast ring is ready when its writer has seen all its readers, which it begins after the last READY.
        if self._executor is None:
            return []
        if _first(self._handshakes, self._executor) > state.time_ns:
            return [self._executor]
        return self._not_at_handshake(state)

    def _parent(self, state: RunState, process: Process, stack: list[Span]) -> list[Process]:
        by_rank = state.facts.by_rank
        for span in stack:
            if span.name == "executor.wait_for_ready":
                return [by_rank[rank] for rank in missing_ready(state) if rank in by_rank]
            if span.name == "executor.mq_handshake":
                return self._not_at_handshake(state)
            if span.name in ("rpc.await_responses", "future.result"):
                return self._repliers(state, span)
            if span.name.startswith(_ENDED):
                return [p for p in state.spawned if p.role == "worker" and p not in state.exits]
        if process.role == "client" and (stack[-1].name == "engine_core.ready" or state.requests):
            return [p for p in state.begun if p.role == "engine_core" and not state.has_ended(p)]
        return []

    def replying(self, state: RunState, awaited: Span) -> list[Process]:
        """The workers that reply to the call whose reply is awaited, by rank; empty when the trace does not tell."""
        call = self._call(state, awaited)
        if call is None:
            return []
        found = {span.process for span in self._executions(state, awaited) if span.get("replies")}
        said = str(call.get("replies", "")).removeprefix("rank ")
        if not found and said.isdigit():
            found = {state.facts.by_rank[int(said)]} if int(said) in state.facts.by_rank else set()
        return sorted(found, key=lambda process: process.rank or 0)

    def unfinished(self, state: RunState, awaited: Span) -> list[Process]:
        """The workers that have yet to finish the call whose reply is awaited, by rank."""
        found = {span.process for span in self._executions(state, awaited) if span.end_ns > state.time_ns}
        return sorted(found, key=lambda process: process.rank or 0)

    def _repliers(self, state: RunState, awaited: Span) -> list[Process]:
        replying, unfinished = self.replying(state, awaited), self.unfinished(state, awaited)
        # A call has ended when every rank has finished it, whoever replies.
        return [process for process in replying if process in unfinished] or unfinished or replying

    def _executions(self, state: RunState, awaited: Span) -> list[Span]:
        call = self._call(state, awaited)
        children = self._store.children(call) if call is not None else []
        return [span for span in children if span.name == "rpc.execute"]

    def _call(self, state: RunState, awaited: Span) -> Span | None:
        if awaited.name != "future.result":
            return self._store.parent(awaited)
        return next((call for call in state.futures if call.get("seq") == awaited.get("seq")), None)

    # --- the handshake of the queues

    @cached_property
    def _handshakes(self) -> dict[Process, int]:
        """When each process came to it first."""
        spans = [
            *self._store.spans("worker.mq_handshake"),
            *self._store.spans("executor.mq_handshake"),
        ]
        return {span.process: span.start_ns for span in reversed(spans)}

    @cached_property
    def _executor(self) -> Process | None:
        spans = [*self._store.spans("executor.init"), *self._store.spans("executor.wait_for_ready")]
        return spans[0].process if spans else None

    def _not_at_handshake(self, state: RunState) -> list[Process]:
        return [
            p for _, p in sorted(state.facts.by_rank.items()) if _first(self._handshakes, p) > state.time_ns
        ]


def missing_ready(state: RunState) -> list[int]:
    """Ranks whose READY the executor has not read."""
    return sorted(set(state.pipes) - state.ready)


def _first(moments: dict[Process, int], process: Process) -> int:
    return moments.get(process, 1 << 63)
