"""Waiting for a byte in shared memory: poll for a moment, then sleep in the kernel until somebody wakes you.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (SpinCondition, memory_fence), vllm/distributed/utils.py (sched_yield)
Articles: part 2 §2.5.2
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from minivllm.distributed.shared_core import SharedCore, current_core
from minivllm.tracing.deadlines import deadline_clock
from minivllm.tracing.ended import ended, write_ended

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine())
_FUTEX_WAIT: Final = 0  # the shared variants: the word is found by its page, not by this process's address
_FUTEX_WAKE: Final = 1
_HAS_FUTEX: Final = sys.platform == "linux" and _SYS_FUTEX is not None and sys.maxsize > 2**32
_POLL_S: Final = 0.0005  # length of a nap where there is no futex
FLAG_OFFSET: Final = 4  # of the flag "somebody sleeps", from the wake word

# Stores become visible in program order on x86 (total store order) and loads are done in program order; elsewhere a
# fence has to stand between a message and the flag that announces it.
WEAK_MEMORY_ORDER: Final = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")

_fence_lock = threading.Lock()


def memory_fence(
    _acquire: Callable[[], object] = _fence_lock.acquire, _release: Callable[[], None] = _fence_lock.release
) -> None:
    """Order this process's earlier loads and stores before its later ones, as other processes see them.

    By convention only: Python promises nothing about memory shared between processes. Taking and releasing a lock
    works because of the instructions inside: an atomic read-modify-write, which on x86 is a full barrier, and on ARM
    acquires and releases. The only order that ARM's pair leaves open is a store before a load of something else, and
    the sleepers' periodic re-check bounds what that can cost.
    """
    _acquire()
    _release()


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_int64), ("tv_nsec", ctypes.c_int64))


if _HAS_FUTEX:
    # A CDLL call gives up the GIL: the other threads of a sleeping process go on.
    _syscall = ctypes.CDLL(None, use_errno=True).syscall

    def futex_wait(address: int, expected: int, timeout_s: float) -> None:
        """Sleep while the 32-bit word at `address` is `expected`, at most `timeout_s`. May return early."""
        seconds = int(timeout_s)
        pause = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
        _syscall(
            _SYS_FUTEX,
            ctypes.c_void_p(address),
            _FUTEX_WAIT,
            ctypes.c_uint32(expected),
            ctypes.byref(pause),
            None,
            0,
        )

    def futex_wake(address: int) -> None:
        """Wake everybody, in any process, who sleeps on the word at `address`."""
        _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

else:

    def futex_wait(address: int, expected: int, timeout_s: float) -> None:
        """Nap for half a millisecond: this platform has no futex, so a sleeper looks again by itself."""
        time.sleep(min(timeout_s, _POLL_S))

    def futex_wake(address: int) -> None:
        """Nothing to do: sleepers look again by themselves."""


class SpinCondition:
    """One direction of waking: the readers of a ring wait on one, its writer on another.

    In the segment it owns a 32-bit wake word and, 4 bytes on, a flag "somebody sleeps". The orders that matter, checked
    in every interleaving (ring_model.py):

        1. A sleeper reads the wake word, then raises the flag, then (after a fence) looks at the ring once more, and
           only then sleeps, and only while the wake word is still what it read.
        2. A waker changes the ring, then (after a fence) looks at the flag; when it is up, lowers it, then (after a
           fence) changes the wake word, then wakes. No system call while nobody sleeps.
        3. Every waker stores values of its own into the wake word. Counting it up would be a load and a store: a slow
           waker would bring an old value back, which a sleeper takes for "nothing has happened".
        4. A sleeper looks again by itself at least every `RECHECK_S` (`IDLE_RECHECK_S` when it waits for work without
           a limit), so a wake-up that is lost all the same costs a moment and not the system.

    Deviation from vLLM: there a reader spins for a full second after each message, its wake-up is a lossy pub/sub
    socket written for every message, nothing looks again, and a writer cannot sleep at all. Spinning is done by yields
    there, as many as fit into the time; here a wait sleeps after a few that somebody else took up.
    """

    RECHECK_S: Final = 0.05
    IDLE_RECHECK_S: Final = 0.25

    __slots__ = ("_address", "_mm", "_values", "_word", "flag", "spin_s")

    def __init__(self, mm: mmap.mmap, offset: int, waker: int, wakers: int) -> None:
        """Waker number `waker` of `wakers` processes, on the word at `offset`."""
        self._mm = mm
        self._word = offset
        self._values = itertools.count(wakers + waker, wakers)
        self.flag = offset + FLAG_OFFSET
        self.spin_s = 0.0
        # An address instead of a pointer object: the latter would keep the mapping from being closed.
        anchor = ctypes.c_char.from_buffer(mm, offset)
        self._address = ctypes.addressof(anchor)
        del anchor

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: float | None,
        patience: Callable[[], Callable[[], None]],
        sleeping: int,
        idle: bool = False,
    ) -> int:
        """Return when `ready()` is true; the result is the time slept, in nanoseconds.

        Args:
            deadline: deadline_clock() after which there is no point in polling or sleeping.
            patience: asked for, when it comes to sleeping, a function that is called before each sleep and ends the
                wait by raising (deadline passed, queue closed, peer dead).
            sleeping: offset of this waiter's own "I sleep" byte, for those who look at the ring from outside.
            idle: waiting for work that need not come: look again less and less often.
        """
        global _checks
        # A first look before anything is set up: in a quick exchange the answer is on its way already.
        for _ in _checks:
            if ready():
                return 0
        if ended:
            write_ended()
        now = time.monotonic()
        limit = now + self.spin_s
        if deadline is not None:
            limit = min(limit, now + deadline - deadline_clock())
        yields = MOST_YIELDS
        while now < limit and yields:
            _sched_yield()
            after = time.monotonic()
            # A yield that took long ran somebody else: with more processes than cores, polling is what keeps the peer
            # from answering.
            if after - now > CROWDED_S:
                _checks = _CROWDED
                yields -= 1
                yields -= shared_core.taken_up(after, after - now, yields)
            else:
                _checks = _ALONE
            for _ in _checks:
                if ready():
                    return 0
            now = time.monotonic()
        return self._sleep(ready, deadline, patience(), sleeping, idle)

    def _sleep(
        self,
        ready: Callable[[], bool],
        deadline: float | None,
        patience: Callable[[], None],
        sleeping: int,
        idle: bool,
    ) -> int:
        mm = self._mm
        started = time.perf_counter_ns()
        pause = self.RECHECK_S
        try:
            while True:
                word = int.from_bytes(mm[self._word : self._word + 4], sys.byteorder)
                mm[self.flag] = 1
                mm[sleeping] = 1
                memory_fence()
                if ready():
                    return time.perf_counter_ns() - started
                patience()
                nap = pause if deadline is None else max(0.0, min(pause, deadline - deadline_clock()))
                futex_wait(self._address, word, nap)
                if idle and pause < self.IDLE_RECHECK_S:
                    pause = min(pause * 1.5, self.IDLE_RECHECK_S)
        finally:
            mm[sleeping] = 0

    def notify(self) -> None:
        """Wake all sleepers. The hot path looks at the flag itself and calls this only when it is up."""
        mm = self._mm
        mm[self.flag] = 0
        memory_fence()
        mm[self._word : self._word + 4] = (next(self._values) & 0xFFFFFFFF).to_bytes(4, sys.byteorder)
        futex_wake(self._address)


_ALONE: Final = range(40)
_CROWDED: Final = range(3)
CROWDED_S: Final = 2e-6  # a yield to nobody takes less than 1 µs, one to another process at least 3
# Yields to somebody else in one wait. Each costs a slice of 3 ms in the scheduler's books, however short it was, and a process that
# has run up a debt gets nothing until others have used as much. Linux 6.18, four processes on a core that yield so often before
# they sleep: when two others begin to compute, they stand still for 570 ms after 200 yields, 63 after 20, 35 after 10, 20 after 5.
MOST_YIELDS: Final = 5


def _yield_taken_up() -> bool:
    """Whether somebody else ran on this core meanwhile, and the calling thread is still there."""
    core, started = current_core and current_core(), time.monotonic()
    _sched_yield()
    return time.monotonic() - started > CROWDED_S and core == (current_core and current_core())


shared_core: Final = SharedCore(_yield_taken_up)
_checks = _ALONE  # looks between two yields, for all waits of this process


def crowded() -> bool:
    """Whether polling last took the core from somebody else: there are more busy processes than cores."""
    return _checks is _CROWDED


_sched_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))
