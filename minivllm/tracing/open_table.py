"""A memory-mapped flight recorder: the spans that are open.

vLLM 0.25.1: none (spans of a killed process are lost)
Articles: part 2 §2.6

A SIGKILL leaves no time to write anything, and one line in a journal per RPC would cost more than the RPC. So each
process keeps a small table in a file that it has mapped: what was stored there is in the page cache and outlives
the process. Attributes are not kept; who reads the run has the name, ids, times and the process.

Header of 64 bytes: magic, u32 pid, u32 slots, i64 clock offset (wall minus monotonic, ns).
Slot of 64 bytes: u16 catalogue index (0: free), u16 unused, u32 thread id, u64 span id, u64 parent id,
u64 start and u64 end (monotonic ns; 0: it had not ended), 16 bytes trace id.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

MAGIC = b"MVOPEN1\0"
SLOT_BYTES = 64
SLOTS = 4096
HEADER = struct.Struct("<8sIIq")
SLOT = struct.Struct("<HHIQQQQ16s")
OPEN_SLOT = struct.Struct("<H2xIQQQ8x16s")  # the same without an end
FREE = 0  # stored over the first byte of the index: the catalogue has fewer than 256 rows


class OpenTable:
    """The writer's side: `memory` is the mapping, `free` a stack of the offsets of slots that nobody uses.

    The hot path takes an offset from `free`, packs OPEN_SLOT there, and stores FREE and gives the offset back when the span
    has ended and is in the spool. A full table drops what does not fit: such a span is still recorded, but a kill
    while it is open would lose it. The mapping is never closed but left to the garbage collector, since a thread may
    just be writing to it.
    """

    __slots__ = ("free", "memory")

    def __init__(self, path: Path, pid: int, clock_offset_ns: int) -> None:
        size = SLOT_BYTES * (SLOTS + 1)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, size)
            self.memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        HEADER.pack_into(self.memory, 0, MAGIC, pid, SLOTS, clock_offset_ns)
        self.free = list(range(SLOTS * SLOT_BYTES, 0, -SLOT_BYTES))

    def release(self, slot: int) -> None:
        """Free the slot of a span that is in the file."""
        self.memory[slot] = FREE
        self.free.append(slot)


class TableEntry(NamedTuple):
    """One slot as a reader sees it. Times are on the wall clock; end_ns is 0 while the span is open."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    thread_id: int


def read_table(path: Path) -> list[TableEntry]:
    """Read the table of a living or dead process; an absent or foreign file gives an empty list."""
    from minivllm.tracing.catalogue import BY_INDEX

    try:
        data = path.read_bytes()
    except OSError:
        return []
    if len(data) < SLOT_BYTES or data[: len(MAGIC)] != MAGIC:
        return []
    offset_ns = HEADER.unpack_from(data)[3]
    entries = []
    for position in range(SLOT_BYTES, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        index, _, thread_id, span_id, parent_id, start_ns, end_ns, trace_id = SLOT.unpack_from(data, position)
        if 0 < index <= len(BY_INDEX):
            entries.append(
                TableEntry(
                    name=BY_INDEX[index - 1].name,
                    trace_id=trace_id.hex(),
                    span_id=f"{span_id:016x}",
                    parent_span_id=f"{parent_id:016x}" if parent_id else "",
                    start_ns=start_ns + offset_ns,
                    end_ns=end_ns + offset_ns if end_ns else 0,
                    thread_id=thread_id,
                )
            )
    return entries
