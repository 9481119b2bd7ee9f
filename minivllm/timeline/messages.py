"""Who wrote which message and who read it: dequeue spans by the enqueue they link to.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.2
"""

from __future__ import annotations

from minivllm.timeline import text as words
from minivllm.timeline.run import Run
from minivllm.timeline.view import Kind, Row, Segment
from minivllm.trace_store import Span


class Messages:
    """The messages that were read between two moments (absolute); a long run has too many to look at all of them."""

    def __init__(self, run: Run, from_ns: int, to_ns: int) -> None:
        self.readers: dict[str, list[Span]] = {}
        self.sender: dict[str, Span] = {}
        enqueues = {s.span_id: s for s in run.store.spans("mq.enqueue") if from_ns <= s.end_ns <= to_ns}
        # A slot is written again only after all have read it: what lay in it last is what a reader found.
        in_slot: dict[tuple[object, object], list[Span]] = {}
        for enqueue in enqueues.values():
            in_slot.setdefault((enqueue.get("queue"), enqueue.get("slot")), []).append(enqueue)
        for dequeue in run.store.spans("mq.dequeue"):
            if not from_ns <= dequeue.end_ns <= to_ns or dequeue.is_error:
                continue
            linked = [enqueues[link.span_id] for link in dequeue.links if link.span_id in enqueues]
            written = in_slot.get((dequeue.get("queue"), dequeue.get("slot")), [])
            for enqueue in linked or [s for s in written if s.start_ns <= dequeue.end_ns][-1:]:
                self.readers.setdefault(enqueue.span_id, []).append(dequeue)
                self.sender[dequeue.span_id] = enqueue

    def read(self, enqueue: Span) -> list[Span]:
        """The dequeue spans that got this message, by rank."""
        return sorted(self.readers.get(enqueue.span_id, []), key=lambda s: s.rank or 0)


def dequeue_row(run: Run, dequeue: Span, enqueue: Span | None, depth: int, label: str = "mq.dequeue") -> Row:
    """Waiting until the message was written, then waking up, reading and unpickling it."""
    row = Row(label, run.actor(dequeue.process), depth, span_id=dequeue.span_id)
    start, end = run.at(dequeue.start_ns), run.at(dequeue.end_ns)
    written = start if enqueue is None else max(start, min(run.at(written_ns(enqueue)), end))
    if written > start:
        row.segments.append(Segment(start, written, Kind.WAIT, "nothing to read"))
    row.segments.append(Segment(written, end, Kind.WORK, "wake, read, unpickle"))
    row.note = words.duration(end - written)
    return row


def written_ns(enqueue: Span) -> int:
    """When the message lay in its slot for all to see (absolute); waking sleepers comes after that."""
    parts = (enqueue.get("wait_ns"), enqueue.get("copy_ns"))
    if None in parts:
        return enqueue.end_ns
    return min(enqueue.start_ns + sum(int(part) for part in parts), enqueue.end_ns)


def slot_text(enqueue: Span) -> str:
    """`slot 3, 612 B` or `overflow, 3.0 MiB`, as far as the span says it."""
    parts = []
    if enqueue.get("overflow"):
        parts.append("overflow")
    elif enqueue.get("slot") is not None:
        parts.append(f"slot {enqueue.get('slot')}")
    size = enqueue.get("bytes", enqueue.attributes.get("messaging.message.body.size"))
    if size is not None:
        parts.append(words.size(int(size)))
    return ", ".join(parts)
