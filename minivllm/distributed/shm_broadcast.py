"""The message queue between the executor and its workers: one writer, n readers, each of whom gets every message.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue, Handle, ShmRingBuffer)
Articles: part 2 §2.5, part 1 §2
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from minivllm import envs, tracing
from minivllm.distributed import mq_stream, mq_traced
from minivllm.distributed.mq_codec import GROWING, OVERFLOW, RAW, SPARE, TRACED, MessagePickler, decode, loads
from minivllm.distributed.mq_end import QueueEnd
from minivllm.distributed.mq_overflow import OverflowReader, OverflowWriter
from minivllm.distributed.mq_stream import AbandonedMessage, WaitEnded
from minivllm.distributed.mq_traced import Timing, now_ns
from minivllm.distributed.shm_ring import (
    CONTEXT_BYTES,
    CONTEXT_OFFSET,
    READERS_ASLEEP,
    WRITER_ASLEEP,
    ShmRingBuffer,
    SlotState,
)
from minivllm.distributed.wakeup import WEAK_MEMORY_ORDER, crowded, memory_fence
from minivllm.exceptions import MessageDecodeError, MessageQueueClosed
from minivllm.tracing.deadlines import deadline_clock

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Handle", "MessageDecodeError", "MessageQueue", "MessageQueueClosed", "ShmRingBuffer", "SlotState"]

SMALL_BYTES: Final = (
    64 << 10
)  # bytes objects up to this are copied as they are; larger ones the pickler passes on uncopied


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


class MessageQueue(QueueEnd):
    """One end of a broadcast queue: the writer's (made by the constructor) or a reader's (`create_from_handle`).

    A message is pickled once, copied into a slot of the ring once, and unpickled from there by each reader. What is too
    large for a slot lies in an overflow segment, and the slot says where. Readers on other hosts get it by TCP.

    Invariants (those of QueueEnd, and):
        1. What a reader gets never changes later: everything is copied out of shared memory before the slot is given up.
        2. What was passed to `enqueue` may be changed as soon as it returns.
        3. A message that cannot be pickled leaves the ring untouched; one that cannot be unpickled is consumed.
        4. While nobody sleeps, no message costs a system call.

    Attributes:
        on_wait: called about every 50 ms while a wait lasts; what it raises ends the wait.
        last_context: trace context of the message that was dequeued last, b"" if it had none.
        current_idx: the slot that is written or read next.
        local_reader_rank: this reader's index among the local readers; -1 for the writer and for remote readers.
    """

    __slots__ = (
        "_buffers",
        "_clear_memo",
        "_dump",
        "_lap",
        "_pickler",
        "_pieces",
        "last_context",
        "n_local_reader",
        "n_remote_reader",
    )
    _dump: Callable[[Any], None]
    _overflow_writer: OverflowWriter
    _overflow_reader: OverflowReader

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
        self.last_context = b""
        self.n_local_reader = n_local_reader
        self.n_remote_reader = n_reader - n_local_reader
        self._lap = 0
        self._use_pickler(MessagePickler())
        if n_local_reader:
            self._use_ring(ShmRingBuffer(n_local_reader, max_chunk_bytes, max_chunks))
            self.handle.buffer_handle = self.buffer.handle()
            self._overflow_writer = OverflowWriter(self.buffer, envs.MINIVLLM_MQ_MAX_OVERFLOW_BYTES)
        if self.n_remote_reader:
            from minivllm.distributed.mq_remote import RemoteWriter

            remote = self._remote_writer = RemoteWriter(connect_ip, self.n_remote_reader, max_chunks)
            self.handle.secret = remote.secret
            self.handle.remote_subscribe_addr = remote.address
            self.handle.remote_addr_ipv6 = remote.ipv6

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
        self.last_context = b""
        self.n_local_reader = len(handle.local_reader_ranks)
        self.n_remote_reader = 0
        self._dump = _only_the_writer_can_enqueue
        if rank in handle.local_reader_ranks and handle.buffer_handle is not None:
            self.local_reader_rank = handle.local_reader_ranks.index(rank)
            self._use_ring(ShmRingBuffer(*handle.buffer_handle, reader=self.local_reader_rank))
            self._overflow_reader = OverflowReader(self.buffer)
            self.buffer.attach(self.local_reader_rank)
        elif handle.remote_subscribe_addr is not None:
            from minivllm.distributed.mq_remote import RemoteReader

            address, ipv6 = handle.remote_subscribe_addr, handle.remote_addr_ipv6
            self._remote_reader = RemoteReader(address, ipv6, handle.secret, rank)
        else:
            raise ValueError(f"rank {rank} is not a reader of this queue: {handle.local_reader_ranks} are")
        return self

    def _use_ring(self, ring: ShmRingBuffer) -> None:
        self.buffer = ring
        ring.readers_wake.spin_s = ring.writer_wake.spin_s = envs.MINIVLLM_MQ_SPIN_US / 1e6
        if not self.handle.name:
            self.title = f"message queue {ring.segment.name}"

    def _use_pickler(self, pickler: MessagePickler) -> None:
        self._pickler = pickler
        self._dump, self._clear_memo = pickler.dump, pickler.clear_memo
        self._pieces, self._buffers = pickler.pieces, pickler.buffers

    # Sending

    def enqueue(self, obj: Any, timeout: float | None = None, _timing: Timing | None = None) -> None:
        """Send `obj` to all readers.

        Args:
            timeout: seconds to wait for a free slot; at most 0: only if there is one now. None: for ever.

        Raises:
            TimeoutError: names the readers that have not read.
            MessageQueueClosed: shutdown() was called; carries the reason given there.
        """
        if tracing.messages and _timing is None:
            return mq_traced.enqueue(self, obj, timeout)
        deadline = None if timeout is None else deadline_clock() + timeout
        if not self._acquire(False):
            self._acquire_late(deadline)
        ring = self.buffer
        try:
            if self.shutting_down:
                raise MessageQueueClosed(self.reason)
            if type(obj) is bytes and len(obj) <= SMALL_BYTES:
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
                    self._pickler.take()
                    return
            index = self.current_idx
            mm = ring.mm
            written, first, end, word, data, view, following = ring.slots[index]
            if mm[first:end] != ring.all_read and mm[written]:
                self._wait_until_free(index, deadline)
            if _timing is not None:
                _timing.ready = now_ns()
            # Transition a of the ring: nobody but this process looks at the slot from here on.
            mm[written] = 0
            size = len(payload)
            large = None
            if size > ring.max_chunk_bytes or self._pieces or self._buffers:
                self._pieces.append(payload)
                message, large = self._place(kind, view, word + 1, deadline)
            else:
                mm[data : data + size] = payload
                message = size << 8 | kind
            if _timing is not None and _timing.context:
                start = word * 8 + CONTEXT_OFFSET
                mm[start : start + CONTEXT_BYTES] = _timing.context
                message |= TRACED
            ring.words[word] = message
            # Transition b: the message before the flags that announce it.
            # Deviation from vLLM: there the fence stands after the reader flags are cleared. On ARM a reader could then
            # see its cleared flag together with the old written flag, and read a message that is being written.
            if WEAK_MEMORY_ORDER:
                memory_fence()
            mm[first:end] = ring.none_read
            # No call between these lines: a signal handler that raises must not come in between.
            mm[written] = 1
            self.current_idx = following
            if large is not None:
                self._write_large(*large)
            if not following:
                self._lap += 1
                self._overflow_writer.on_lap(self._lap)
            if _timing is not None:
                _timing.slot, _timing.message, _timing.copied = index, message, now_ns()
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

    def _place(
        self, kind: int, view: memoryview, progress: int, deadline: float | None
    ) -> tuple[int, tuple[list[Any], int, memoryview, memoryview, int] | None]:
        """Give a message of several pieces a place: the slot, or an overflow segment whose address the slot then gets.

        Returns the message word, and what mq_stream.write needs if it is to be written only when it has been announced:
        large ones are, where a reader can follow on another core.
        """
        pieces, out_of_band = self._pickler.take()
        size = sum(map(len, pieces))
        kind |= out_of_band
        if size > len(view):
            position = self._lap * self.buffer.max_chunks + self.current_idx
            block = self._overflow_writer.take(
                size, position, lambda slot: self._wait_until_free(slot, deadline)
            )
            record = block.record()
            view[: len(record)] = record
            view = block.view
            kind |= OVERFLOW
        elif size >= mq_stream.MIN_BYTES and self.buffer.take_spare(self.current_idx):
            view = self.buffer.spare
            kind |= SPARE
        if size >= mq_stream.MIN_BYTES:
            words = self.buffer.words
            words[progress] = 0
            place = pieces, size, view, words, progress
            if not crowded():
                return size << 8 | kind | GROWING, place
            mq_stream.write(*place)
            return size << 8 | kind | GROWING, None
        offset = 0
        for piece in pieces:
            end = offset + len(piece)
            view[offset:end] = piece
            offset = end
        return size << 8 | kind, None

    def _write_large(self, *place: Any) -> None:
        """The slot is announced already: readers follow part by part, see mq_stream."""
        memory_fence()
        if self.buffer.mm[READERS_ASLEEP]:
            self.buffer.readers_wake.notify()
        mq_stream.write(*place)

    def _frames(self, payload: Any) -> list[Any]:
        """A message for remote readers: the pickle or raw bytes, then each out-of-band buffer."""
        whole = b"".join([*self._pieces, payload]) if self._pieces else payload
        return [whole, *(buffer.raw() for buffer in self._buffers)]

    # Receiving

    def dequeue(
        self,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
        _timing: Timing | None = None,
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
        if tracing.messages and _timing is None:
            return mq_traced.dequeue(self, timeout, cancel, indefinite)
        deadline = None if timeout is None else deadline_clock() + timeout
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
            while True:
                index = self.current_idx
                written, first, _, word, data, view, following = ring.slots[index]
                mine = first + reader
                if mm[mine] or not mm[written]:
                    slept_ns = self._wait_until_written(index, deadline, cancel, indefinite)
                    if _timing is not None:
                        _timing.slept_ns = slept_ns
                if _timing is not None:
                    _timing.ready = now_ns()
                # Transition c: the flag before the message that it announces.
                if WEAK_MEMORY_ORDER:
                    memory_fence()
                message = ring.words[word]
                kind = message & 255
                failure = None
                try:
                    if not kind:
                        obj = loads(view)
                        self.last_context = b""
                    elif kind == RAW:
                        obj = mm[data : data + (message >> 8)]
                        self.last_context = b""
                    else:
                        obj = self._take(message, word, view, deadline, cancel)
                except WaitEnded as ended:
                    raise ended.error from None  # the message is still there next time
                except Exception as error:
                    # A KeyboardInterrupt passes: then the message is still there next time.
                    failure = error
                if WEAK_MEMORY_ORDER:
                    memory_fence()
                # No call between these lines: a signal handler that raises must not come in between.
                mm[mine] = 1
                self.current_idx = following
                if kind & OVERFLOW:
                    self._overflow_reader.done(index)
                if _timing is not None:
                    _timing.slot, _timing.message, _timing.copied = index, message, now_ns()
                if failure is None:
                    return obj
                if not isinstance(failure, AbandonedMessage):
                    raise MessageDecodeError(
                        f"{self.title}: {type(failure).__name__}: {failure}"
                    ) from failure
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

    def _take(
        self,
        message: int,
        word: int,
        view: memoryview,
        deadline: float | None,
        cancel: threading.Event | None,
    ) -> Any:
        """Whatever is not just a pickle or bytes in the slot."""
        self.last_context = b""
        ring = self.buffer
        if message & TRACED:
            start = word * 8 + CONTEXT_OFFSET
            self.last_context = ring.mm[start : start + CONTEXT_BYTES]
        if message & OVERFLOW:
            view = self._overflow_reader.open(view)
        elif message & SPARE:
            view = ring.spare
        view = view[: message >> 8]
        if not message & GROWING:
            return decode(message, view)
        with view:
            stream = mq_stream.Stream(
                view,
                ring.words,
                word + 1,
                lambda part, whole: self._wait_for_more(part, whole, deadline, cancel),
            )
            return stream.load(message)

    def _receive(
        self,
        deadline: float | None,
        cancel: threading.Event | None,
        indefinite: bool,
        timing: Timing | None,
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
            timing.ready = timing.copied = now_ns()
            timing.message = sum(map(len, frames)) << 8
        if kind & RAW:
            return frames[0]
        try:
            return loads(frames[0], buffers=list(map(bytearray, frames[1:])))
        except Exception as error:
            raise MessageDecodeError(f"{self.title}: {type(error).__name__}: {error}") from error

    # In process groups

    def broadcast_object(self, obj: Any = None) -> Any:
        """The writer sends `obj`, readers get it; the same call on every rank."""
        if self.is_writer:
            self.enqueue(obj)
            return obj
        return self.dequeue()

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
        """One end for each rank of `pg`, collectively: `writer_rank` (within the group) writes, all others read.

        Args:
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


def _only_the_writer_can_enqueue(obj: Any) -> None:
    raise RuntimeError("only the writer of a message queue can enqueue")
