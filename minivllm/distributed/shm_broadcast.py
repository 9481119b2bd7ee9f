"""The message queue between the executor and its workers: one writer, n readers, each of whom gets every message.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue, Handle, ShmRingBuffer)
Articles: part 2 §2.5, part 1 §2
"""

from __future__ import annotations

import logging
import pickle
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm import envs, tracing
from minivllm.distributed.mq_overflow import OverflowReader, OverflowWriter
from minivllm.distributed.mq_wait import Patience, process_state
from minivllm.distributed.shm_ring import (
    CONTEXT_BYTES,
    LINE_BYTES,
    OUT_OF_BAND,
    OVERFLOW,
    TRACED,
    ShmRingBuffer,
    SlotState,
)
from minivllm.distributed.wakeup import WEAK_MEMORY_ORDER, memory_fence
from minivllm.exceptions import MessageDecodeError, MessageQueueClosed

if TYPE_CHECKING:
    pass

__all__ = ["Handle", "MessageDecodeError", "MessageQueue", "MessageQueueClosed", "ShmRingBuffer", "SlotState"]

logger = logging.getLogger(__name__)
_loads = pickle.loads
_now_ns = time.perf_counter_ns


@dataclass
class Handle:
    """What another process needs to become a reader; travels pickled.

    Deviation from vLLM: no addresses of sockets for oversized messages and for wake-ups, because there are none.

    Attributes:
        buffer_handle: number of local readers, slot size in bytes, slots, name of the segment; None without local readers.
        remote_subscribe_addr: ZMQ address of the writer for readers on other hosts.
        secret: key of the remote messages' authentication.
    """

    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: tuple[int, int, int, str] | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False
    secret: bytes = field(default=b"", repr=False)
    name: str = ""


class _Pieces(list[Any]):
    """A file for the pickler: what it writes is kept as it comes, large bytes objects uncopied."""

    __slots__ = ()
    write = list.append


class _Timing:
    """What a traced enqueue or dequeue measures on its way; None stands in for it when nobody wants to know."""

    __slots__ = ("copied", "kind", "ready", "size", "slept_ns", "slot", "started")

    def __init__(self) -> None:
        self.started = self.ready = self.copied = _now_ns()
        self.slot = self.size = self.kind = self.slept_ns = 0


