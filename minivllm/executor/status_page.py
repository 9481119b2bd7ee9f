"""The status page: one line of shared memory per rank in which each worker says what it is doing.

vLLM 0.25.1: none (a rank that is late, stuck or dead is known by its number only)
Articles: part 2 §2.3.2, §2.3.7

It makes three things cheap. Every rank acknowledges every RPC with one store, so a failure on a rank that need not
reply is seen. A time-out can say what each missing rank is doing. A death can be reported with the open step.

The page has no name in any file system: nothing is left of it however its processes end.

A line, 256 bytes: 64 bytes of step board (minivllm.tracing.board), then 64-bit words, native byte order:

    pid | state | done | executing

and, for a process whose end began in the middle of something, a copy of the board at that moment: by the time the process is
gone all its steps have ended.

`done` holds two numbers so that one store publishes both: the sequence number of the last RPC that this rank has
finished (low 40 bits), and how many RPCs have failed on it (high 24 bits). A failure is counted in the same store
that says the RPC is finished, so whoever sees the one sees the other, on any CPU.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import context, reduction
from typing import Any

from minivllm import tracing

LINE_BYTES = 256
SEQUENCE_BITS = 40
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
FAILURE_MASK = (1 << (64 - SEQUENCE_BITS)) - 1

_WORDS_PER_LINE = LINE_BYTES // 8
_PID, _STATE, DONE, EXECUTING = (tracing.BOARD_BYTES // 8 + i for i in range(4))
_LAST_BOARD = 2 * tracing.BOARD_BYTES  # offset in a line; all zero: there is none

# A process that is leaving says so at once, and is gone after its clean-up. So long it is waited for before an error on
# another rank, which may be an effect of it, is taken for the cause.
LEAVE_S = 3.0


class WorkerState(IntEnum):
    """Where a worker process is in its life."""

    STARTING = 0  # the process has been started, worker_main not yet
    INITIALIZING = 1
    READY = 2
    RUNNING = 3  # in the busy loop
    ENDING = 4


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one rank is doing.

    Attributes:
        pid: process id, 0 before the process runs.
        open_spans: steps of the catalogue that are open, or were when the end of the process began; outermost first.
        finished: sequence number of the last RPC that it has finished.
        executing: sequence number of the RPC that it is executing, 0 when idle.
    """

    rank: int
    pid: int
    state: WorkerState
    open_spans: tuple[str, ...]
    finished: int
    executing: int

    @property
    def step(self) -> str:
        """The innermost open step."""
        if self.open_spans:
            return self.open_spans[-1]
        return "worker.bootstrap" if self.state == WorkerState.STARTING else "worker.main"


class StatusPage:
    """The page as executor and workers share it. Pickle it only as an argument of a process that is being started.

    Attributes:
        words: all lines as 64-bit words. Word `w` of rank `r` is `words[index(r, w)]`; loads and stores are atomic.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._fd = _anonymous_file(max(world_size * LINE_BYTES, mmap.PAGESIZE))
        self._map()

    def _map(self) -> None:
        self._mmap = mmap.mmap(self._fd, 0)
        self._bytes = memoryview(self._mmap)
        self.words = self._bytes.cast("Q")

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is None:
            raise TypeError("a StatusPage can be given to a process at its start only")
        return {"world_size": self.world_size, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.world_size = state["world_size"]
        self._fd = state["fd"].detach()
        self._map()
        self.close_descriptor()

    @staticmethod
    def index(rank: int, word: int) -> int:
        return rank * _WORDS_PER_LINE + word

    def board(self, rank: int) -> memoryview:
        """The step board of a rank, 64 bytes."""
        return self._bytes[rank * LINE_BYTES : rank * LINE_BYTES + tracing.BOARD_BYTES]

    def enter(self, rank: int) -> None:
        """In the worker: this process is `rank` from now on."""
        self.words[self.index(rank, _PID)] = os.getpid()
        tracing.attach_board(self.board(rank))

    def set_state(self, rank: int, state: WorkerState) -> None:
        self.words[self.index(rank, _STATE)] = state

    def begin_end(self, rank: int) -> None:
        """In the worker: something ends this process in the middle of what it is doing, which is kept for the report."""
        if not self.is_ending(rank):
            self._last_board(rank)[:] = self.board(rank)
            self.set_state(rank, WorkerState.ENDING)

    def is_ending(self, rank: int) -> bool:
        """Whether the process is on its way out, and will soon be gone."""
        return self.words[self.index(rank, _STATE)] == WorkerState.ENDING

    def _last_board(self, rank: int) -> memoryview:
        start = rank * LINE_BYTES + _LAST_BOARD
        return self._bytes[start : start + tracing.BOARD_BYTES]

    def status(self, rank: int) -> RankStatus:
        words = self.words
        finished = words[self.index(rank, DONE)] & SEQUENCE_MASK
        executing = words[self.index(rank, EXECUTING)]
        return RankStatus(
            rank=rank,
            pid=words[self.index(rank, _PID)],
            state=WorkerState(words[self.index(rank, _STATE)]),
            open_spans=tuple(
                tracing.read_board(self._last_board(rank)) or tracing.read_board(self.board(rank))
            ),
            finished=finished,
            executing=executing if executing > finished else 0,
        )

    def close_descriptor(self) -> None:
        """Once every process has its mapping the descriptor is of no more use."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _anonymous_file(size: int) -> int:
    """A descriptor of zeroed shared memory without a name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minivllm-status", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
