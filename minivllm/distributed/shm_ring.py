"""The ring of slots in shared memory: where each flag lies, and what the flags of a slot mean.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (ShmRingBuffer)
Articles: part 2 §2.5.1
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from minivllm.distributed.mq_codec import OVERFLOW, SPARE
from minivllm.distributed.shm_segment import SharedSegment
from minivllm.distributed.wakeup import FLAG_OFFSET, SpinCondition
from minivllm.exceptions import ConfigError

LINE_BYTES: Final = 64
MIN_CHUNK_BYTES: Final = 256
CONTEXT_BYTES: Final = 25
CONTEXT_OFFSET: Final = 16  # from the message word; the progress word is between them


_MAGIC: Final = 0x6D696E69_564C4C4D
_IDENTITY: Final = struct.Struct("<QII")  # magic, creator's pid, creator's descriptor of the segment
_READY: Final = 16
_RETIRED: Final = 24
_READERS_WAKE: Final = 64
_WRITER_WAKE: Final = 128
_PER_READER: Final = 192
READERS_ASLEEP: Final = _READERS_WAKE + FLAG_OFFSET
WRITER_ASLEEP: Final = _WRITER_WAKE + FLAG_OFFSET

# Values of a reader's "attached" byte.
ATTACHED: Final = 1
ATTACHED_SEES_DESCRIPTORS: Final = 2


class RingLayout(NamedTuple):
    """Where the parts of a ring lie: offsets and sizes in bytes.

    Attributes:
        pids: the readers' process ids.
        metadata: the first metadata line; each is `metadata_line` long.
        word: the message word in a metadata line.
        data: the first slot; the next one is `stride` further.
        size: the whole segment, but for the spare place behind the last slot, which is `stride` long too.
    """

    sleeping: int
    pids: int
    metadata: int
    word: int
    metadata_line: int
    data: int
    stride: int
    size: int


def ring_layout(n_reader: int, max_chunk_bytes: int, max_chunks: int) -> RingLayout:
    sleeping = _PER_READER + n_reader
    pids = _align(sleeping + n_reader + 1, 4)
    metadata = _align(pids + 4 * n_reader, LINE_BYTES)
    word = _align(1 + n_reader, 8)
    metadata_line = _align(word + CONTEXT_OFFSET + CONTEXT_BYTES, LINE_BYTES)
    data = metadata + max_chunks * metadata_line
    stride = _align(max_chunk_bytes, LINE_BYTES)
    return RingLayout(sleeping, pids, metadata, word, metadata_line, data, stride, data + max_chunks * stride)


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot as `MessageQueue.snapshot()` shows it.

    Attributes:
        state: "free" (never written, or being written, or read by all), "written" (nobody has read it) or "partly read".
        written: the written flag.
        read_by: the reader flags, one per local reader.
        length: bytes of the message that is, or was last, in the slot.
        overflow: the message itself lies in an overflow segment.
        spare: it lies in the spare place.
    """

    index: int
    state: str
    written: bool
    read_by: tuple[bool, ...]
    length: int
    overflow: bool
    spare: bool


