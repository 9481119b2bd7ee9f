"""What ends a long wait on a message queue, and what is said while it lasts.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (ReadTimeoutWithWarnings)
Articles: part 2 §2.5.2
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from minivllm import envs
from minivllm.exceptions import MessageQueueClosed
from minivllm.tracing.deadlines import deadline_clock
from minivllm.tracing.ended import write_ended

if TYPE_CHECKING:
    from minivllm.distributed.mq_end import QueueEnd

logger = logging.getLogger("minivllm.distributed.shm_broadcast")
_ON_WAIT_S = 0.045  # a little under the re-check interval, so that each look of a sleeper calls the hook


class Patience:
    """Called before each sleep of a wait: raises when the wait is over, warns when it is long.

    Deviation from vLLM: the warning says which queue, which direction, which slot and which reader; there a writer and a
    reader print the same sentence.
    """

    __slots__ = (
        "cancel",
        "deadline",
        "describe",
        "next_call",
        "next_warning",
        "queue",
        "started",
        "warn_every",
    )

    def __init__(
        self,
        queue: QueueEnd,
        deadline: float | None,
        describe: Callable[[], str],
        cancel: threading.Event | None = None,
        warn: bool = True,
    ) -> None:
        write_ended()
        self.queue = queue
        self.deadline = deadline
        self.describe = describe
        self.cancel = cancel
        self.started = deadline_clock()
        self.next_call = time.monotonic() + _ON_WAIT_S
        self.warn_every = envs.MINIVLLM_MQ_WARNING_INTERVAL_S if warn else float("inf")
        self.next_warning = self.started + self.warn_every

    def __call__(self) -> None:
        queue = self.queue
        if queue.shutting_down:
            raise MessageQueueClosed(queue.reason)
        if self.cancel is not None and self.cancel.is_set():
            raise MessageQueueClosed(f"{queue.title}: the wait was cancelled")
        now = deadline_clock()
        if self.deadline is not None and now >= self.deadline:
            raise TimeoutError(f"{self.describe()}: timed out after {now - self.started:.2f} s")
        if now >= self.next_warning:
            self.next_warning = now + self.warn_every
            logger.warning("%s, for %.2f s so far", self.describe(), now - self.started)
        if queue.on_wait is not None and (moment := time.monotonic()) >= self.next_call:
            self.next_call = moment + _ON_WAIT_S
            queue.on_wait()
            if queue.shutting_down:
                raise MessageQueueClosed(queue.reason)


def process_state(pid: int) -> str:
    """What the kernel says about a process, for messages about one that is late: "sleeping", "stopped", "dead" …"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return "dead"
    return {
        "R": "running",
        "S": "sleeping",
        "D": "in a system call",
        "T": "stopped",
        "t": "traced",
        "Z": "dead",
    }.get(letter, letter)
