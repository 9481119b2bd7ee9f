"""Where messages go that are larger than a slot: shared segments that are made on demand and used again.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (the XPUB/SUB local_socket of MessageQueue)
Articles: part 2 §2.5.2

Deviation from vLLM: an oversized message costs one copy into shared memory and one out of it per reader; there it goes
through a socket to each reader, the caller's buffers are sent later without a copy, and the wait for it has a
time-out of its own.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Callable
from typing import Final

from minivllm.distributed.mq_stream import WaitEnded
from minivllm.distributed.shm_ring import LINE_BYTES, ShmRingBuffer
from minivllm.distributed.shm_segment import SharedSegment
from minivllm.distributed.wakeup import memory_fence
from minivllm.exceptions import MessageQueueClosed

# What the slot of an oversized message holds: number, size and token of the segment, whether it serves this message
# only, and the length of the segment's name, which follows.
_RECORD: Final = struct.Struct("<IQ16s?H")
_KEEP_BYTES: Final = 32 << 20
_IDLE_LAPS: Final = 64


class Block:
    """A segment of the writer; the first line holds a token, `view` is the rest.

    `message` is the number of the message it holds, or held last.
    """

    __slots__ = ("message", "number", "one_off", "segment", "slot", "token", "view")

    def __init__(self, number: int, segment: SharedSegment, one_off: bool) -> None:
        self.number = number
        self.segment = segment
        self.one_off = one_off
        self.token = secrets.token_bytes(16)
        segment.mm[:16] = self.token
        self.view = memoryview(segment.mm)[LINE_BYTES:]
        self.message = -1
        self.slot = 0

    def record(self) -> bytes:
        name = self.segment.name.encode()
        return _RECORD.pack(self.number, self.segment.size, self.token, self.one_off, len(name)) + name

    def close(self) -> None:
        self.view.release()
        self.segment.close()


class OverflowWriter:
    """The writer's segments.

    Invariants:
        1. A segment is written only when every reader has read the message it held before.
        2. At most `_KEEP_BYTES` are kept for later messages; a larger segment serves one message, and the last reader
           to be done with it frees its pages, whatever the writer is doing.
        3. At most `limit_bytes` wait for readers at any time (one message alone may be larger).
    """

    __slots__ = ("_blocks", "_last_lap", "_next_number", "_ring", "limit_bytes")

    def __init__(self, ring: ShmRingBuffer, limit_bytes: int) -> None:
        self._ring = ring
        self._blocks: list[Block] = []
        self._next_number = 1
        self._last_lap = 0
        self.limit_bytes = limit_bytes

    def take(self, size: int, message: int, wait_for: Callable[[int], None]) -> Block:
        """A block with room for `size` bytes, marked as holding message number `message`.

        Args:
            wait_for: called with a slot index that has to be read by all before there is room; returns when it is.
        """
        size += LINE_BYTES
        self._last_lap = message // self._ring.max_chunks
        while True:
            self._collect(message)
            busy = [block for block in self._blocks if self._is_busy(block, message)]
            if not busy or sum(block.segment.size for block in busy) + size <= self.limit_bytes:
                break
            wait_for(busy[0].slot)
        fitting = [b for b in self._blocks if b not in busy and not b.one_off and b.segment.size >= size]
        if fitting:
            block = min(fitting, key=lambda b: b.segment.size)
        else:
            block = self._create(_round_up(size))
        block.message = message
        block.slot = message % self._ring.max_chunks
        return block

    def _create(self, size: int) -> Block:
        kept = [block for block in self._blocks if not block.one_off]
        if kept and size <= _KEEP_BYTES and all(block.segment.size < size for block in kept):
            # Outgrown: the new one takes the place of all that are kept.
            self._retire()
            kept = []
        one_off = size + sum(block.segment.size for block in kept) > _KEEP_BYTES
        segment = SharedSegment.create(
            size, "the size of the message", anonymous=self._ring.all_see_descriptors()
        )
        block = Block(self._next_number, segment, one_off)
        self._next_number += 1
        self._blocks.append(block)
        return block

    def _retire(self) -> None:
        """Use none of them again; each is closed when its message has been read."""
        self._ring.retired = self._next_number - 1
        for block in self._blocks:
            block.one_off = True

    def _is_busy(self, block: Block, message: int) -> bool:
        # A slot that was written again since was read by all before.
        in_ring = message - block.message < self._ring.max_chunks
        return block.message >= 0 and in_ring and not self._ring.is_free(block.slot)

    def _collect(self, message: int) -> None:
        for block in [b for b in self._blocks if b.one_off and not self._is_busy(b, message)]:
            self._blocks.remove(block)
            block.close()

    def on_lap(self, lap: int) -> None:
        """Once around the ring: give back what has not been needed for a while."""
        if not self._blocks:
            return
        if lap - self._last_lap > _IDLE_LAPS:
            self._retire()
        # The number of the last message that was written: the slot of the next one is not known to be free.
        self._collect(lap * self._ring.max_chunks - 1)

    @property
    def allocated_bytes(self) -> int:
        return sum(block.segment.size for block in self._blocks)

    def close(self) -> None:
        for block in self._blocks:
            block.close()
        self._blocks.clear()


class OverflowReader:
    """A reader's view of the writer's segments: attached at first use, dropped when the writer has retired them."""

    __slots__ = ("_last", "_ring", "_segments")

    def __init__(self, ring: ShmRingBuffer) -> None:
        self._ring = ring
        self._segments: dict[int, tuple[SharedSegment, memoryview]] = {}
        self._last = (0, False)

    def open(self, record: memoryview) -> memoryview:
        """The memory of the segment that a slot announces, behind its first line.

        Raises:
            WaitEnded: the writer is gone and took the segment with it.
        """
        number, size, token, one_off, name_bytes = _RECORD.unpack_from(record)
        self._last = (number, one_off)
        if number not in self._segments:
            name = bytes(record[_RECORD.size : _RECORD.size + name_bytes]).decode()
            try:
                segment = SharedSegment.attach(name, size)
            except FileNotFoundError:
                gone = MessageQueueClosed(f"the writer closed before its message of {size} bytes was read")
                raise WaitEnded(gone) from None
            if segment.mm[:16] != token:
                segment.close()
                raise WaitEnded(MessageQueueClosed(f"{name} is not the announced overflow segment any more"))
            self._segments[number] = (segment, memoryview(segment.mm)[LINE_BYTES:])
        return self._segments[number][1]

    def done(self, slot: int) -> None:
        """After this reader's flag for the message that was opened last is set: drop what will not be used again."""
        number, one_off = self._last
        if number in self._segments:
            segment = self._segments[number][0]
            memory_fence()
            if self._ring.is_free(slot):
                # All have attached, and all have read.
                segment.unlink()
                if one_off:
                    # It will never be written again: free the pages for everybody, whatever the writer is doing.
                    _free_pages(segment.mm)
            if one_off:
                self._drop(number)
        self.drop_retired()

    def drop_retired(self) -> None:
        retired = self._ring.retired
        for number in [n for n in self._segments if n <= retired]:
            self._drop(number)

    @property
    def attached(self) -> int:
        return len(self._segments)

    def _drop(self, number: int) -> None:
        segment, view = self._segments.pop(number)
        view.release()
        segment.close()

    def close(self) -> None:
        for number in list(self._segments):
            self._drop(number)


def _free_pages(mm: mmap.mmap) -> None:
    advice = getattr(mmap, "MADV_REMOVE", None)
    if advice is None:
        return
    try:
        mm.madvise(advice)
    except OSError:
        pass


def _round_up(size: int) -> int:
    """To a quarter of a power of two, so that slowly growing messages do not need a new segment each."""
    step = max(1 << max(size.bit_length() - 3, 0), os.sysconf("SC_PAGE_SIZE"))
    return (size + step - 1) // step * step
