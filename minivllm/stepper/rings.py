"""The rings of a run: their slots with the written flag and the reader flags, as the recorded messages imply them.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.1
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from minivllm.trace_store import Process, Span, TraceStore

DEFAULT_SLOTS = 10


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a ring.

    Attributes:
        written: the written flag.
        read: the reader flags, in the order of the ring's readers.
        writing: the writer has begun the message that comes here next.
        message: the enqueue span whose message lies here, or lay here last.
    """

    written: bool
    read: tuple[bool, ...]
    writing: bool = False
    message: Span | None = None

    @property
    def is_free(self) -> bool:
        return not self.written or all(self.read)

    @property
    def flags(self) -> str:
        """`1 01`: the written flag, then each reader's."""
        return f"{int(self.written)} {''.join(str(int(flag)) for flag in self.read)}"

    def put(self, message: Span) -> Slot:
        return Slot(True, (False,) * len(self.read), message=message)

    def take(self, reader: int) -> Slot:
        flags = tuple(flag or i == reader for i, flag in enumerate(self.read))
        return replace(self, read=flags)


def fresh(readers: int) -> Slot:
    """A slot as the constructor of the ring leaves it: not written, nobody is to read it."""
    return Slot(False, (True,) * readers)


@dataclass(frozen=True, slots=True)
class Channel:
    """What does not change about one queue: how many slots, who writes, who reads."""

    name: str
    slots: int
    writer: Process | None
    readers: tuple[Process, ...]


class Channels(dict[str, Channel]):
    """The queues of a run by name; empty for runs that recorded no messages."""

    def __init__(self, store: TraceStore) -> None:
        super().__init__()
        writers: dict[str, Process] = {}
        readers: dict[str, dict[Process, None]] = {}
        slots: dict[str, int] = {}
        for span in [*store.spans("mq.enqueue"), *store.spans("mq.dequeue")]:
            slot = span.get("slot", -1)
            if slot < 0:
                continue
            queue = str(span.get("queue"))
            slots[queue] = max(slots.get(queue, 0), slot + 1)
            if span.name == "mq.enqueue":
                writers.setdefault(queue, span.process)
            else:
                readers.setdefault(queue, {})[span.process] = None
        made = [chunks for span in store.spans("executor.create_broadcast_mq") if (chunks := _chunks(span))]
        broadcast = next((queue for queue, w in writers.items() if w.role != "worker"), None)
        workers = [process for process in store.processes() if process.role == "worker"]
        for queue, used in slots.items():
            # A worker that was killed before it read anything is a reader of the broadcast all the same.
            of_queue = set(readers.get(queue, {})) | (set(workers) if queue == broadcast else set())
            self[queue] = Channel(
                queue,
                max(used, made[0] if made else DEFAULT_SLOTS),
                writers.get(queue),
                tuple(sorted(of_queue, key=lambda process: (process.rank or 0, process.pid))),
            )
        self.broadcast = broadcast


def _chunks(span: Span) -> int:
    """The number of slots in the exported handle "(readers, slot bytes, slots, name)"; 0 if it says none."""
    try:
        return int(ast.literal_eval(str(span.get("handle")))[2])
    except (ValueError, SyntaxError, IndexError, TypeError):
        return 0


def message_label(store: TraceStore, message: Span) -> str:
    """What a message is: `execute_model #5`, `reply to #5`, or its size when the trace does not tell."""
    around = store.parent(message)
    if around is not None and around.name == "rpc.call":
        return f"{around.attributes.get('rpc.method', 'a call')} #{around.get('seq', '?')}"
    if around is not None and around.name == "rpc.enqueue_output":
        outcome = "" if around.get("status", "SUCCESS") == "SUCCESS" else f"{around.get('status')}, "
        return f"{outcome}reply to #{around.get('seq', '?')}"
    return f"{message.get('bytes', '?')} B"