class ShmRingBuffer:
    """A ring of `max_chunks` slots that one process writes and `n_reader` processes read.

        header | metadata line 0 … metadata line n-1 | slot 0 … slot n-1 | spare place

    A metadata line starts on a cache line of its own::

        | written | reader 0 | reader 1 | … | message word (length, kind) | progress word | trace context |

    A slot is in one of four states (written flag, reader flags):

        1. ``0 ????``  never written, or being written: only the writer may touch it.
        2. ``1 0000``  written, nobody has read it: readers may read, the writer may not touch it.
        3. ``1 ?1?0``  read by some: those whose flag is 0 may read, the writer may not touch it.
        4. ``1 1111``  read by all: the writer may take it again. (A fresh ring starts as ``0 1111``.)

    Legal transitions, and the order of stores that makes them safe:

        a. The writer takes a slot in state 1 or 4 only, and clears the written flag first: state 1.
        b. It writes the message and the message word, then, after a fence, clears all reader flags (still state 1),
           then sets the written flag: state 2. Any other order shows readers a torn or an old message.
        c. Reader i reads only while written is 1 and its own flag is 0, and (after a fence) sets its flag when it has
           taken everything it needs out of the slot: state 3 or 4. No process writes another reader's 1.
        d. All walk through the slots in the same order, so nobody needs to be told a position.

    Flags are single bytes, each with one writer at a time, so no atomic instruction is needed.

    Large messages that walk through all the slots find none of them in a cache any more. So one may lie in the spare place
    instead of its slot, if the last one that did has been read: its slot is in state 4, or 1. The message word says so.
    """

    __slots__ = (
        "_in_spare",
        "all_read",
        "attached_offset",
        "data_offset",
        "max_chunk_bytes",
        "max_chunks",
        "metadata_line_bytes",
        "metadata_offset",
        "mm",
        "n_reader",
        "none_read",
        "pids_offset",
        "readers_wake",
        "segment",
        "sleeping_offset",
        "slots",
        "spare",
        "view",
        "words",
        "writer_wake",
    )

    def __init__(
        self,
        n_reader: int,
        max_chunk_bytes: int,
        max_chunks: int,
        name: str | None = None,
        reader: int = -1,
    ) -> None:
        """Make a ring, or with `name` map an existing one as reader number `reader`."""
        if max_chunk_bytes < MIN_CHUNK_BYTES or max_chunks < 1 or n_reader < 1:
            raise ConfigError(
                f"a message queue needs at least 1 slot of at least {MIN_CHUNK_BYTES} bytes and 1 reader, got "
                f"{max_chunks} slots of {max_chunk_bytes} bytes and {n_reader} readers "
                "(MINIVLLM_MQ_MAX_CHUNKS, MINIVLLM_MQ_MAX_CHUNK_BYTES)"
            )
        self.n_reader = n_reader
        self.all_read = b"\x01" * n_reader
        self.none_read = b"\x00" * n_reader
        self.max_chunk_bytes = max_chunk_bytes
        self.max_chunks = max_chunks
        layout = ring_layout(n_reader, max_chunk_bytes, max_chunks)
        self.attached_offset = _PER_READER
        self.sleeping_offset = layout.sleeping
        self.pids_offset = layout.pids
        self.metadata_offset = layout.metadata
        self.metadata_line_bytes = layout.metadata_line
        self.data_offset = layout.data
        word, stride, size = layout.word, layout.stride, layout.size
        if name is None:
            lower = "MINIVLLM_MQ_MAX_CHUNK_BYTES or MINIVLLM_MQ_MAX_CHUNKS"
            self.segment = SharedSegment.create(size, lower, spare=stride)
        else:
            self.segment = SharedSegment.attach(name, size + stride)
        mm = self.mm = self.segment.mm
        if name is None:
            _IDENTITY.pack_into(mm, 0, _MAGIC, os.getpid(), self.segment.fd)
            for index in range(max_chunks):
                flags = self.metadata_offset + index * self.metadata_line_bytes + 1
                mm[flags : flags + n_reader] = self.all_read
        elif _IDENTITY.unpack_from(mm, 0)[0] != _MAGIC:
            self.segment.close()
            raise FileNotFoundError(f"shared memory {name} is not a message queue")
        self.view = memoryview(mm)
        self.words = self.view[: size - size % 8].cast("Q")
        self.spare = self.view[size:]
        # The slot of the last message in the spare place; -1: the place takes no memory yet, -2: there is none for it.
        self._in_spare = -1
        # Per slot: written flag, first reader flag, end of the reader flags, index of the message word, the slot's first
        # byte, its memory, next slot.
        self.slots = []
        for index in range(max_chunks):
            line = self.metadata_offset + index * self.metadata_line_bytes
            data = self.data_offset + index * stride
            self.slots.append(
                (
                    line,
                    line + 1,
                    line + 1 + n_reader,
                    (line + word) // 8,
                    data,
                    self.view[data : data + max_chunk_bytes],
                    (index + 1) % max_chunks,
                )
            )
        self.readers_wake = SpinCondition(mm, _READERS_WAKE, 1 + reader, 1 + n_reader)
        self.writer_wake = SpinCondition(mm, _WRITER_WAKE, 1 + reader, 1 + n_reader)

    def handle(self) -> tuple[int, int, int, str]:
        return (self.n_reader, self.max_chunk_bytes, self.max_chunks, self.segment.name)

    # The handshake: who has attached, and whether the writer has seen them all.

    def attach(self, reader: int) -> None:
        """Enter this process as reader number `reader`; the last one to come removes the segment's name."""
        if self.attached(reader):
            pid = self.reader_pid(reader)
            self.close()
            raise RuntimeError(f"local reader {reader} of this message queue has attached before (pid {pid})")
        pid, fd = _IDENTITY.unpack_from(self.mm, 0)[1:]
        sees = self.segment.same_as_descriptor(pid, fd)
        struct.pack_into("<I", self.mm, self._pid_offset(reader), os.getpid())
        self.mm[self.attached_offset + reader] = ATTACHED_SEES_DESCRIPTORS if sees else ATTACHED
        if self.all_attached():
            self.segment.unlink()
        self.writer_wake.notify()

    def attached(self, reader: int) -> bool:
        return self.mm[self.attached_offset + reader] != 0

    def all_attached(self) -> bool:
        return b"\x00" not in self.mm[self.attached_offset : self.attached_offset + self.n_reader]

    def all_see_descriptors(self) -> bool:
        """Whether every reader can open descriptors of the writer's process, see SharedSegment.create(anonymous)."""
        attached = self.mm[self.attached_offset : self.attached_offset + self.n_reader]
        return attached == bytes([ATTACHED_SEES_DESCRIPTORS]) * self.n_reader

    def reader_pid(self, reader: int) -> int:
        pid: int = struct.unpack_from("<I", self.mm, self._pid_offset(reader))[0]
        return pid

    def writer_pid(self) -> int:
        pid: int = _IDENTITY.unpack_from(self.mm, 0)[1]
        return pid

    def _pid_offset(self, reader: int) -> int:
        return self.pids_offset + 4 * reader

    @property
    def ready(self) -> bool:
        return self.mm[_READY] == 1

    def set_ready(self) -> None:
        self.mm[_READY] = 1
        self.segment.unlink()
        self.readers_wake.notify()

    # Overflow segments up to this number are no longer used by the writer.

    @property
    def retired(self) -> int:
        number: int = struct.unpack_from("<I", self.mm, _RETIRED)[0]
        return number

    @retired.setter
    def retired(self, number: int) -> None:
        struct.pack_into("<I", self.mm, _RETIRED, number)

    def is_free(self, index: int) -> bool:
        """States 1 and 4: the writer may take the slot."""
        written, first, end = self.slots[index][:3]
        return self.mm[first:end] == self.all_read or not self.mm[written]

    def take_spare(self, index: int) -> bool:
        """Whether the writer may put the message for slot `index` in the spare place; then it is taken."""
        last = self._in_spare
        if last == -1 and not self.segment.reserve_spare(len(self.spare)):
            last = self._in_spare = -2
        if last == -2 or (last >= 0 and last != index and not self.is_free(last)):
            return False
        self._in_spare = index
        return True

    def late_readers(self, index: int) -> list[int]:
        """Readers that have not read a written slot."""
        written, first, end = self.slots[index][:3]
        if not self.mm[written]:
            return []
        return [reader for reader, flag in enumerate(self.mm[first:end]) if not flag]

    def snapshot(self) -> list[SlotState]:
        states = []
        for index, (written, first, end, word, _, _, _) in enumerate(self.slots):
            is_written, flags, message = bool(self.mm[written]), self.mm[first:end], self.words[word]
            if not is_written or b"\x00" not in flags:
                state = "free"
            else:
                state = "partly read" if any(flags) else "written"
            read_by = tuple(map(bool, flags))
            overflow, spare = bool(message & OVERFLOW), bool(message & SPARE)
            states.append(SlotState(index, state, is_written, read_by, message >> 8, overflow, spare))
        return states

    def close(self) -> None:
        """Give the memory back. No other thread may be inside a method of this object."""
        for slot in self.slots:
            slot[5].release()
        self.words.release()
        self.spare.release()
        self.view.release()
        self.segment.close()


def _align(offset: int, to: int) -> int:
    return (offset + to - 1) // to * to
