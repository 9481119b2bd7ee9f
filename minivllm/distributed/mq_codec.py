"""Between an object and the bytes in a slot: pickle protocol 5, with large buffers beside the pickle and not in it.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue.enqueue, MessageQueue.dequeue)
Articles: part 2 §2.5.2
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

# Bits of the low byte of a slot's message word; the length in bytes stands above them. 0 is a pickle.
OVERFLOW: Final = 1  # the slot holds the address of an overflow segment, the message is there
OUT_OF_BAND: Final = 2  # a table of lengths comes first: the pickle's, then each buffer's
TRACED: Final = 4  # the metadata line carries the trace context of the enqueue
RAW: Final = 8  # a bytes object as it is
GROWING: Final = 16  # announced before all of it was there, see mq_stream
SPARE: Final = 32  # in the spare place of the ring, not in the slot

ALIGNMENT: Final = 64  # slots and overflow segments begin on a cache line
LARGE_BYTES: Final = 64 << 10  # what the pickler passes on uncopied
_BYTES_HEADER: Final = bytes.__basicsize__ - 1  # from the address of a bytes object to its first byte
_HEAP_BLOCK: Final = (
    16  # where, in a cache line, large blocks of malloc begin: arrays, and the bytearrays they are copied to
)

loads = pickle.loads


class _Pieces(list[Any]):
    """A file for the pickler: what it writes is kept as it comes, and large bytes objects come uncopied."""

    __slots__ = ()
    write = list.append


class MessagePickler:
    """A pickler that is used again and again (making one costs more than pickling a small message).

    After `dump(obj)` and `clear_memo()` the pickle lies in `pieces` and its out-of-band buffers in `buffers`, neither
    copied yet: they must be copied, and the lists emptied, before the caller gets his objects back.
    """

    __slots__ = ("buffers", "clear_memo", "dump", "pieces")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """After a failure: forget what was half written, and the objects that the memo holds."""
        self.pieces: list[Any] = _Pieces()
        self.buffers: list[pickle.PickleBuffer] = []
        pickler = pickle.Pickler(self.pieces, pickle.HIGHEST_PROTOCOL, buffer_callback=self.buffers.append)
        self.dump: Callable[[Any], None] = pickler.dump
        self.clear_memo: Callable[[], None] = pickler.clear_memo

    def take(self) -> tuple[list[Any], int]:
        """All that has to be copied for one message, in order, and OUT_OF_BAND or 0; empties both lists."""
        pieces = list(self.pieces)
        self.pieces.clear()
        if not self.buffers:
            return _aligned(pieces), 0
        raw = [buffer.raw() for buffer in self.buffers]
        self.buffers.clear()
        # What follows the end of a pickle is not looked at.
        start = 8 * (2 + len(raw)) + sum(map(len, pieces))
        pieces.append(bytes((_HEAP_BLOCK - start) % ALIGNMENT))
        return [_table([sum(map(len, pieces)), *map(len, raw)]), *pieces, *raw], OUT_OF_BAND


def _aligned(pieces: list[Any]) -> list[Any]:
    """With the first large bytes object where its copy has the same place in a cache line as itself.

    A copy whose ends differ in that takes longer. Where they are 1 to 15 bytes apart, but for whole pages, AMD's string
    instructions, with which glibc copies up to the size of the second-level cache, take thirteen times as long.
    """
    start = 0
    for piece in pieces:
        if type(piece) is bytes and len(piece) >= LARGE_BYTES:
            padding = (id(piece) + _BYTES_HEADER - start) % ALIGNMENT
            if padding:
                # A short bytes object that is popped again; with its opcodes it takes 3 bytes at least.
                filling = padding - 3 if padding >= 3 else padding - 3 + ALIGNMENT
                pieces.insert(0, b"C" + bytes((filling, *bytes(filling))) + b"0")
            break
        start += len(piece)
    return pieces


def _table(lengths: Sequence[int]) -> bytes:
    return struct.pack(f"<{1 + len(lengths)}Q", len(lengths), *lengths)


def decode(kind: int, view: memoryview) -> Any:
    """The object in `view`, which must be exactly the message. Copies all it needs; the view is released.

    Deviation from vLLM: out-of-band buffers are copied; there an array is a view of a slot that will be written again.
    """
    with view:
        if kind & RAW:
            return bytes(view)
        if not kind & OUT_OF_BAND:
            return loads(view)
        (count,) = struct.unpack_from("<Q", view)
        lengths = struct.unpack_from(f"<{count}Q", view, 8)
        start = 8 * (1 + count)
        parts = []
        for length in lengths:
            # bytearray, not bytes: an array that could be written on the other side can be written on this one.
            parts.append(bytearray(view[start : start + length]))
            start += length
        return loads(parts[0], buffers=parts[1:])
