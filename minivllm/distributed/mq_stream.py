"""A large message is read while it is still being written: the reader's copy follows the writer's, part by part.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.2

The slot announces the message as soon as its place is known (the slot itself, or an overflow segment). How much of it is there,
the writer says in the progress word of the slot's metadata line. With a core for each, both copies together take hardly longer
than one.

Invariants:
    1. The progress word is 0 before the slot is announced, only grows, and grows only when the bytes (after a fence) are there.
       Bytes that are there may be written again, the same ones: a reader who copies them meanwhile sees no difference.
    2. A reader sets its flag only when it has taken everything: until then the writer cannot use slot or segment again.
    3. A message whose writer was interrupted is marked as abandoned, and readers go on with the next one.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from minivllm.distributed.mq_codec import OUT_OF_BAND, RAW, decode
from minivllm.distributed.mq_memory import keep_freed_memory
from minivllm.distributed.wakeup import WEAK_MEMORY_ORDER, memory_fence

MIN_BYTES: Final = 256 << 10  # below this a copy is over before the reader has come
_ABANDONED: Final = 2**64 - 1
_PARTS: Final = 8


def _min_part_bytes() -> int:
    """A part is at least as large as the second-level cache, or all of its piece; where less is left, some of what comes before is
    copied again.

    glibc copies less than that by string instructions where the processor calls them fast. Those of AMD are not while another
    core reads what has just been written: 1 MB through shared memory took 47 to 116 µs in parts of 125 kB, 57 to 72 in one part,
    and 49 to 62 in two of 512 KiB (14 times each in turn, Zen 3, glibc 2.36).
    """
    try:
        return min(max(os.sysconf("SC_LEVEL2_CACHE_SIZE"), 512 << 10), 2 << 20)
    except (AttributeError, OSError, ValueError):
        return 512 << 10


MIN_PART_BYTES: Final = _min_part_bytes()


class AbandonedMessage(Exception):
    """The writer was interrupted in the middle of this message."""


class WaitEnded(Exception):
    """The wait for the rest of a message ended in `error`; an unpickler's own errors must not be taken for this."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def write(pieces: Iterable[Any], size: int, view: memoryview, words: memoryview, progress: int) -> None:
    """Copy a message of `size` bytes to `view`, and say in word number `progress` how far it is."""
    part_bytes = max(size // _PARTS, MIN_PART_BYTES)
    offset = 0
    try:
        for piece in pieces:
            with memoryview(piece) as source:
                done, whole = 0, len(source)
                while done < whole:
                    end = min(done + part_bytes, whole)
                    start = max(min(done, end - MIN_PART_BYTES), 0)
                    view[offset + start : offset + end] = source[start:end]
                    done = end
                    if WEAK_MEMORY_ORDER:
                        memory_fence()
                    words[progress] = offset + end
                offset += whole
    except BaseException:
        words[progress] = _ABANDONED
        raise


class Stream:
    """A file for the unpickler: gives what is there, and waits for what is not."""

    __slots__ = ("_position", "_progress", "_size", "_view", "_wait", "_words")

    def __init__(
        self,
        view: memoryview,
        words: memoryview,
        progress: int,
        wait: Callable[[Callable[[], bool], Callable[[], bool]], None],
    ) -> None:
        """
        Args:
            view: exactly the message.
            wait: called with "the part that is needed is there" and "the whole is there"; returns when one of them holds.
        """
        self._view = view
        self._size = len(view)
        self._words = words
        self._progress = progress
        self._wait = wait
        self._position = 0

    def load(self, kind: int) -> Any:
        """The object of the message, which starts here."""
        keep_freed_memory()
        if self._there(self._size) == self._size:
            return decode(kind, self._view[:])
        if kind & RAW:
            return self.read(self._size)
        if not kind & OUT_OF_BAND:
            return pickle.Unpickler(self).load()
        (count,) = struct.unpack("<Q", self.read(8))
        lengths = struct.unpack(f"<{count}Q", self.read(8 * count))
        start = self._position + lengths[0]
        return pickle.Unpickler(self, buffers=self._buffers(start, lengths[1:])).load()

    def _buffers(self, start: int, lengths: tuple[int, ...]) -> Iterator[bytearray]:
        """Out-of-band buffers, each when the unpickler asks for it, with a position of their own."""
        for length in lengths:
            buffer = bytearray(length)
            self._copy(start, buffer)
            start += length
            yield buffer

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._position + size, self._size)
        self._there(end, wait=True)
        found = bytes(self._view[self._position : end])
        self._position = end
        return found

    def readinto(self, buffer: Any) -> int:
        size = self._copy(self._position, buffer)
        self._position += size
        return size

    def readline(self) -> bytes:
        """Only text opcodes ask for lines, which this protocol of pickle does not write."""
        line = b""
        while not line.endswith(b"\n") and (byte := self.read(1)):
            line += byte
        return line

    def _copy(self, start: int, buffer: Any) -> int:
        with memoryview(buffer) as target:
            size = min(len(target), self._size - start)
            done = 0
            while done < size:
                end = min(self._there(start + done + 1, wait=True) - start, size)
                again = max(min(done, end - MIN_PART_BYTES), 0)
                target[again:end] = self._view[start + again : start + end]
                done = end
        return size

    def _there(self, needed: int, wait: bool = False) -> int:
        """How many bytes are there: at least `needed` if it is worth a wait."""
        words, progress = self._words, self._progress
        if wait and words[progress] < needed:
            self._wait(lambda: words[progress] >= needed, lambda: words[progress] >= self._size)
        found: int = words[progress]
        if found == _ABANDONED:
            raise AbandonedMessage
        if WEAK_MEMORY_ORDER:
            memory_fence()
        return found
