"""A model of the queue against the queue: whatever writer and readers do in whatever order, it keeps its promises.

All ends are in this process and every call that would have to wait gives up at once, so an example is a list of calls
and a failure is shown as the shortest such list.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mq_helpers import FailsToLoad, equal

from minivllm.distributed import mq_stream
from minivllm.distributed.shm_broadcast import MessageDecodeError, MessageQueue, MessageQueueClosed

CHUNK = 512
SIZES = st.one_of(
    st.integers(0, 40), st.integers(CHUNK - 60, CHUNK + 20), st.sampled_from([5000, 70_000, 200_000])
)


def payloads(number: int, size: int, kind: str) -> Any:
    byte = number % 251
    match kind:
        case "bytes":
            return bytes([byte]) * size
        case "tuple":
            return (number, "x" * size, {"k": [byte] * 3})
        case "array":
            return np.full(size, byte, dtype=np.uint8)
        case "array in the slot":
            return np.full(100 + size % 100, byte, dtype=np.uint8)
        case "mixed":
            return [bytes([byte]) * size, np.full(size // 2, number, dtype=np.int32), bytearray(size)]
        case "fails to load":
            return FailsToLoad(size)
    raise AssertionError(kind)


class Queue(RuleBasedStateMachine):
    """The model: one deque per reader of what it has not read; the ring has room while nobody has `chunks` waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    @initialize(
        n_reader=st.integers(1, 9),
        chunks=st.integers(1, 4),
        late=st.integers(0, 2),
        large=st.sampled_from([100, mq_stream.MIN_BYTES]),
    )
    def make(self, n_reader: int, chunks: int, late: int, large: int) -> None:
        self.chunks = chunks
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(mq_stream, "MIN_BYTES", large)  # 100: large ones that fit into a slot, too
        self.writer = MessageQueue(n_reader, n_reader, max_chunk_bytes=CHUNK, max_chunks=chunks)
        self.waiting: list[deque[Any]] = [deque() for _ in range(n_reader)]
        self.readers: list[MessageQueue | None] = [None] * n_reader
        self.kept: list[tuple[Any, Any]] = []
        self.closed: set[int] = set()
        self.writer_closed = False
        for rank in range(n_reader - min(late, n_reader)):
            self.attach(rank)

    def attach(self, rank: int) -> None:
        self.readers[rank] = MessageQueue.create_from_handle(self.writer.export_handle(), rank)

    @rule()
    def attach_next(self) -> None:
        if None in self.readers and not self.writer_closed:
            self.attach(self.readers.index(None))

    @precondition(lambda self: not self.writer_closed)
    @rule(
        size=SIZES,
        kind=st.sampled_from(["bytes", "tuple", "array", "array in the slot", "mixed", "fails to load"]),
        timeout=st.sampled_from([0, -1, 0.001]),
    )
    def send(self, size: int, kind: str, timeout: float) -> None:
        self.number += 1
        obj = payloads(self.number, size, kind)
        full = any(len(waiting) >= self.chunks for waiting in self.waiting)
        try:
            self.writer.enqueue(obj, timeout=timeout)
        except TimeoutError:
            assert full, "the ring has room"
            return
        assert not full, "the ring is full"
        for waiting in self.waiting:
            waiting.append((kind, payloads(self.number, size, kind)))
        if kind.startswith("array"):
            obj[:] = 255  # the sender may do that

    @precondition(lambda self: not self.writer_closed)
    @rule()
    def fail_to_send(self) -> None:
        with pytest.raises(Exception, match="pickle"):
            self.writer.enqueue([b"x" * 100_000, np.zeros(10), lambda: None], timeout=0)

    @rule(rank=st.integers(0, 8), timeout=st.sampled_from([0, -1, 0.001]))
    def receive(self, rank: int, timeout: float) -> None:
        if rank >= len(self.readers):
            return
        reader = self.readers[rank]
        if reader is None:
            return
        waiting = self.waiting[rank]
        if rank in self.closed:
            with pytest.raises(MessageQueueClosed, match="enough"):
                reader.dequeue(timeout=timeout)
            return
        try:
            got = reader.dequeue(timeout=timeout)
        except TimeoutError:
            assert not waiting, "there is a message"
        except MessageQueueClosed as error:
            if not (waiting and self.writer_closed and "closed before" in str(error)):
                raise
        except MessageDecodeError:
            kind, _ = waiting.popleft()
            if kind != "fails to load":
                raise
        else:
            kind, expected = waiting.popleft()
            assert equal(got, expected)
            self.kept.append((got, expected))

    @rule(rank=st.integers(0, 40))
    def close_reader(self, rank: int) -> None:
        """Rarely: it fills the ring for good."""
        if rank < len(self.readers) and self.readers[rank] is not None:
            self.readers[rank].shutdown("enough")  # type: ignore[union-attr]
            self.closed.add(rank)

    @rule(dice=st.integers(0, 20))
    def close_writer(self, dice: int) -> None:
        if dice == 0:
            self.writer.shutdown("enough")
            self.writer_closed = True

    @invariant()
    def flags_are_what_was_read(self) -> None:
        if not hasattr(self, "writer") or self.writer_closed:
            return
        unread = [sum(not r for r in slot.read_by) for slot in self.writer.snapshot() if slot.written]
        assert sum(unread) == sum(map(len, self.waiting))

    @invariant()
    def what_was_received_stays(self) -> None:
        if hasattr(self, "kept"):
            assert all(equal(got, expected) for got, expected in self.kept[-30:])

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()
        if hasattr(self, "writer"):
            for end in (self.writer, *self.readers):
                if end is not None:
                    end.shutdown()


Queue.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestQueue = Queue.TestCase
