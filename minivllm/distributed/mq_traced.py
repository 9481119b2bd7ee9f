"""Enqueue and dequeue as spans: where a message waited, how long it was copied, and which enqueue a dequeue belongs to.

vLLM 0.25.1: no counterpart (messages carry no trace context)
Articles: part 2 §2.5.2
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from minivllm import tracing
from minivllm.distributed.mq_codec import OVERFLOW
from minivllm.exceptions import MessageQueueClosed

if TYPE_CHECKING:
    from minivllm.distributed.shm_broadcast import MessageQueue

now_ns = time.perf_counter_ns


class Timing:
    """What an enqueue or dequeue measures on its way; None stands in for it when nobody wants to know.

    Attributes:
        context: 25 bytes that travel with the message.
        ready: when the slot was free, or the message was there.
        copied: when the message was in the slot, or had been unpickled.
    """

    __slots__ = ("context", "copied", "message", "ready", "slept_ns", "slot", "started")

    def __init__(self, context: bytes = b"") -> None:
        self.context = context
        self.started = self.ready = self.copied = now_ns()
        self.slot = -1
        self.message = self.slept_ns = 0


def enqueue(queue: MessageQueue, obj: Any, timeout: float | None) -> None:
    """MessageQueue.enqueue as a span; the work itself is in shm_broadcast.py."""
    with tracing.span("mq.enqueue") as span:
        timing = Timing(span.context or tracing.pack_context())
        try:
            queue.enqueue(obj, timeout, timing)
        except MessageQueueClosed as error:
            ended = _ended(span, queue, error)
        else:
            span.attributes = {
                "queue": queue.handle.name,
                "slot": timing.slot,
                "bytes": timing.message >> 8,
                "overflow": bool(timing.message & OVERFLOW),
                "wait_ns": timing.ready - timing.started,
                "copy_ns": timing.copied - timing.ready,
                "notify_ns": now_ns() - timing.copied,
            }
            return
    try:
        raise ended
    finally:
        # Its traceback refers to this frame: without this the two keep each other alive until the next collection.
        del ended


def dequeue(
    queue: MessageQueue, timeout: float | None, cancel: threading.Event | None, indefinite: bool
) -> Any:
    """MessageQueue.dequeue as a span; the work itself is in shm_broadcast.py."""
    with tracing.span("mq.dequeue") as span:
        timing = Timing()
        try:
            obj = queue.dequeue(timeout, cancel, indefinite, timing)
        except (MessageQueueClosed, TimeoutError) as error:
            ended = _ended(span, queue, error)
        else:
            span.link(queue.last_context)
            span.attributes = {
                "queue": queue.handle.name,
                "slot": timing.slot,
                "bytes": timing.message >> 8,
                "overflow": bool(timing.message & OVERFLOW),
                "spin_ns": timing.ready - timing.started - timing.slept_ns,
                "sleep_ns": timing.slept_ns,
                "unpickle_ns": timing.copied - timing.ready,
            }
            return obj
    try:
        raise ended
    finally:
        del ended


def _ended(span: tracing.Span, queue: MessageQueue, error: Exception) -> Exception:
    """A wait that ended without a message, which is how a reader polls and how every queue ends.

    Whether that is a failure is for the caller to say, in a span of its own: raised within this one it would be an
    error at the end of each healthy run.
    """
    span.set(queue=queue.handle.name, ended_by=type(error).__name__)
    return error
