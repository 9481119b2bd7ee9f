"""A memory-mapped table of open spans: those that are not in the span log.

vLLM 0.25.1: none (spans of a killed process are lost)
Articles: part 2 §2.6

Steps of the lifecycle and the first of each kind, few of them. A SIGKILL leaves no time to write anything, so each
process keeps a small table in a file that it has mapped: what was stored there is in the page cache and outlives
the process. Attributes are not kept; who reads the run has the name, ids, times and the process, and for steps of the
lifecycle the start journal.

A span that has ended stays, with its end, until another one needs the slot, which is not before it is in the spool. So a
span that is in both is none that is missing, and one that is here only is one whose process was killed just then.

Header of 64 bytes: magic, u32 pid, u32 slots, i64 clock offset (wall minus monotonic, ns).
Slot of 64 bytes: u16 catalogue index (0: free), u16 unused, u32 thread id, u64 span id, u64 parent id,
u64 start and u64 end (monotonic ns; 0: it had not ended), 16 bytes trace id.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from pathlib import Path
from typing import NamedTuple

MAGIC = b"MVOPEN1\0"
SLOT_BYTES = 64
SLOT_SHIFT = 6
SLOTS = 4096
HEADER = struct.Struct("<8sIIq")
SLOT = struct.Struct("<HHIQQQQ16s")
OPEN_SLOT = struct.Struct("<H2xIQQQ8x16s")  # the same without an end
_END_WORD = 4
FREE = 0  # stored over the first byte of the index: the catalogue has fewer than 256 rows


class OpenTable:
    """The writer's side.

    A span takes a slot's number from `free` and packs OPEN_SLOT there; when it ends it stores the time into `ends`. Whoever
    has put the span into the spool gives the number back to `free`, and leaves the slot as it is. Slot numbers start at 1.
    What a full table has no room for goes to the start journal, at a system call each. The mapping is never closed but left
    to the garbage collector, since a thread may just be writing to it.

    Attributes:
        free: a stack of numbers of slots that nobody uses.
        ends: the end of each slot, by its number.
    """

    __slots__ = ("ends", "free", "memory")

    def __init__(self, path: Path, pid: int, clock_offset_ns: int) -> None:
        """Raises FileExistsError: there is one already; OSError: the file cannot be made, or the disk is full."""
        size = SLOT_BYTES * (SLOTS + 1)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            # Reserved: a store into a mapped page that the disk has no room for would be a SIGBUS.
            if sys.platform == "darwin":
                os.ftruncate(fd, size)  # macOS has nothing better
            else:
                os.posix_fallocate(fd, 0, size)
            self.memory = mmap.mmap(fd, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        HEADER.pack_into(self.memory, 0, MAGIC, pid, SLOTS, clock_offset_ns)
        self.ends = memoryview(self.memory).cast("Q")[_END_WORD :: SLOT_BYTES // 8]
        self.free = list(range(SLOTS, 0, -1))

    def take(self) -> int:
        """The number of a slot; 0: there is none."""
        try:
            return self.free.pop()
        except IndexError:
            return 0

    def release(self, slot: int) -> None:
        """Free the slot of a span that will be in another file."""
        self.memory[slot << SLOT_SHIFT] = FREE
        self.free.append(slot)


class TableEntry(NamedTuple):
    """One slot as a reader sees it. Times are on the wall clock; end_ns is 0 while the span is open.

    Attributes:
        attributes: what is known of its thread and place, as OTLP/JSON.
    """

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: str


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
        # Without a trace id: a kill came while the slot was being filled, before the step had begun.
        if 0 < index <= len(BY_INDEX) and any(trace_id):
            entries.append(
                TableEntry(
                    name=BY_INDEX[index - 1].name,
                    trace_id=trace_id.hex(),
                    span_id=f"{span_id:016x}",
                    parent_span_id=f"{parent_id:016x}" if parent_id else "",
                    start_ns=start_ns + offset_ns,
                    end_ns=end_ns + offset_ns if end_ns else 0,
                    attributes=f'{{"key":"thread.id","value":{{"intValue":"{thread_id}"}}}}',
                )
            )
    return entries
