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
    with tracing.span("mq.enqueue") as span:
        timing = Timing(span.context or tracing.pack_context())
        queue.enqueue(obj, timeout, timing)
        span.set(
            queue=queue.handle.name,
            slot=timing.slot,
            bytes=timing.message >> 8,
            overflow=bool(timing.message & OVERFLOW),
            wait_ns=timing.ready - timing.started,
            copy_ns=timing.copied - timing.ready,
            notify_ns=now_ns() - timing.copied,
        )


def dequeue(
    queue: MessageQueue, timeout: float | None, cancel: threading.Event | None, indefinite: bool
) -> Any:
    with tracing.span("mq.dequeue") as span:
        timing = Timing()
        obj = queue.dequeue(timeout, cancel, indefinite, timing)
        span.link(queue.last_context)
        span.set(
            queue=queue.handle.name,
            slot=timing.slot,
            bytes=timing.message >> 8,
            overflow=bool(timing.message & OVERFLOW),
            spin_ns=timing.ready - timing.started - timing.slept_ns,
            sleep_ns=timing.slept_ns,
            unpickle_ns=timing.copied - timing.ready,
        )
        return obj
