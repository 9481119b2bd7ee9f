"""What the two ends of a message queue have in common: getting in and out, waiting, saying who is late, closing.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue.shutdown)
Articles: part 2 §2.5.2, §2.5.3
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from minivllm.distributed.mq_stream import WaitEnded
from minivllm.distributed.mq_wait import Patience, process_state
from minivllm.distributed.shm_ring import ShmRingBuffer, SlotState
from minivllm.distributed.wakeup import crowded
from minivllm.exceptions import MessageQueueClosed
from minivllm.tracing.deadlines import deadline_clock

if TYPE_CHECKING:
    from minivllm.distributed.mq_overflow import OverflowReader, OverflowWriter
    from minivllm.distributed.mq_remote import RemoteReader, RemoteWriter
    from minivllm.distributed.shm_broadcast import Handle


class QueueEnd:
    """One process's end of a queue, seen from outside of its messages.

    Invariants:
        1. Several threads may call; one at a time gets in, the others wait with the same deadlines and the same end.
        2. A wait ends when what it waits for is there, at the deadline, when `shutdown` is called in this process, or
           when `on_wait` raises; in the last three cases nothing has been sent or consumed.
        3. Memory is unmapped by whoever leaves last: `shutdown`, or the call that it interrupted. So `shutdown` never
           waits, and may be called by a signal handler that has interrupted a call.

    Deviation from vLLM: there `shutdown` wakes only an idle local reader, and nothing is given back before the object
    is garbage; neither a blocked writer nor a handshake can be ended.
    """

    __slots__ = (
        "__weakref__",
        "_acquire",
        "_lock",
        "_overflow_reader",
        "_overflow_writer",
        "_release",
        "_released",
        "_remote_reader",
        "_remote_writer",
        "buffer",
        "current_idx",
        "handle",
        "local_reader_rank",
        "on_wait",
        "reason",
        "shutting_down",
        "title",
    )

    # Not Optional on purpose: the hot path is for queues that have a ring.
    buffer: ShmRingBuffer
    on_wait: Callable[[], None] | None
    _overflow_writer: OverflowWriter | None
    _overflow_reader: OverflowReader | None
    _remote_writer: RemoteWriter | None
    _remote_reader: RemoteReader | None

    def _set_up(self, handle: Handle) -> None:
        self.handle = handle
        self.buffer = None  # type: ignore[assignment]
        self.current_idx = 0
        self.local_reader_rank = -1
        self.on_wait = None
        self.shutting_down = False
        self.reason = ""
        self.title = f"message queue {handle.name!r}" if handle.name else "message queue"
        self._released = False
        self._lock = threading.Lock()
        self._acquire = self._lock.acquire
        self._release = self._lock.release
        self._overflow_writer = None
        self._overflow_reader = None
        self._remote_writer = None
        self._remote_reader = None

    @property
    def is_writer(self) -> bool:
        return self._remote_reader is None and self.local_reader_rank < 0

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Collective: the writer waits until every reader has attached, the readers wait until it has seen them all.

        Raises:
            TimeoutError: names the readers that are missing.
            MessageQueueClosed: shutdown() was called meanwhile.
        """
        deadline = None if timeout is None else deadline_clock() + timeout
        if not self._acquire(False):
            self._acquire_late(deadline)
        try:
            if self.shutting_down:
                raise MessageQueueClosed(self.reason)
            if self.is_writer:
                self._see_all_readers(deadline)
            elif self._remote_reader is not None:
                self._remote_reader.wait_until_ready(deadline, self._patience(deadline, self._late_writer))
            else:
                ring = self.buffer
                ring.readers_wake.wait(
                    lambda: ring.ready,
                    deadline,
                    lambda: self._patience(deadline, self._late_writer),
                    ring.sleeping_offset + self.local_reader_rank,
                )
        finally:
            self._release()
            if self.shutting_down:
                self._give_back()

    def _see_all_readers(self, deadline: float | None) -> None:
        ring, remote = self.buffer, self._remote_writer
        if ring is not None:
            ring.writer_wake.wait(
                ring.all_attached,
                deadline,
                lambda: self._patience(deadline, self._missing_readers),
                ring.sleeping_offset + ring.n_reader,
            )
        if remote is not None:
            remote.wait_until_attached(deadline, self._patience(deadline, self._missing_readers))
            remote.set_ready()
        if ring is not None:
            ring.set_ready()

    # Waiting

    def _acquire_late(self, deadline: float | None) -> None:
        """Another thread of this process is inside: wait for it like for a peer."""
        patience = self._patience(deadline, lambda: f"{self.title}: another thread of this process is inside")
        while not self._acquire(timeout=0.05):
            patience()

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

        def before_sleeping() -> Patience:
            if self._overflow_reader is not None:
                self._overflow_reader.drop_retired()
            return self._patience(deadline, self._late_writer, cancel, warn=not indefinite)

        return ring.readers_wake.wait(
            lambda: not mm[mine] and mm[written] == 1,
            deadline,
            before_sleeping,
            ring.sleeping_offset + self.local_reader_rank,
            idle=indefinite and cancel is None,
        )

    def _wait_for_more(
        self,
        part: Callable[[], bool],
        whole: Callable[[], bool],
        deadline: float | None,
        cancel: threading.Event | None,
    ) -> None:
        """A large message is announced and not yet there as a whole."""
        ring = self.buffer
        try:
            ring.readers_wake.wait(
                # Following part by part would keep the writer from writing where there is no core for each.
                whole if crowded() else part,
                deadline,
                lambda: self._patience(deadline, self._late_writer, cancel),
                ring.sleeping_offset + self.local_reader_rank,
            )
        except Exception as error:
            raise WaitEnded(error) from None

    def _patience(
        self,
        deadline: float | None,
        describe: Callable[[], str],
        cancel: threading.Event | None = None,
        warn: bool = True,
    ) -> Patience:
        return Patience(self, deadline, describe, cancel, warn)

    # Who is late

    def _late_readers(self, index: int) -> str:
        ring = self.buffer
        late = []
        for reader in ring.late_readers(index):
            pid = ring.reader_pid(reader)
            who = f"pid {pid}, {process_state(pid)}" if pid else "not attached"
            late.append(f"rank {self.handle.local_reader_ranks[reader]} ({who})")
        return f"{self.title}: the writer waits for reader {', '.join(late)} to read slot {index}"

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
        missing = []
        if self.buffer is not None:
            ranks = enumerate(self.handle.local_reader_ranks)
            missing += [f"rank {rank}" for i, rank in ranks if not self.buffer.attached(i)]
        if self._remote_writer is not None and (remote := self._remote_writer.missing_readers()):
            missing.append(f"{remote} on other hosts")
        return f"{self.title}: the writer waits for reader {', '.join(missing)} to attach"

    def has_message(self) -> bool:
        """Whether a local reader's dequeue would find a message at once: to poll without an exception for each miss.

        Raises:
            MessageQueueClosed: as dequeue does.
        """
        ring = self.buffer
        try:
            if self.shutting_down or ring is None:
                raise MessageQueueClosed(self.reason)
            written, first = ring.slots[self.current_idx][:2]
            return ring.mm[written] == 1 and not ring.mm[first + self.local_reader_rank]
        except ValueError:
            # Closed by another thread in this moment.
            raise MessageQueueClosed(self.reason) from None

    def snapshot(self) -> list[SlotState]:
        """The flags of every slot, for whoever wants to look on; empty for a queue without local readers."""
        return [] if self.buffer is None else self.buffer.snapshot()

    # The end

    def shutdown(self, reason: str | None = None) -> None:
        """Close this end: blocked calls in this process raise MessageQueueClosed(reason), memory is given back.

        May be called from any thread or signal handler, at any time, again and again; only the first reason counts.
        The other ends are not told.
        """
        if not self.shutting_down:
            self.reason = reason or f"{self.title} was shut down"
            self.shutting_down = True
            if not self._released:
                self._wake_own_callers()
        self._give_back()

    def _wake_own_callers(self) -> None:
        """Sleepers of other processes are woken too, look again, and go on sleeping."""
        try:
            if self.buffer is not None:
                self.buffer.readers_wake.notify()
                self.buffer.writer_wake.notify()
        except ValueError:
            pass  # the last one inside has left, and closed the memory, in this moment
        for end in (self._remote_writer, self._remote_reader):
            if end is not None:
                end.wake()

    def _give_back(self) -> None:
        """Unmap, unless somebody is inside: then they do it when they leave (invariant 3)."""
        if not self._acquire(False):
            return
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
