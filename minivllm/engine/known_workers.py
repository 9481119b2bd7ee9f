"""The client's last look at the workers: none outlives the engine, not even one that EngineCore left stopped.

vLLM 0.25.1: none (such a worker stays)
Articles: part 2 §2.4.7
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
from collections.abc import Iterable

from minivllm import envs, tracing
from minivllm.executor.leftovers import remove_leftovers

_KILL_S = 2.0


def open_pidfd(pid: int | None) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is no such thing."""
    if sys.platform == "linux" and pid is not None:
        try:
            return os.pidfd_open(pid)
        except OSError:
            pass
    return -1


class KnownWorkers:
    """Descriptors of the worker processes, which go on meaning the same process when its number is used again."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def add(self, pids: Iterable[int]) -> None:
        """Take note of processes; 0 stands for one that is not there yet."""
        for pid in pids:
            if pid and pid not in self._fds and (fd := open_pidfd(pid)) >= 0:
                self._fds[pid] = fd

    def end(self) -> None:
        """Return when none is left, after EngineCore is gone: an orphan ends by itself, unless it is stopped."""
        # The last thing that ends an orphan is an alarm, in whole seconds.
        left = self._wait(max(1, math.ceil(envs.MINIVLLM_WORKER_ORPHAN_GRACE_S)) + 0.5)
        for pid in left:
            signal.pidfd_send_signal(self._fds[pid], signal.SIGKILL)
        self._wait(_KILL_S)
        for pid in left:
            remove_leftovers(pid)

    def _wait(self, limit_s: float) -> list[int]:
        """Those that are still there after at most `limit_s`."""
        left, patience = dict(self._fds), tracing.Patience(limit_s)
        while left and (remaining := patience.left()) > 0:
            poller = select.poll()
            for fd in left.values():
                poller.register(fd, select.POLLIN)
            ended = {fd for fd, _ in poller.poll(remaining * 1000)}
            left = {pid: fd for pid, fd in left.items() if fd not in ended}
        return list(left)

    def close(self) -> None:
        """Give the descriptors back."""
        while self._fds:
            os.close(self._fds.popitem()[1])
