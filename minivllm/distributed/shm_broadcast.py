"""The message queue between the executor and its workers: one writer, n readers, each of whom gets every message.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue, Handle, ShmRingBuffer)
Articles: part 2 §2.5, part 1 §2
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm import envs, tracing
from minivllm.distributed.mq_codec import OVERFLOW, RAW, TRACED, MessagePickler, decode, loads
from minivllm.distributed.mq_overflow import OverflowReader, OverflowWriter
from minivllm.distributed.mq_wait import Patience, process_state
from minivllm.distributed.shm_ring import (
    CONTEXT_BYTES,
    LINE_BYTES,
    READERS_ASLEEP,
    WRITER_ASLEEP,
    ShmRingBuffer,
    SlotState,
)
from minivllm.distributed.wakeup import WEAK_MEMORY_ORDER, memory_fence
from minivllm.exceptions import MessageDecodeError, MessageQueueClosed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from minivllm.distributed.mq_remote import RemoteReader, RemoteWriter

__all__ = ["Handle", "MessageDecodeError", "MessageQueue", "MessageQueueClosed", "ShmRingBuffer", "SlotState"]

_now_ns = time.perf_counter_ns


@dataclass
class Handle:
    """What another process needs to become a reader; travels pickled.

    Deviation from vLLM: no addresses of sockets for oversized messages and for wake-ups, because there are none.

    Attributes:
        buffer_handle: number of local readers, slot size in bytes, slots, name of the segment; None without local readers.
        remote_subscribe_addr: ZMQ address of the writer for readers on other hosts; None without such readers.
        secret: key of the remote messages' authentication.
        name: what the queue is called in warnings and traces.
    """

    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: tuple[int, int, int, str] | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False
    secret: bytes = field(default=b"", repr=False)
    name: str = ""


class _Timing:
    """What a traced enqueue or dequeue measures on its way; None stands in for it when nobody wants to know."""

    __slots__ = ("context", "copied", "message", "ready", "slept_ns", "slot", "started")

    def __init__(self, context: bytes = b"") -> None:
        self.context = context
        self.started = self.ready = self.copied = _now_ns()
        self.slot = self.message = self.slept_ns = 0


class MessageQueue:
    """One end of a broadcast queue: the writer's (made by the constructor) or a reader's (`create_from_handle`).

    A message is pickled once, copied into a slot of the ring once, and unpickled from there by each reader. What is too
    large for a slot lies in an overflow segment, and the slot says where. Readers on other hosts get it by TCP.

    Invariants:
        1. What a reader gets never changes later: everything is copied out of shared memory before the slot is given up.
        2. What was passed to `enqueue` may be changed as soon as it returns.
        3. A message that cannot be pickled leaves the ring untouched; one that cannot be unpickled is consumed.
        4. A wait ends when the message or slot is there, at the deadline, when `shutdown` is called in this process,
           or when `on_wait` raises; in the last three cases nothing has been sent or consumed.
        5. Several threads may enqueue, and several may dequeue; one at a time gets in.
        6. Memory is unmapped by whoever leaves last: `shutdown`, or the call that it interrupted.
        7. While nobody sleeps, no message costs a system call.

    Attributes:
        on_wait: called about every 50 ms while a wait lasts; what it raises ends the wait.
        last_context: trace context of the message that was dequeued last, b"" if it had none.
        current_idx: the slot that is written or read next.
        local_reader_rank: this reader's index among the local readers; -1 for the writer and for remote readers.
    """

    __slots__ = (
        "__weakref__",
        "_acquire",
        "_buffers",
        "_clear_memo",
        "_dump",
        "_lap",
        "_lock",
        "_overflow_reader",
        "_overflow_writer",
        "_pickler",
        "_pieces",
        "_release",
        "_released",
        "_remote_reader",
        "_remote_writer",
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

    # Not Optional on purpose: the hot path is for queues that have a ring.
    buffer: ShmRingBuffer
    on_wait: Callable[[], None] | None
    _dump: Callable[[Any], None]
    _overflow_writer: OverflowWriter | None
    _overflow_reader: OverflowReader | None
    _remote_writer: RemoteWriter | None
    _remote_reader: RemoteReader | None

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
            connect_ip: the only address at which remote readers can reach this queue (default: this host's).
            name: what the queue is called in warnings and traces.

        Raises:
            ConfigError: /dev/shm is too small.
        """
        if local_reader_ranks is None:
            local_reader_ranks = list(range(n_local_reader))
        if len(local_reader_ranks) != n_local_reader or not 0 <= n_local_reader <= n_reader or n_reader < 1:
            raise ValueError(
                f"{n_reader} readers of which {n_local_reader} are local do not match local ranks {local_reader_ranks}"
            )
        max_chunk_bytes = max_chunk_bytes or envs.MINIVLLM_MQ_MAX_CHUNK_BYTES
        max_chunks = max_chunks or envs.MINIVLLM_MQ_MAX_CHUNKS
        self._set_up(Handle(local_reader_ranks, name=name))
        self.n_local_reader = n_local_reader
        self.n_remote_reader = n_reader - n_local_reader
        self._use_pickler(MessagePickler())
        if self.n_remote_reader:
            from minivllm.distributed.mq_remote import RemoteWriter

            remote = self._remote_writer = RemoteWriter(connect_ip, self.n_remote_reader, max_chunks)
            self.handle.secret = remote.secret
            self.handle.remote_subscribe_addr = remote.address
            self.handle.remote_addr_ipv6 = remote.ipv6
        if n_local_reader:
            try:
                ring = ShmRingBuffer(
                    n_local_reader, max_chunk_bytes, max_chunks, spin_s=envs.MINIVLLM_MQ_SPIN_US / 1e6
                )
            except BaseException:
                self.shutdown()
                raise
            self.buffer = ring
            self.handle.buffer_handle = ring.handle()
            self._overflow_writer = OverflowWriter(ring, envs.MINIVLLM_MQ_MAX_OVERFLOW_BYTES)
        self._set_title()

    def export_handle(self) -> Handle:
        return self.handle

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> MessageQueue:
        """A reader's end. `rank` is one of the handle's local ranks, or that of a remote reader; each attaches once.

        Raises:
            FileNotFoundError: the writer is gone, or all its readers have attached already.
        """
        self = MessageQueue.__new__(MessageQueue)
        self._set_up(handle)
        self.n_local_reader = len(handle.local_reader_ranks)
        self.n_remote_reader = 0
        if rank in handle.local_reader_ranks and handle.buffer_handle is not None:
            self.buffer = ShmRingBuffer(*handle.buffer_handle, spin_s=envs.MINIVLLM_MQ_SPIN_US / 1e6)
            self.local_reader_rank = handle.local_reader_ranks.index(rank)
            self._overflow_reader = OverflowReader(self.buffer)
            self.buffer.attach(self.local_reader_rank)
        elif handle.remote_subscribe_addr is not None:
            from minivllm.distributed.mq_remote import RemoteReader

            self._remote_reader = RemoteReader(
                handle.remote_subscribe_addr, handle.remote_addr_ipv6, handle.secret, rank
            )
        else:
            raise ValueError(
                f"rank {rank} is not a reader of this queue, whose ranks are {handle.local_reader_ranks}"
            )
        self._set_title()
        return self

    @property
    def is_writer(self) -> bool:
        return self._remote_reader is None and self.local_reader_rank < 0

    def _set_up(self, handle: Handle) -> None:
        self.handle = handle
        self.buffer = None  # type: ignore[assignment]
        self.current_idx = 0
        self.local_reader_rank = -1
        self.on_wait = None
        self.last_context = b""
        self.shutting_down = False
        self.reason = ""
        self.title = "message queue"
        self._lap = 0
        self._released = False
        self._lock = threading.Lock()
        self._acquire = self._lock.acquire
        self._release = self._lock.release
        self._overflow_writer = None
        self._overflow_reader = None
        self._remote_writer = None
        self._remote_reader = None
        self._dump = _only_the_writer_can_enqueue

    def _set_title(self) -> None:
        handle = self.handle
        what = (
            repr(handle.name)
            if handle.name
            else (handle.buffer_handle or ("", "", "", handle.remote_subscribe_addr))[3]
        )
        self.title = f"message queue {what}"

    def _use_pickler(self, pickler: MessagePickler) -> None:
        self._pickler = pickler
        self._dump, self._clear_memo = pickler.dump, pickler.clear_memo
        self._pieces, self._buffers = pickler.pieces, pickler.buffers

    @staticmethod
    def create_from_process_group(
        pg: ProcessGroup,
        max_chunk_bytes: int | None = None,
        max_chunks: int | None = None,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
        connect_ip: str | None = None,
        name: str = "",
    ) -> MessageQueue:
        """One end for each rank of `pg`, collectively: `writer_rank` writes, all others read.

        Args:
            writer_rank: rank within the group.
            external_writer_handle: given on `writer_rank`: the writer is outside the group, and this is its handle;
                then `writer_rank` reads, too.
            blocking: return when all are ready.
            connect_ip: see the constructor; matters when ranks are on several hosts.
        """
        from minivllm.distributed.mq_groups import create_from_process_group

        return create_from_process_group(
            pg, max_chunk_bytes, max_chunks, writer_rank, external_writer_handle, blocking, connect_ip, name
        )

    @staticmethod
    def create_from_process_group_single_reader(
        pg: ProcessGroup,
        max_chunk_bytes: int | None = None,
        max_chunks: int | None = None,
        reader_rank: int = 0,
        blocking: bool = False,
        connect_ip: str | None = None,
        name: str = "",
    ) -> tuple[MessageQueue, list[Handle]]:
        """A queue from each rank of `pg` to `reader_rank`, collectively.

        Returns the calling rank's writing end, and on `reader_rank` the handles of all, to be opened with rank 0.
        """
        from minivllm.distributed.mq_groups import create_from_process_group_single_reader

        return create_from_process_group_single_reader(
            pg, max_chunk_bytes, max_chunks, reader_rank, blocking, connect_ip, name
        )

    def broadcast_object(self, obj: Any = None) -> Any:
        """The writer sends `obj`, readers get it; the same call on every rank."""
        if self.is_writer:
            self.enqueue(obj)
            return obj
        return self.dequeue()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Collective: the writer waits until every reader has attached, the readers wait until it has seen them all.

        Raises:
            TimeoutError: names the readers that are missing.
            MessageQueueClosed: shutdown() was called meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._acquire(False):
            self._acquire_late(deadline)
        try:
            if self.shutting_down:
                raise MessageQueueClosed(self.reason)
            ring = self.buffer
            if self._remote_reader is not None:
                self._remote_reader.wait_until_ready(deadline, self._patience(deadline, self._late_writer))
            elif self.local_reader_rank >= 0:
                ring.readers_wake.wait(
                    lambda: ring.ready,
                    deadline,
                    lambda: self._patience(deadline, self._late_writer),
                    ring.sleeping_offset + self.local_reader_rank,
                )
            else:
                if self.n_local_reader:
                    ring.writer_wake.wait(
                        ring.all_attached,
                        deadline,
                        lambda: self._patience(deadline, self._missing_readers),
                        ring.sleeping_offset + ring.n_reader,
                    )
                if self._remote_writer is not None:
                    self._remote_writer.wait_until_attached(
                        deadline, self._patience(deadline, self._missing_readers)
                    )
                    self._remote_writer.set_ready()
                if self.n_local_reader:
                    ring.set_ready()
        finally:
            self._release()
            if self.shutting_down:
                self._give_back()

    # Sending

    def enqueue(self, obj: Any, timeout: float | None = None, _timing: _Timing | None = None) -> None:
        """Send `obj` to all readers.

        Args:
            timeout: seconds to wait for a free slot; at most 0: only if there is one now. None: for ever.

        Raises:
            TimeoutError: names the readers that have not read.
            MessageQueueClosed: shutdown() was called; carries the reason given there.
        """
        if tracing.active and _timing is None:
            return self._enqueue_traced(obj, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._acquire(False):
            self._acquire_late(deadline)
        ring = self.buffer
        try:
            if self.shutting_down:
                raise MessageQueueClosed(self.reason)
            if type(obj) is bytes:
                payload, kind = obj, RAW
            else:
                self._dump(obj)
                self._clear_memo()
                payload, kind = self._pieces.pop(), 0
            remote = self._remote_writer
            if remote is not None:
                # Room for all, local and remote, before anybody gets it: a time-out must not split the readers.
                frames = self._frames(payload)
                context = b"" if _timing is None else _timing.context
                remote.reserve(deadline, self._patience(deadline, self._late_remote))
                if ring is None:
                    remote.send(kind, context, frames)
                    self._pieces.clear()
                    self._buffers.clear()
                    return
            index = self.current_idx
            mm = ring.mm
            written, first, end, word, data, view, following = ring.slots[index]
            if mm[first:end] != ring.all_read and mm[written]:
                self._wait_until_free(index, deadline)
            if _timing is not None:
                _timing.ready = _now_ns()
            # Transition a of the ring: nobody but this process looks at the slot from here on.
            mm[written] = 0
            size = len(payload)
            if size > ring.max_chunk_bytes or self._pieces or self._buffers:
                self._pieces.append(payload)
                message = self._place(kind, view, deadline)
            else:
                mm[data : data + size] = payload
                message = size << 8 | kind
            if _timing is not None and _timing.context:
                mm[word * 8 + 8 : word * 8 + 8 + CONTEXT_BYTES] = _timing.context
                message |= TRACED
            ring.words[word] = message
            mm[first:end] = ring.none_read
            # Transition b: the message before the flag that announces it.
            if WEAK_MEMORY_ORDER:
                memory_fence()
            # No call between these lines: a signal handler that raises must not come in between.
            mm[written] = 1
            self.current_idx = following
            if not following:
                self._lap += 1
                self._overflow_writer.on_lap(self._lap)  # type: ignore[union-attr]
            if _timing is not None:
                _timing.slot, _timing.message, _timing.copied = index, message, _now_ns()
            if remote is not None:
                remote.send(kind, context, frames)
        except BaseException:
            # What the pickler has half written or remembers must not get into the next message.
            if self.is_writer:
                self._pickler.reset()
                self._use_pickler(self._pickler)
            raise
        finally:
            # Also the fence between the written flag and the look at the sleep flag, see memory_fence.
            self._release()
            if WEAK_MEMORY_ORDER:
                memory_fence()
            if self.shutting_down:
                self._give_back()
        try:
            if mm[READERS_ASLEEP]:
                ring.readers_wake.notify()
        except ValueError:
            pass  # closed by another thread in this moment, which wakes everybody

    def _place(self, kind: int, view: memoryview, deadline: float | None) -> int:
        """Copy a message of several pieces to the slot, or to an overflow segment that the slot then names."""
        pieces, out_of_band = self._pickler.take()
        size = sum(map(len, pieces))
        message = size << 8 | kind | out_of_band
        offset = 0
        if size > len(view):
            assert self._overflow_writer is not None
            position = self._lap * self.buffer.max_chunks + self.current_idx
            block = self._overflow_writer.take(
                size, position, lambda slot: self._wait_until_free(slot, deadline)
            )
            record = block.record()
            view[: len(record)] = record
            view, offset = block.view, LINE_BYTES
            message |= OVERFLOW
        for piece in pieces:
            end = offset + len(piece)
            view[offset:end] = piece
            offset = end
        return message

    def _frames(self, payload: Any) -> list[Any]:
        """A copy of a message for remote readers: the pickle or raw bytes, then each out-of-band buffer."""
        whole = b"".join([*self._pieces, payload]) if self._pieces else payload
        return [whole, *(buffer.raw() for buffer in self._buffers)]

    def _enqueue_traced(self, obj: Any, timeout: float | None) -> None:
        with tracing.span("mq.enqueue", kind="producer") as span:
            timing = _Timing(span.context or tracing.pack_context())
            self.enqueue(obj, timeout, timing)
            span.set(
                queue=self.handle.name,
                slot=timing.slot,
                bytes=timing.message >> 8,
                overflow=bool(timing.message & OVERFLOW),
                wait_ns=timing.ready - timing.started,
                copy_ns=timing.copied - timing.ready,
                notify_ns=_now_ns() - timing.copied,
            )

    # Receiving

    def dequeue(
        self,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
        _timing: _Timing | None = None,
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
        if tracing.active and _timing is None:
            return self._dequeue_traced(timeout, cancel, indefinite)
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._acquire(False):
            self._acquire_late(deadline)
        ring = self.buffer
        mm = None
        try:
            if self.shutting_down:
                raise MessageQueueClosed(self.reason)
            reader = self.local_reader_rank
            if reader < 0:
                return self._receive(deadline, cancel, indefinite, _timing)
            mm = ring.mm
            index = self.current_idx
            written, first, _, word, data, view, following = ring.slots[index]
            mine = first + reader
            if mm[mine] or not mm[written]:
                slept_ns = self._wait_until_written(index, deadline, cancel, indefinite)
                if _timing is not None:
                    _timing.slept_ns = slept_ns
            if _timing is not None:
                _timing.ready = _now_ns()
            # Transition c: the flag before the message that it announces.
            if WEAK_MEMORY_ORDER:
                memory_fence()
            message = ring.words[word]
            try:
                kind = message & 255
                if not kind:
                    obj = loads(view)
                    self.last_context = b""
                elif kind == RAW:
                    obj = mm[data : data + (message >> 8)]
                    self.last_context = b""
                else:
                    obj = self._take(message, word, view, index)
            except Exception as error:
                # Consumed (invariant 3). A KeyboardInterrupt passes: then the message is still there next time.
                mm[mine] = 1
                self.current_idx = following
                raise MessageDecodeError(f"{self.title}: {type(error).__name__}: {error}") from error
            if WEAK_MEMORY_ORDER:
                memory_fence()
            # No call between these lines: a signal handler that raises must not come in between.
            mm[mine] = 1
            self.current_idx = following
            if _timing is not None:
                _timing.slot, _timing.message, _timing.copied = index, message, _now_ns()
            return obj
        finally:
            # Also the fence between the reader flag and the look at the sleep flag, see memory_fence.
            self._release()
            if WEAK_MEMORY_ORDER:
                memory_fence()
            try:
                if mm is not None and mm[WRITER_ASLEEP]:
                    ring.writer_wake.notify()
            except ValueError:
                pass  # closed by another thread in this moment, which wakes everybody
            if self.shutting_down:
                self._give_back()

    def _take(self, message: int, word: int, view: memoryview, index: int) -> Any:
        """Whatever is not just a pickle in the slot."""
        size = message >> 8
        self.last_context = b""
        if message & TRACED:
            self.last_context = self.buffer.mm[word * 8 + 8 : word * 8 + 8 + CONTEXT_BYTES]
        if not message & OVERFLOW:
            return decode(message, view[:size])
        reader = self._overflow_reader
        assert reader is not None
        number, segment, one_off = reader.open(view)
        try:
            return decode(message, segment[LINE_BYTES : LINE_BYTES + size])
        finally:
            reader.done(number, one_off, index)

    def _receive(
        self,
        deadline: float | None,
        cancel: threading.Event | None,
        indefinite: bool,
        timing: _Timing | None,
    ) -> Any:
        """The next message from a writer on another host."""
        remote = self._remote_reader
        if remote is None:
            raise RuntimeError("only a reader of a message queue can dequeue")
        patience = self._patience(deadline, self._late_writer, cancel, warn=not indefinite)
        kind, self.last_context, frames = remote.receive(
            deadline, patience, idle=indefinite and cancel is None
        )
        if timing is not None:
            timing.ready = timing.copied = _now_ns()
            timing.slot, timing.message = -1, sum(map(len, frames)) << 8
        if kind & RAW:
            return frames[0]
        try:
            return loads(frames[0], buffers=list(map(bytearray, frames[1:])))
        except Exception as error:
            raise MessageDecodeError(f"{self.title}: {type(error).__name__}: {error}") from error

    def _dequeue_traced(self, timeout: float | None, cancel: threading.Event | None, indefinite: bool) -> Any:
        timing = _Timing()
        with tracing.span("mq.dequeue", kind="client") as span:
            obj = self.dequeue(timeout, cancel, indefinite, timing)
            span.set(
                queue=self.handle.name,
                slot=timing.slot,
                bytes=timing.message >> 8,
                overflow=bool(timing.message & OVERFLOW),
                spin_ns=timing.ready - timing.started - timing.slept_ns,
                sleep_ns=timing.slept_ns,
                unpickle_ns=timing.copied - timing.ready,
            )
            return obj

    # Waiting

    def _wait_until_free(self, index: int, deadline: float | None) -> None:
        ring = self.buffer
        ring.writer_wake.wait(
            lambda: ring.is_free(index),
            deadline,
            lambda: self._patience(deadline, lambda: self._late_readers(index)),
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
        return ring.readers_wake.wait(
            lambda: not mm[mine] and mm[written] == 1,
            deadline,
            lambda: self._patience(deadline, self._late_writer, cancel, warn=not indefinite),
            ring.sleeping_offset + self.local_reader_rank,
            idle=indefinite and cancel is None,
        )

    def _patience(
        self,
        deadline: float | None,
        describe: Callable[[], str],
        cancel: threading.Event | None = None,
        warn: bool = True,
    ) -> Patience:
        return Patience(self, deadline, describe, cancel, warn)

    def _acquire_late(self, deadline: float | None) -> None:
        """Another thread of this process is inside: wait for it like for a peer."""
        patience = self._patience(deadline, lambda: f"{self.title}: another thread of this process is inside")
        while not self._acquire(timeout=0.05):
            patience()

    def _late_readers(self, index: int) -> str:
        ring = self.buffer
        late = ", ".join(
            f"rank {self.handle.local_reader_ranks[reader]} (pid {pid}, {process_state(pid)})"
            for reader in ring.late_readers(index)
            for pid in [ring.reader_pid(reader)]
        )
        return f"{self.title}: the writer waits for reader {late} to read slot {index}"

    def _late_remote(self) -> str:
        assert self._remote_writer is not None
        late = ", ".join(f"rank {rank}" for rank in self._remote_writer.late_ranks())
        return f"{self.title}: the writer waits for remote reader {late} to acknowledge"

    def _late_writer(self) -> str:
        if self._remote_reader is not None:
            return f"{self.title}: remote reader rank {self._remote_reader.rank} waits for the writer"
        rank = self.handle.local_reader_ranks[self.local_reader_rank]
        pid = self.buffer.writer_pid()
        what = f"to write slot {self.current_idx}" if self.buffer.ready else "to see all readers"
        return (
            f"{self.title}: reader rank {rank} waits for the writer (pid {pid}, {process_state(pid)}) {what}"
        )

    def _missing_readers(self) -> str:
        ring = self.buffer
        missing = [
            f"rank {rank}" for i, rank in enumerate(self.handle.local_reader_ranks) if not ring.attached(i)
        ]
        return f"{self.title}: waiting for reader {', '.join(missing)} to attach"

    # The end

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
                    if self.buffer is not None:
                        self.buffer.readers_wake.notify()
                        self.buffer.writer_wake.notify()
                except ValueError:
                    pass  # the last one inside has left, and closed the memory, in this moment
                for end in (self._remote_writer, self._remote_reader):
                    if end is not None:
                        end.wake()
        self._give_back()

    def _give_back(self) -> None:
        """Unmap, unless somebody is inside: then they do it when they leave (invariant 6)."""
        if self._acquire(False):
            try:
                if not self._released:
                    self._released = True
                    for part in (
                        self._overflow_writer,
                        self._overflow_reader,
                        self.buffer,
                        self._remote_writer,
                        self._remote_reader,
                    ):
                        if part is not None:
                            part.close()
            finally:
                self._release()

    def snapshot(self) -> list[SlotState]:
        """The flags of every slot, for whoever wants to look on."""
        return self.buffer.snapshot()


def _only_the_writer_can_enqueue(obj: Any) -> None:
    raise RuntimeError("only the writer of a message queue can enqueue")
