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
        links = {
            dequeue.span_id: (dequeue, [link.span_id for link in dequeue.links])
            for dequeue in run.store.spans("mq.dequeue")
            if from_ns <= dequeue.end_ns <= to_ns
        }
        wanted = {sender for _, senders in links.values() for sender in senders}
        enqueues = {s.span_id: s for s in run.store.spans("mq.enqueue") if s.span_id in wanted}
        for dequeue, senders in links.values():
            for enqueue in (enqueues[sender] for sender in senders if sender in enqueues):
                self.readers.setdefault(enqueue.span_id, []).append(dequeue)
                self.sender[dequeue.span_id] = enqueue

    def read(self, enqueue: Span) -> list[Span]:
        """The dequeue spans that got this message, by rank."""
        return sorted(self.readers.get(enqueue.span_id, []), key=lambda s: s.rank or 0)


def dequeue_row(run: Run, dequeue: Span, enqueue: Span | None, depth: int, label: str = "mq.dequeue") -> Row:
    """Waiting until the message was written, then waking up, reading and unpickling it."""
    row = Row(label, run.actor(dequeue.process), depth, span_id=dequeue.span_id)
    start, end = run.at(dequeue.start_ns), run.at(dequeue.end_ns)
    written = start if enqueue is None else max(start, min(run.at(enqueue.end_ns), end))
    if written > start:
        row.segments.append(Segment(start, written, Kind.WAIT, "nothing to read"))
    row.segments.append(Segment(written, end, Kind.WORK, "wake, read, unpickle"))
    row.note = words.duration(end - written)
    return row


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
