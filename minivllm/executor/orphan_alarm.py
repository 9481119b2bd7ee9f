"""The last resort against an orphan: ends the process even when no Python code can run in it.

vLLM 0.25.1: none (a worker inside a call outlives its parent)
Articles: part 2 §2.4.7, §4.3

The thread at the death pipe needs the GIL, and a call into C that never gives it up (a regular expression that
explodes, a broken extension) keeps it from running. The C library's own asynchronous read needs no Python: it waits
in a thread of the C library, and at EOF calls alarm(), whose signal ends the process.

PR_SET_PDEATHSIG would be simpler, but it fires when the parent's *thread* ends that started the process, and gives no
time to end in order.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_SIGEV_THREAD = 2


class _Sigevent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _Aiocb(ctypes.Structure):
    """glibc's struct aiocb on 64-bit machines."""

    _fields_ = (
        ("fildes", ctypes.c_int),
        ("lio_opcode", ctypes.c_int),
        ("reqprio", ctypes.c_int),
        ("buf", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("sigevent", _Sigevent),
        ("internal", ctypes.c_char * 32),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    )


# The C library writes into these for as long as the process lives.
_kept: list[Any] = []


def arm_orphan_alarm(fd: int, seconds: int) -> bool:
    """End this process `seconds` after EOF on the pipe `fd`; False where the C library is not glibc.

    Nobody may ever write to the pipe: this read would take it.
    """
    if sys.maxsize < 2**32 or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return False
    try:
        if not os.confstr("CS_GNU_LIBC_VERSION"):
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        aio_read = libc.aio_read
        alarm = ctypes.cast(libc.alarm, ctypes.c_void_p).value
    except (OSError, ValueError, AttributeError):
        return False
    buffer = ctypes.create_string_buffer(1)
    request = _Aiocb()
    request.fildes = fd
    request.buf = ctypes.addressof(buffer)
    request.nbytes = 1
    request.sigevent.value = seconds
    request.sigevent.notify = _SIGEV_THREAD
    request.sigevent.function = alarm
    _kept.extend((buffer, request))
    return bool(aio_read(ctypes.byref(request)) == 0)