class MessageQueue:
    """One end of a broadcast queue: the writer's (made by the constructor) or a reader's (`create_from_handle`).

    A message is pickled once, copied into a slot of the ring once, and unpickled from there by each reader. What is too
    large for a slot lies in an overflow segment, and the slot says where.

    Invariants:
        1. What a reader gets never changes later: everything is copied out of shared memory before the slot is given up.
        2. What was passed to `enqueue` may be changed as soon as it returns.
        3. A message that cannot be pickled leaves the ring untouched; one that cannot be unpickled is consumed.
        4. A wait ends when the message or slot is there, at the deadline, when `shutdown` is called in this process,
           or when `on_wait` raises; in the last three cases nothing has been sent or consumed.
        5. Several threads may enqueue, and several may dequeue; one at a time gets in.
        6. Memory is unmapped by whoever leaves last: `shutdown`, or the call that it interrupted.

    Attributes:
        on_wait: called about every 50 ms while a wait lasts; what it raises ends the wait.
        last_context: trace context of the message that was dequeued last, b"" if it had none.
    """

    __slots__ = (
        "__weakref__",
        "_lap",
        "_lock",
        "_out_of_band",
        "_overflow_reader",
        "_overflow_writer",
        "_pickler",
        "_pieces",
        "_released",
        "buffer",
        "current_idx",
        "handle",
        "last_context",
        "local_reader_rank",
        "n_local_reader",
        "n_remote_reader",
        "on_wait",
        "reason",
        "shutting_down",
        "title",
    )

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int | None = None,
        max_chunks: int | None = None,
        connect_ip: str | None = None,
        name: str = "",
    ) -> None:
        """The writer's end.

        Args:
            n_local_reader: readers on this host, served through shared memory; the other ones through TCP.
            local_reader_ranks: their ranks (default 0, 1, …).
            max_chunk_bytes, max_chunks: slot size and number of slots (default MINIVLLM_MQ_MAX_CHUNK_BYTES, _CHUNKS).
            connect_ip: the only address that remote readers can reach this queue at.
            name: what the queue is called in warnings and traces.

        Raises:
            ConfigError: /dev/shm is too small.
        """
        if local_reader_ranks is None:
            local_reader_ranks = list(range(n_local_reader))
        if len(local_reader_ranks) != n_local_reader or not 0 <= n_local_reader <= n_reader:
            raise ValueError(
                f"{n_reader} readers of which {n_local_reader} are local do not match local ranks {local_reader_ranks}"
            )
        if n_local_reader != n_reader:
            raise NotImplementedError
        ring = ShmRingBuffer(
            n_local_reader,
            max_chunk_bytes or envs.MINIVLLM_MQ_MAX_CHUNK_BYTES,
            max_chunks or envs.MINIVLLM_MQ_MAX_CHUNKS,
            spin_s=envs.MINIVLLM_MQ_SPIN_US / 1e6,
        )
        self._set_up(Handle(local_reader_ranks, ring.handle(), name=name), ring)
        self.n_local_reader = n_local_reader
        self.n_remote_reader = n_reader - n_local_reader
        self._new_pickler()
        self._overflow_writer = OverflowWriter(ring, envs.MINIVLLM_MQ_MAX_OVERFLOW_BYTES)

    def export_handle(self) -> Handle:
        return self.handle

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> MessageQueue:
        """A reader's end; `rank` must be one of the handle's, each may attach once."""
        self = MessageQueue.__new__(MessageQueue)
        assert handle.buffer_handle is not None
        ring = ShmRingBuffer(*handle.buffer_handle, spin_s=envs.MINIVLLM_MQ_SPIN_US / 1e6)
        self._set_up(handle, ring)
        self.n_local_reader = len(handle.local_reader_ranks)
        self.n_remote_reader = 0
        self.local_reader_rank = handle.local_reader_ranks.index(rank)
        self._overflow_reader = OverflowReader(ring)
        ring.attach(self.local_reader_rank)
        return self

    def _set_up(self, handle: Handle, ring: ShmRingBuffer) -> None:
        self.handle = handle
        self.buffer = ring
        self.title = f"message queue {handle.name!r}" if handle.name else f"message queue {ring.segment.name}"
        self.current_idx = 0
        self.local_reader_rank = -1
        self.on_wait: Callable[[], None] | None = None
        self.last_context = b""
        self.shutting_down = False
        self.reason = ""
        self._lap = 0
        self._released = False
        self._lock = threading.Lock()
        self._overflow_writer: OverflowWriter | None = None
        self._overflow_reader: OverflowReader | None = None

    def _new_pickler(self) -> None:
        self._pieces = _Pieces()
        self._out_of_band: list[pickle.PickleBuffer] = []
        self._pickler = pickle.Pickler(self._pieces, 5, buffer_callback=self._out_of_band.append)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Collective: the writer waits until every reader has attached, the readers wait until it has seen them all.

        Raises:
            TimeoutError: names the readers that are missing.
            MessageQueueClosed: shutdown() was called meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._enter(deadline)
        try:
            ring = self.buffer
            if self.local_reader_rank < 0:
                ring.writer_wake.wait(
                    ring.all_attached,
                    deadline,
                    Patience(self, deadline, self._missing_readers),
                    ring.sleeping_offset + ring.n_reader,
                )
                ring.set_ready()
            else:
                ring.readers_wake.wait(
                    lambda: ring.ready,
                    deadline,
                    Patience(
                        self, deadline, lambda: f"{self.title}: waiting until the writer has seen all readers"
                    ),
                    ring.sleeping_offset + self.local_reader_rank,
                )
        finally:
            self._leave()

    # Sending

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send `obj` to all readers.

        Args:
            timeout: seconds to wait for a free slot; at most 0: only if there is one now. None: for ever.

        Raises:
            TimeoutError: names the readers that have not read.
            MessageQueueClosed: shutdown() was called; carries the reason given there.
        """
        if tracing.active:
            self._enqueue_traced(obj, timeout)
        else:
            self._put(obj, timeout, None, b"")

    def _enqueue_traced(self, obj: Any, timeout: float | None) -> None:
        with tracing.span("mq.enqueue", kind="producer") as span:
            timing = _Timing()
            self._put(obj, timeout, timing, span.context or tracing.pack_context())
            span.set(
                queue=self.handle.name,
                slot=timing.slot,
                bytes=timing.size,
                overflow=bool(timing.kind & OVERFLOW),
                wait_ns=timing.ready - timing.started,
                copy_ns=timing.copied - timing.ready,
                notify_ns=_now_ns() - timing.copied,
            )

    def _put(self, obj: Any, timeout: float | None, timing: _Timing | None, context: bytes) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._enter(deadline)
        try:
            self._pickler.dump(obj)
            self._pickler.clear_memo()
            pieces = self._pieces
            ring = self.buffer
            mm = ring.mm
            index = self.current_idx
            written, first, end, word, view, following = ring.slots[index]
            if mm[written] and b"\x00" in mm[first:end]:
                self._wait_until_free(index, deadline)
            if timing is not None:
                timing.ready = _now_ns()
            # Transition a of the ring: nobody but this process looks at the slot from here on.
            mm[written] = 0
            if len(pieces) == 1 and not self._out_of_band and len(pieces[0]) <= ring.max_chunk_bytes:
                size = len(pieces[0])
                view[:size] = pieces[0]
                message = size << 8
            else:
                message = self._place(view, deadline)
            if context:
                mm[word * 8 + 8 : word * 8 + 8 + CONTEXT_BYTES] = context
                message |= TRACED
            ring.words[word] = message
            pieces.clear()
            mm[first:end] = bytes(end - first)
            # Transition b: the message before the flag that announces it.
            if WEAK_MEMORY_ORDER:
                memory_fence()
            # No call between these lines: a signal handler that raises must not come in between.
            mm[written] = 1
            self.current_idx = following
            if timing is not None:
                timing.slot, timing.kind, timing.size, timing.copied = (
                    index,
                    message & 255,
                    message >> 8,
                    _now_ns(),
                )
            memory_fence()
            if mm[ring.readers_wake.flag]:
                ring.readers_wake.notify()
            if not following:
                self._end_of_lap()
        except BaseException:
            # What the pickler has half written or remembers must not get into the next message.
            self._new_pickler()
            raise
        finally:
            self._leave()

    def _place(self, view: memoryview, deadline: float | None) -> int:
        """Copy a message of several pieces to the slot, or to an overflow segment that the slot then names."""
        pieces: list[Any] = list(self._pieces)
        message = 0
        if self._out_of_band:
            # Table of lengths: the pickle, then each buffer.
            buffers = [buffer.raw() for buffer in self._out_of_band]
            self._out_of_band.clear()
            lengths = [sum(map(len, pieces)), *map(len, buffers)]
            pieces = [struct.pack(f"<{1 + len(lengths)}Q", len(lengths), *lengths), *pieces, *buffers]
            message = OUT_OF_BAND
        size = sum(map(len, pieces))
        target = view
        offset = 0
        if size > len(view):
            assert self._overflow_writer is not None
            block = self._overflow_writer.take(
                size,
                self._lap * self.buffer.max_chunks + self.current_idx,
                lambda slot: self._wait_until_free(slot, deadline),
            )
            record = block.record()
            view[: len(record)] = record
            target, offset = block.view, LINE_BYTES
            message |= OVERFLOW
        for piece in pieces:
            end = offset + len(piece)
            target[offset:end] = piece
            offset = end
        return message | size << 8

    def _end_of_lap(self) -> None:
        self._lap += 1
        assert self._overflow_writer is not None
        self._overflow_writer.on_lap(self._lap * self.buffer.max_chunks)

    # Receiving

    def dequeue(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> Any:
        """The next message.

        Args:
            timeout: seconds to wait for it; at most 0: only if it is there now. None: for ever.
            cancel: ends the wait when set (looked at about every 50 ms; `shutdown` is heard at once).
            indefinite: waiting for work that need not come, which is nothing to warn about.

        Raises:
            TimeoutError: nothing came. Nothing was consumed.
            MessageQueueClosed: shutdown() was called; carries the reason given there.
            MessageDecodeError: the message could not be unpickled. It is consumed.
        """
        if tracing.active:
            return self._dequeue_traced(timeout, cancel, indefinite)
        return self._get(timeout, cancel, indefinite, None)

    def _dequeue_traced(self, timeout: float | None, cancel: threading.Event | None, indefinite: bool) -> Any:
        span = tracing.start_span("mq.dequeue", kind="client")
        timing = _Timing()
        try:
            obj = self._get(timeout, cancel, indefinite, timing)
            waited = timing.ready - timing.started
            span.set(
                queue=self.handle.name,
                slot=timing.slot,
                bytes=timing.size,
                overflow=bool(timing.kind & OVERFLOW),
                spin_ns=waited - timing.slept_ns,
                sleep_ns=timing.slept_ns,
                unpickle_ns=timing.copied - timing.ready,
            )
            return obj
        except BaseException as error:
            span.record_exception(error)
            raise
        finally:
            span.end()

    def _get(
        self,
        timeout: float | None,
        cancel: threading.Event | None,
        indefinite: bool,
        timing: _Timing | None,
    ) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._enter(deadline)
        try:
            ring = self.buffer
            mm = ring.mm
            index = self.current_idx
            written, first, _, word, view, following = ring.slots[index]
            mine = first + self.local_reader_rank
            if mm[mine] or not mm[written]:
                slept_ns = self._wait_until_written(index, deadline, cancel, indefinite)
                if timing is not None:
                    timing.slept_ns = slept_ns
            if timing is not None:
                timing.ready = _now_ns()
            # Transition c: the flag before the message that it announces.
            if WEAK_MEMORY_ORDER:
                memory_fence()
            message = ring.words[word]
            try:
                if message & 255:
                    obj = self._take(message, word, view, index)
                else:
                    self.last_context = b""
                    obj = _loads(view)
            except Exception as error:
                if self.shutting_down:
                    raise MessageQueueClosed(self.reason) from error
                raise MessageDecodeError(f"{self.title}: {type(error).__name__}: {error}") from error
            finally:
                if WEAK_MEMORY_ORDER:
                    memory_fence()
                # No call between these lines: a signal handler that raises must not come in between.
                mm[mine] = 1
                self.current_idx = following
                memory_fence()
                if mm[ring.writer_wake.flag]:
                    ring.writer_wake.notify()
            if timing is not None:
                timing.slot, timing.kind, timing.size, timing.copied = (
                    index,
                    message & 255,
                    message >> 8,
                    _now_ns(),
                )
            return obj
        finally:
            self._leave()

    def _take(self, message: int, word: int, view: memoryview, index: int) -> Any:
        """A message with a trace context, with out-of-band buffers, or in an overflow segment."""
        self.last_context = b""
        if message & TRACED:
            self.last_context = self.buffer.mm[word * 8 + 8 : word * 8 + 8 + CONTEXT_BYTES]
        if not message & OVERFLOW:
            return _decode(message & OUT_OF_BAND, view[: message >> 8])
        reader = self._overflow_reader
        assert reader is not None
        number, segment, one_off = reader.open(view)
        obj = _decode(message & OUT_OF_BAND, segment[LINE_BYTES : LINE_BYTES + (message >> 8)])
        reader.done(number, one_off, index)
        return obj

    # Waiting

    def _wait_until_free(self, index: int, deadline: float | None) -> None:
        ring = self.buffer
        ring.writer_wake.wait(
            lambda: ring.is_free(index),
            deadline,
            Patience(self, deadline, lambda: self._late_readers(index)),
            ring.sleeping_offset + ring.n_reader,
        )

    def _wait_until_written(
        self, index: int, deadline: float | None, cancel: threading.Event | None, indefinite: bool
    ) -> int:
        """Returns the time slept, in nanoseconds."""
        ring = self.buffer
        mm = ring.mm
        written, first = ring.slots[index][:2]
        mine = first + self.local_reader_rank
        ring.readers_wake.wait(
            lambda: not mm[mine] and mm[written] == 1,
            deadline,
            Patience(self, deadline, lambda: self._late_writer(index), cancel, warn=not indefinite),
            ring.sleeping_offset + self.local_reader_rank,
            idle=indefinite and cancel is None,
        )
        return ring.readers_wake.slept_ns

    def _rank(self, reader: int) -> str:
        pid = self.buffer.reader_pid(reader)
        return f"rank {self.handle.local_reader_ranks[reader]} (pid {pid}, {process_state(pid)})"

    def _late_readers(self, index: int) -> str:
        late = ", ".join(map(self._rank, self.buffer.late_readers(index)))
        return f"{self.title}: the writer waits for reader {late} to read slot {index}"

    def _late_writer(self, index: int) -> str:
        rank = self.handle.local_reader_ranks[self.local_reader_rank]
        pid = self.buffer.writer_pid()
        return f"{self.title}: reader rank {rank} waits for the writer (pid {pid}, {process_state(pid)}) to write slot {index}"

    def _missing_readers(self) -> str:
        ring = self.buffer
        ranks = [rank for i, rank in enumerate(self.handle.local_reader_ranks) if not ring.attached(i)]
        return f"{self.title}: waiting for reader rank {', '.join(map(str, ranks))} to attach"

    # The end

    def _enter(self, deadline: float | None) -> None:
        if not self._lock.acquire(False):
            patience = Patience(
                self, deadline, lambda: f"{self.title}: another thread of this process is inside"
            )
            while not self._lock.acquire(timeout=0.05):
                patience()
        if self.shutting_down:
            self._leave()
            raise MessageQueueClosed(self.reason)

    def _leave(self) -> None:
        self._lock.release()
        if self.shutting_down:
            self._give_back()

    def shutdown(self, reason: str | None = None) -> None:
        """Close this end: blocked calls in this process raise MessageQueueClosed(reason), memory is given back.

        May be called from any thread or signal handler, at any time, again and again; only the first reason counts.
        The other ends are not told.
        """
        if not self.shutting_down:
            self.reason = reason or f"{self.title} was shut down"
            self.shutting_down = True
            if self._lock.locked() and not self._released:
                try:
                    self.buffer.readers_wake.notify()
                    self.buffer.writer_wake.notify()
                except ValueError:
                    pass  # the last one inside has left, and closed the memory, in this moment
        self._give_back()

    def _give_back(self) -> None:
        """Unmap, unless somebody is inside: then they do it when they leave (invariant 6)."""
        if self._lock.acquire(False):
            try:
                if not self._released:
                    self._released = True
                    if self._overflow_writer is not None:
                        self._overflow_writer.close()
                    if self._overflow_reader is not None:
                        self._overflow_reader.close()
                    self.buffer.close()
            finally:
                self._lock.release()

    def snapshot(self) -> list[SlotState]:
        """The flags of every slot, for whoever wants to look on."""
        return self.buffer.snapshot()


def _decode(out_of_band: int, view: memoryview) -> Any:
    with view:
        if not out_of_band:
            return _loads(view)
        (count,) = struct.unpack_from("<Q", view)
        lengths = struct.unpack_from(f"<{count}Q", view, 8)
        offset = 8 + 8 * count
        parts = []
        for length in lengths:
            parts.append(bytearray(view[offset : offset + length]))
            offset += length
        return _loads(parts[0], buffers=parts[1:])
