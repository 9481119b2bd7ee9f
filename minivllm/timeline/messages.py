"""Who wrote which message and who read it: dequeue spans by the enqueue they link to.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.2
"""

from __future__ import annotations

from minivllm.timeline import text as words
from minivllm.timeline.run import Run, attribute, rank_of
from minivllm.timeline.view import Kind, Row, Segment
from minivllm.trace_store import Span


class Messages:
    """The messages of a run. Built once per view: it looks at every dequeue."""

    def __init__(self, run: Run) -> None:
        self.readers: dict[str, list[Span]] = {}
        self.sender: dict[str, Span] = {}
        enqueues = {s.span_id: s for s in run.store.spans(name="mq.enqueue")}
        for dequeue in run.store.spans(name="mq.dequeue"):
            for link in dequeue.links:
                enqueue = enqueues.get(link.span_id)
                if enqueue is not None:
                    self.readers.setdefault(enqueue.span_id, []).append(dequeue)
                    self.sender[dequeue.span_id] = enqueue

    def read(self, enqueue: Span) -> list[Span]:
        """The dequeue spans that got this message, by rank."""
        return sorted(self.readers.get(enqueue.span_id, []), key=lambda s: rank_of(s) or 0)


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
    if attribute(enqueue, "overflow"):
        parts.append("overflow")
    elif attribute(enqueue, "slot") is not None:
        parts.append(f"slot {attribute(enqueue, 'slot')}")
    size = attribute(enqueue, "bytes", enqueue.attributes.get("messaging.message.body.size"))
    if size is not None:
        parts.append(words.size(int(size)))
    return ", ".join(parts)
