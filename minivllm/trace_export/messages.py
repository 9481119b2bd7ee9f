"""Which spans another process's spans come from: messages from enqueue to dequeue, and parents elsewhere.

vLLM 0.25.1: none
Articles: part 2 §2.5.2
"""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.trace_store import Span, TraceStore


def message_arrows(store: TraceStore) -> Iterator[tuple[Span, Span]]:
    """(enqueue, dequeue) for each reader of each message."""
    enqueues = {span.span_id: span for span in store.spans("mq.enqueue")}
    for dequeue in store.spans("mq.dequeue"):
        for link in dequeue.links:
            # The context in the message is that of the enqueue.
            if link.span_id in enqueues:
                yield enqueues[link.span_id], dequeue


def parent_arrows(store: TraceStore) -> Iterator[tuple[Span, Span]]:
    """(parent, child) where the two are in different processes: a start of a process, a call and its execution."""
    for span in store.spans():
        parent = store.parent(span)
        if parent is not None and parent.process is not span.process:
            yield parent, span
