"""The state of a run after any of its steps, as a pure function of the recorded events up to there.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.4.3, §2.4.4, §2.5.1

    state = RunState.before(walk)
    for step in steps: state.apply(step)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm.stepper.rings import Channels, Slot, fresh
from minivllm.stepper.steps import Kind, Step, Walk
from minivllm.trace_store import Process, Span

# Spans that last while other steps come and go, on no thread's stack.
LASTING = frozenset({"worker.process", "request"})
_THREAD = re.compile(rb'"thread\.id"\s*,\s*"value"\s*:\s*\{\s*"intValue"\s*:\s*"?(\d+)')


@dataclass(frozen=True, slots=True)
class Pipes:
    """The two pipes between the executor and one worker.

    Attributes:
        ready: "empty", what lies in it ("READY", "FAILED"), "closed" after the parent has read it, "EOF" when the
            worker ended without a message.
        death: "open", "watched" (the worker's thread waits for its EOF), or "EOF".
    """

    ready: str = "empty"
    death: str = "open"


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds during the whole run: who is who, and which queues there are."""

    walk: Walk
    channels: Channels
    by_pid: dict[int, Process]
    by_rank: dict[int, Process]

    @classmethod
    def of(cls, walk: Walk) -> Facts:
        processes = walk.store.processes()
        return cls(
            walk,
            Channels(walk.store),
            {process.pid: process for process in processes},
            {p.rank: p for p in processes if p.role == "worker" and p.rank is not None},
        )

    def child(self, span: Span) -> Process | None:
        """The process that a span of its parent is about."""
        pid = span.attributes.get("process.pid", span.get("pid"))
        if pid is not None:
            return self.by_pid.get(pid)
        rank = span.get("rank")
        return None if rank is None else self.by_rank.get(rank)


@dataclass(slots=True)
class RunState:
    """What the processes, pipes and queues are in.

    Attributes:
        time_ns: of the last step that was applied.
        stacks: open spans per process and thread, the outermost first; worker.process and request are on none.
        spawned: processes whose parent has begun to start them, and when.
        begun: processes that have recorded anything.
        exits: how a process ended, as its parent recorded it.
        pipes: by rank, from the moment they exist.
        rings: slots by queue, from the moment the queue exists.
        futures: rpc.call spans whose FutureWrapper is queued, the oldest first.
        requests: open requests.
        ready: ranks whose READY the executor has read.
        ending: workers that have begun to shut down.
        held: processes in which a failpoint acts: the span it was set on, and its text.
    """

    facts: Facts
    time_ns: int = 0
    stacks: dict[Process, dict[bytes, list[Span]]] = field(default_factory=dict)
    spawned: dict[Process, int] = field(default_factory=dict)
    begun: set[Process] = field(default_factory=set)
    exits: dict[Process, Span] = field(default_factory=dict)
    pipes: dict[int, Pipes] = field(default_factory=dict)
    rings: dict[str, list[Slot]] = field(default_factory=dict)
    futures: list[Span] = field(default_factory=list)
    requests: list[Span] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    ending: set[Process] = field(default_factory=set)
    held: dict[Process, tuple[Span, str]] = field(default_factory=dict)

    @classmethod
    def before(cls, walk: Walk) -> RunState:
        """Before the first step."""
        return cls(Facts.of(walk))

    def copy(self) -> RunState:
        return RunState(
            self.facts,
            self.time_ns,
            {
                process: {thread: list(stack) for thread, stack in threads.items()}
                for process, threads in self.stacks.items()
            },
            dict(self.spawned),
            set(self.begun),
            dict(self.exits),
            dict(self.pipes),
            {queue: list(slots) for queue, slots in self.rings.items()},
            list(self.futures),
            list(self.requests),
            set(self.ready),
            set(self.ending),
            dict(self.held),
        )

    # --- questions

    def stack(self, process: Process) -> list[Span]:
        """The open spans of the thread of this process that matters most: the one that has been at work longest."""
        stacks = [stack for stack in self.stacks.get(process, {}).values() if stack]
        return min(stacks, key=lambda stack: stack[0].start_ns, default=[])

    def other_threads(self, process: Process) -> list[Span]:
        """The innermost open span of each other thread."""
        main = self.stack(process)
        return [stack[-1] for stack in self.stacks.get(process, {}).values() if stack and stack is not main]

    def has_ended(self, process: Process) -> bool:
        """Nothing more is recorded of this process, or its parent has seen it end."""
        if process in self.exits:
            return True
        is_over = process in self.begun and not self.stack(process) and self.time_ns >= process.end_ns
        return is_over and not process.alive

    # --- events

    def apply(self, step: Step) -> None:
        self.time_ns = step.time_ns
        span = step.span
        held = self.held.get(span.process)
        if held is not None and thread_of(held[0]) == thread_of(span):
            # Failpoints act where a span begins: whatever this thread does next, it is let go.
            del self.held[span.process]
        if step.kind is Kind.BEGIN:
            self.begun.add(span.process)
            if span.name not in LASTING:
                self.stacks.setdefault(span.process, {}).setdefault(thread_of(span), []).append(span)
        elif step.ends and span.name not in LASTING:
            stack = self.stacks.get(span.process, {}).get(thread_of(span), [])
            if span in stack:
                stack.remove(span)
            if self.has_ended(span.process) and span.process.role != "worker":
                # The writing ends of the death pipes die with their process, and so do its futures.
                self._close_death_pipes()
                self.futures.clear()
        elif step.note is not None and step.note.name == "failpoint":
            self.held[span.process] = (span, str(step.note.attributes.get("minivllm.action", "")))
        handler = _HANDLERS.get((span.name, "end" if step.ends else step.kind.name.lower()))
        if handler is not None:
            handler(self, step)

    def _close_death_pipes(self) -> None:
        for rank, pipes in self.pipes.items():
            self.pipes[rank] = Pipes(pipes.ready, "EOF")

    def _set_pipe(self, rank: int | None, ready: str | None = None, death: str | None = None) -> None:
        if rank is not None and rank in self.pipes:
            before = self.pipes[rank]
            self.pipes[rank] = Pipes(ready or before.ready, death or before.death)

    def _make_ring(self, queue: str | None) -> None:
        channel = self.facts.channels.get(queue or "")
        if channel is not None and channel.name not in self.rings:
            self.rings[channel.name] = [fresh(len(channel.readers))] * channel.slots

    def _slot(self, span: Span) -> tuple[list[Slot], int] | None:
        """The ring and the slot that a message step is about; None when it ended without a message."""
        slot = span.get("slot", -1)
        if slot < 0:
            return None
        queue = str(span.get("queue"))
        self._make_ring(queue)
        return self.rings[queue], slot


def thread_of(span: Span) -> bytes:
    """What tells the threads of one process apart."""
    # Decoding all attributes of each span just for this would be most of the work of a long jump.
    found = _THREAD.search(bytes(span.raw.attributes))
    return found[1] if found else b""


# --- what single steps mean, by span name and kind


def _spawn(state: RunState, step: Step) -> None:
    child = state.facts.child(step.span)
    if child is not None:
        state.spawned[child] = step.time_ns


def _make_worker(state: RunState, step: Step) -> None:
    _spawn(state, step)
    rank = step.span.get("rank")
    if rank is not None:
        state.pipes[rank] = Pipes()


def _begin_ending(state: RunState, step: Step) -> None:
    state.ending.add(step.span.process)


def _exit(state: RunState, step: Step) -> None:
    child = state.facts.child(step.span)
    if child is None:
        return
    state.exits[child] = step.span
    if child.rank in state.pipes and state.pipes[child.rank].ready == "empty":
        state._set_pipe(child.rank, ready="EOF")


def _watch_death_pipe(state: RunState, step: Step) -> None:
    state._set_pipe(step.span.rank, death="watched")


def _send_ready(state: RunState, step: Step) -> None:
    rank = step.span.rank
    # The parent may have read the message before the worker has written down that it sent it.
    if rank is not None and rank in state.pipes and state.pipes[rank].ready == "empty":
        state._set_pipe(rank, ready=str(step.span.get("status", "READY")))


def _read_ready(state: RunState, step: Step) -> None:
    if step.note is not None and step.note.name == "ready":
        rank = step.note.attributes.get("minivllm.rank")
        if rank is not None:
            state.ready.add(rank)
            state._set_pipe(rank, ready="closed")


def _close_death_writers(state: RunState, step: Step) -> None:
    state._close_death_pipes()


def _broadcast_made(state: RunState, step: Step) -> None:
    state._make_ring(state.facts.channels.broadcast)


def _response_made(state: RunState, step: Step) -> None:
    state._make_ring(step.span.get("response"))


def _rings_closed(state: RunState, step: Step) -> None:
    state.rings.clear()


def _begin_writing(state: RunState, step: Step) -> None:
    found = state._slot(step.span)
    if found is not None:
        slots, index = found
        slot = slots[index]
        slots[index] = Slot(slot.written, slot.read, True, slot.message)


def _written(state: RunState, step: Step) -> None:
    found = state._slot(step.span)
    if found is not None:
        slots, index = found
        slots[index] = slots[index].put(step.span)


def _read(state: RunState, step: Step) -> None:
    found = state._slot(step.span)
    if found is not None:
        slots, index = found
        readers = state.facts.channels[str(step.span.get("queue"))].readers
        slots[index] = slots[index].take(readers.index(step.span.process))


def _call_ends(state: RunState, step: Step) -> None:
    if step.span.get("non_block") and not step.span.is_error:
        state.futures.append(step.span)


def _result_ends(state: RunState, step: Step) -> None:
    number = step.span.get("seq")
    if number is not None and not step.span.is_error and not step.span.get("ended_by"):
        # Older futures have been drained on the way.
        state.futures = [call for call in state.futures if (call.get("seq") or 0) > number]


def _request_begins(state: RunState, step: Step) -> None:
    state.requests.append(step.span)


def _request_ends(state: RunState, step: Step) -> None:
    if step.span in state.requests:
        state.requests.remove(step.span)


_HANDLERS: dict[tuple[str, str], Callable[[RunState, Step], None]] = {
    ("engine_core.spawn", "begin"): _spawn,
    ("executor.make_worker_process", "begin"): _make_worker,
    ("worker.process", "end"): _exit,
    ("worker.shutdown", "begin"): _begin_ending,
    ("worker.monitor_death_pipe", "end"): _watch_death_pipe,
    ("worker.send_ready", "end"): _send_ready,
    ("executor.wait_for_ready", "note"): _read_ready,
    ("executor.close_death_writers", "begin"): _close_death_writers,
    ("executor.create_broadcast_mq", "end"): _broadcast_made,
    ("worker.init_message_queues", "end"): _response_made,
    ("executor.close_message_queues", "end"): _rings_closed,
    ("mq.enqueue", "begin"): _begin_writing,
    ("mq.enqueue", "written"): _written,
    ("mq.dequeue", "end"): _read,
    ("rpc.call", "end"): _call_ends,
    ("future.result", "end"): _result_ends,
    ("request", "begin"): _request_begins,
    ("request", "end"): _request_ends,
}
