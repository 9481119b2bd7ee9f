"""What each process, pipe and queue is doing, in words; and what a step changed.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.4, §2.5
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minivllm.stepper.rings import Slot, message_label
from minivllm.stepper.state import RunState
from minivllm.stepper.waits import Waits, missing_ready
from minivllm.timeline import text as words
from minivllm.timeline.run import Run
from minivllm.trace_store import Process, Span


@dataclass(frozen=True, slots=True)
class Status:
    """What a process is doing.

    Attributes:
        kind: "not started", "starting", "working", "waiting", "idle", "ending", "ended" or "dead".
        text: a short sentence without times.
        since_ns: when what the text says began (absolute), 0 if unknown.
        note: who it waits for, or what holds it; empty if nobody and nothing, or if the text says it.
        detail: what those it waits for are doing meanwhile.
    """

    kind: str
    text: str
    since_ns: int = 0
    note: str = ""
    detail: str = ""


class Words:
    """Puts the states of one run into words."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.waits = Waits(run.store)

    def name(self, process: Process) -> str:
        return self._run.actor(process).name

    # --- processes

    def status(self, state: RunState, process: Process) -> Status:
        status = self._status(state, process)
        if status.kind != "waiting":
            return status
        late = self.waits.on(state, process)
        detail = "; ".join(self._doing(state, other) for other in late[:2]) + ("; …" if len(late) > 2 else "")
        return replace(status, detail=detail)

    def chain(self, state: RunState, process: Process) -> str:
        """Whom it waits for, whom those wait for, and so on, to those that wait for nobody; "" if it waits for nobody."""
        seen, parts = [process], []
        for at in seen:
            for other in self.waits.on(state, at):
                if other not in seen:
                    seen.append(other)
                    parts.append(self._doing(state, other))
        return "; ".join(parts)

    def _status(self, state: RunState, process: Process) -> Status:
        if state.has_ended(process):
            return self._ended(state, process)
        stack = state.stack(process)
        if process not in state.begun:
            if process in state.spawned:
                return Status("starting", "starting: no sign of life yet", state.spawned[process])
            return Status("not started", "not started")
        if not stack:
            if process.role == "worker":
                return Status("working", "between two steps")
            return Status("idle", "idle: waits for requests" if process.role == "engine_core" else "idle")
        names = {span.name for span in stack}
        if process in state.held:
            span, failpoint = state.held[process]
            return Status("waiting", span.name, span.start_ns, f"held by failpoint {failpoint}")
        if process.role == "worker":
            return self._worker(state, stack, names)
        if process.role == "engine_core":
            return self._engine_core(state, stack, names)
        return self._client(state, stack, names)

    def _ended(self, state: RunState, process: Process) -> Status:
        seen = state.exits.get(process)
        if seen is None:
            # Its last span tells more than nothing: an unfinished one was cut off.
            last = max(self._run.store.spans(process=process), key=lambda span: span.end_ns)
            if last.unfinished:
                return Status("dead", "dead", process.end_ns)
            return Status("ended", "ended", process.end_ns)
        how = str(seen.get("ended") or seen.status_message or "ended")
        code = seen.attributes.get("process.exit.code", seen.get("exit_code", 0))
        inner = [s for s in self._run.store.spans(process=process) if s.unfinished]
        at = f" in {max(inner, key=lambda span: span.start_ns).name}" if inner else ""
        return Status("dead" if code else "ended", how + at, seen.end_ns)

    def _worker(self, state: RunState, stack: list[Span], names: set[str]) -> Status:
        innermost = stack[-1]
        since = innermost.start_ns
        if innermost.name == "worker.bootstrap":
            return Status("starting", "starting: interpreter and imports", since)
        if innermost.process in state.ending:
            return Status("ending", f"ending: {innermost.name}", since)
        late = self.waits.on(state, innermost.process)
        if late:
            return Status("waiting", innermost.name, since, f"waits for {self._names(late)}")
        call = next((span for span in stack if span.name == "rpc.execute"), None)
        if call is not None:
            what = f"executes {_method(call)}"
            return Status("working", what if innermost is call else f"{what}: {innermost.name}", since)
        if innermost.name == "worker.mq_handshake":
            return Status("waiting", innermost.name, since, "until all queues are connected")
        if "worker.busy_loop" in names:
            if innermost.name not in ("mq.dequeue", "worker.busy_loop"):
                return Status("working", innermost.name, since)
            # Between two messages the loop itself is innermost, whose age says nothing about this.
            return Status("idle", "idle: waits for an RPC", since if innermost.name == "mq.dequeue" else 0)
        return Status("working", f"{'starting: ' if 'worker.init' in names else ''}{innermost.name}", since)

    def _names(self, processes: list[Process]) -> str:
        ranks = [process.rank for process in processes if process.rank is not None]
        others = [self.name(process) for process in processes if process.rank is None]
        return words.listing([*others, *([words.ranks(ranks)] if ranks else [])])

    def _doing(self, state: RunState, process: Process) -> str:
        """`rank 1 is in worker.load_model`, and for whom it waits there."""
        name = self._names([process])
        status, stack = self._status(state, process), state.stack(process)
        if process in state.held:
            span, failpoint = state.held[process]
            return f"{name} is held in {span.name} by failpoint {failpoint}"
        if state.has_ended(process):
            return f"{name} has ended"
        if not stack:
            return f"{name} has not begun" if process not in state.begun else f"{name} is {status.text}"
        if status.text.startswith(("waits for", "waits until")):
            return f"{name} {status.text}"
        if process.role == "worker" and stack[-1].name in ("mq.dequeue", "worker.busy_loop"):
            return f"{name} waits for an RPC"
        return f"{name} is in {stack[-1].name}" + (f" and {status.note}" if status.note else "")

    def _engine_core(self, state: RunState, stack: list[Span], names: set[str]) -> Status:
        innermost = stack[-1]
        since = innermost.start_ns
        awaited = next((s for s in stack if s.name in ("rpc.await_responses", "future.result")), None)
        if "executor.wait_for_ready" in names:
            missing = missing_ready(state)
            what = f"waits for READY of {words.ranks(missing)}" if missing else "has READY of all ranks"
            begun = next(span.start_ns for span in stack if span.name == "executor.wait_for_ready")
            return Status("waiting", what, begun)
        if awaited is not None:
            if "monitor.worker_died" in names:
                return Status("working", innermost.name, since)
            return self._reply(state, awaited)
        if innermost.name == "executor.mq_handshake":
            late = self.waits.on(state, innermost.process)
            whom = f"waits for {self._names(late)}" if late else "until all queues are connected"
            return Status("waiting", innermost.name, since, whom)
        if innermost.name.startswith("executor.terminate_"):
            alive = [p for p in state.spawned if p.role == "worker" and p not in state.exits]
            left = [p.rank for p in alive if p.rank is not None]
            whom = f"waits for {words.ranks(left)} to end" if left else ""
            return Status("waiting", innermost.name, since, whom)
        if innermost.name == "engine_core.shutdown":
            return Status("ending", "ending", since)
        return Status("working", innermost.name, since)

    def _reply(self, state: RunState, awaited: Span) -> Status:
        call = awaited if awaited.name == "future.result" else self._run.store.parent(awaited)
        method = _method(call or awaited)
        late, replying = self.waits.unfinished(state, awaited), self.waits.replying(state, awaited)
        ranks = awaited.get("ranks")
        if not isinstance(ranks, list):
            ranks = [process.rank for process in replying if process.rank is not None]
        # The rank comes early, where a narrow window still shows it.
        if late and replying and not set(late) & set(replying):
            have = "has" if len(late) == 1 else "have"
            what = f"waits until {self._names(late)} {have} finished {method}"
        elif len(ranks) == 1:
            what = f"waits for {words.ranks(ranks)}'s reply to {method}"
        elif ranks:
            what = f"waits for replies of {words.ranks(ranks)} to {method}"
        else:
            what = f"waits for the reply to {method}"
        return Status("waiting", what, awaited.start_ns)

    def _client(self, state: RunState, stack: list[Span], names: set[str]) -> Status:
        innermost = stack[-1]
        if innermost.name == "engine_core.ready":
            return Status("waiting", "waits for READY of EngineCore", innermost.start_ns)
        if innermost.name == "run":
            if state.requests:
                what = f"waits for the tokens of {words.count(len(state.requests), 'request')}"
                return Status("waiting", what, state.requests[0].start_ns)
            return Status("working", "runs the script")
        return Status("working", innermost.name, innermost.start_ns)

    # --- pipes, queues, futures

    def pipes(self, state: RunState) -> dict[str, str]:
        """The pipes of workers that have not ended, as long as there is something to say about them."""
        lines = {}
        for rank, pipes in sorted(state.pipes.items()):
            child = state.facts.by_rank.get(rank)
            if child is None or not state.has_ended(child):
                lines[f"pipes of rank {rank}"] = f"ready {pipes.ready}, death {pipes.death}"
        return lines

    def pipe_groups(self, state: RunState) -> dict[str, str]:
        """The same with ranks together whose pipes are in the same state."""
        groups: dict[str, list[int]] = {}
        for name, text in self.pipes(state).items():
            groups.setdefault(text, []).append(int(name.rpartition(" ")[2]))
        return {f"pipes of {words.ranks(ranks)}": text for text, ranks in groups.items()}

    def message(self, slot: Slot) -> str:
        if slot.message is None:
            return ""
        overflow = " (overflow)" if slot.message.get("overflow") else ""
        return message_label(self._run.store, slot.message) + overflow

    def slot(self, slot: Slot) -> str:
        if slot.message is None:
            text = "never written"
        elif not slot.written:
            text = "empty"
        elif all(slot.read):
            text = "read by all"
        elif any(slot.read):
            text = "read by some"
        else:
            text = "unread"
        if slot.writing:
            text = "being written" if slot.is_free else f"{text}; the writer waits for it"
        what = self.message(slot)
        return f"{slot.flags} {text}" + (f": {what}" if what and not slot.is_free else "")

    def futures(self, state: RunState) -> str:
        return ", ".join(f"#{call.get('seq', '?')} {_method(call, number=False)}" for call in state.futures)

    # --- before and after

    def summary(self, state: RunState) -> dict[str, str]:
        """Everything that can change, by what it is about."""
        summary = {}
        for process in self._run.store.processes():
            status = self.status(state, process)
            summary[self.name(process)] = ", ".join(filter(None, (status.text, status.note)))
        summary |= self.pipes(state)
        for queue, slots in state.rings.items():
            for index, slot in enumerate(slots):
                if slot.message is not None or slot.writing:
                    summary[f"{queue}, slot {index}"] = self.slot(slot)
        summary["queued futures"] = self.futures(state) or "none"
        return summary

    def changes(self, before: dict[str, str], after: dict[str, str]) -> list[tuple[str, str, str]]:
        """(what, before, after) for everything that differs."""
        return [
            (what, before.get(what, "-"), after.get(what, "-"))
            for what in dict.fromkeys([*before, *after])
            if before.get(what) != after.get(what)
        ]


def _method(span: Span, number: bool = True) -> str:
    method = str(span.attributes.get("rpc.method") or span.get("method") or "a call")
    return f"{method} #{span.get('seq')}" if number and span.get("seq") is not None else method
