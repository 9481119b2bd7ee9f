"""A file that grows by mapped units: what is stored there is in the page cache and outlives the process.

vLLM 0.25.1: none
Articles: part 2 §2.6
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from pathlib import Path

logger = logging.getLogger(__name__)
UNIT_BYTES = 128 * 1024
_given_up: set[Path] = set()  # directories of which this has been said


def whole_units(size: int) -> int:
    return -(-size // UNIT_BYTES) * UNIT_BYTES


class MappedFile:
    """The writer's side.

    A full unit is replaced by the next and never used again, so that whoever still writes to it loses nothing. It is
    never unmapped by hand but left to the garbage collector, since a thread may just be writing to it.

    Attributes:
        start: where this process began to write: what one of the same role and pid has left there is not ours to
            overwrite, nor to remove.
        end: bytes that the units reach to, from the start of the file.
        lock: for whoever replaces a unit.
        failed: it can grow no more.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError: the file cannot be made."""
        self.path = path
        self.lock = threading.RLock()
        self.failed = False
        _given_up.discard(path.parent)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.start = self.end = whole_units(os.fstat(self._fd).st_size)

    def next_unit(self, size: int = UNIT_BYTES) -> mmap.mmap:
        """Make the file longer and map what is new. Raises as map_unit() does."""
        start = self.end
        self.end = start + size
        return self.map_unit(start, size)

    def map_unit(self, start: int, size: int) -> mmap.mmap:
        """Raises OSError: the disk is full; ValueError: the file is closed."""
        # Reserved first: a store into a mapped page that the disk has no room for would be a SIGBUS.
        if sys.platform == "darwin":
            os.ftruncate(self._fd, self.end)  # macOS has nothing better
        else:
            os.posix_fallocate(self._fd, start, size)
        # Pages that are there and dirty already are had for a third of what the file system takes when each of them is
        # first stored to, which would be in the middle of a step.
        os.pwrite(self._fd, bytes(size), start)
        memory = mmap.mmap(self._fd, size, offset=start)
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 0
        return memory

    def give_up(self, error: Exception) -> None:
        """A full disk costs the trace, never the run. Said once, whichever file of the directory meets it first."""
        self.failed = True
        if self.path.parent not in _given_up:
            _given_up.add(self.path.parent)
            logger.warning("the trace is incomplete: %s: %s", self.path, error)

    def whole(self) -> mmap.mmap:
        """All of the file, to be read."""
        return mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)

    def close(self) -> None:
        """Close the file; units that a thread may still be writing to stay mapped until it has let go of them."""
        os.close(self._fd)

    def remove(self) -> None:
        """Remove the file, unless another process had written to it before."""
        if not self.start:
            self.path.unlink(missing_ok=True)
