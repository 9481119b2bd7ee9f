"""Memory that large messages are received into: kept by the allocator, and not given back to the kernel after each of them.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.2

Each reader gets an object of its own, which is dropped soon after. When two of 1 MB lie at the end of the heap (the answers of two
ranks do), glibc gives their pages back, and the next two are cleared and mapped again, page by page: several times the time of the
copies. Left alone, it learns from large blocks that are freed to keep more; this tells it what it would have learnt at most.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_KEPT_BYTES: Final = 32 << 20  # glibc takes no more
_VARIABLES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> None:
    """Have this process keep up to 64 MiB that it has freed. Nothing happens where the user or the platform decides on that.

    Called at the first large message, since a process that gets none has no reason to keep anything.
    """
    if any(name in os.environ for name in _VARIABLES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_KEPT_BYTES)
