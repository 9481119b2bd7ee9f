"""Shared memory of a group of ranks on one host, in which a rank that waits notices when a peer fails or dies.

vLLM 0.25.1: vllm/distributed/device_communicators/cpu_communicator.py (_CPUSHMDistributed)
Articles: part 2 §4.4

Layout of the segment: one cache line of state per rank, further lines of state as the user of the group wants them,
then data. The first word of a rank's line is `FAILED` once the rank has left a step by an exception.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import select
import threading
import time
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from minivllm.distributed.shm_sizes import LINE_BYTES, state_bytes
from minivllm.distributed.wakeup import CROWDED_S
from minivllm.tracing.deadlines import Patience

WORDS: Final = LINE_BYTES // 8  # 8-byte words in a line
FAILED: Final = -1  # in the first word of a rank's line
_PID: Final = 3  # index of the process id in a rank's line

_SPIN_S: Final = 0.002
_LOOKS: Final = range(4)  # between two yields
# To somebody else, see wakeup.MOST_YIELDS; more than there, as what follows is no sleep that a peer can end.
_MOST_YIELDS: Final = 10
_LONGEST_SLEEP_S: Final = 0.0005
_LOOK_FOR_DEATH_S: Final = 0.02

logger = logging.getLogger(__name__)
_fence_lock = threading.Lock()


class CollectiveError(RuntimeError):
    """A collective that can never finish: a peer died, failed or is late. Names the group, the peer and the cause."""


def fence() -> None:
    """What this thread wrote before is seen by others no later than what it writes after."""
    # Taking and releasing a lock is the one full memory barrier that Python offers. x86 would do without it, ARM may
    # show a peer the new sequence number before the data it announces.
    _fence_lock.acquire()
    _fence_lock.release()


class ShmSegment:
    """Shared memory of `size` bytes."""

    def __init__(self, path: Path, size: int, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                # Reserves the pages now: without it a full /dev/shm is a SIGBUS in the middle of a forward pass.
                os.posix_fallocate(fd, 0, size)
            self.memory = mmap.mmap(fd, size)
        except OSError:
            if create:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self.path = path

    def unlink(self) -> None:
        """Take the name away; the memory lives on until the last rank unmaps it, even after SIGKILL."""
        self.path.unlink(missing_ok=True)


class ShmGroup:
    """The segment, and the waiting on its state.

    Args:
        group: gloo group of the same ranks: carries the name of the segment, and whatever shared memory cannot.
        ranks: global ranks of the group, for messages.
        unique_name: name of the group, for messages.
        timeout_s: how long a rank waits for a peer.
        num_lines: lines of state besides the ranks' own.
        data_bytes: size of the rest.

    Attributes:
        transport: "shared memory", or why it is not used.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: list[int],
        rank_in_group: int,
        unique_name: str,
        timeout_s: float,
        num_lines: int,
        data_bytes: int,
    ) -> None:
        self.group = group
        self.ranks = ranks
        self.rank_in_group = rank_in_group
        self.world_size = len(ranks)
        self.unique_name = unique_name
        self.timeout_s = timeout_s
        self._peer_words = [r * WORDS for r in range(self.world_size) if r != rank_in_group]
        self._peer_fds: dict[int, int] = {}
        self._failure: str | None = None
        self._my_word = rank_in_group * WORDS
        self._data_start = state_bytes(self.world_size, num_lines)
        self._segment, self.transport = self._attach(self._data_start + data_bytes)

    def _attach(self, size: int) -> tuple[ShmSegment | None, str]:
        """Create or open the segment; all ranks use it or none does."""
        segment: ShmSegment | None = None
        name: list[str | None] = [None]
        error = ""
        directory = _shared_memory_directory()
        if self.rank_in_group == 0 and directory is not None:
            path = directory / f"minivllm-{os.getpid()}-{secrets.token_hex(4)}"
            try:
                segment = ShmSegment(path, size, create=True)
                name = [f"{_host_id()}:{path}"]
            except OSError as e:
                error = f"{path} cannot be reserved: {e.strerror}"
        dist.broadcast_object_list(name, src=self.ranks[0], group=self.group)
        host, _, file = (name[0] or "").partition(":")
        if self.rank_in_group and file and host == _host_id():
            try:
                segment = ShmSegment(Path(file), size, create=False)
            except OSError as e:
                error = f"{file} cannot be opened: {e.strerror}"
        if segment is not None:
            self._state = memoryview(segment.memory)[: self._data_start].cast("q")
            self._state[self._my_word + _PID] = os.getpid()
        # Also the barrier after which every rank has the segment open and every pid stands in it.
        attached = torch.tensor([segment is not None], dtype=torch.int32)
        dist.all_reduce(attached, op=dist.ReduceOp.MIN, group=self.group)
        if segment is not None and self.rank_in_group == 0:
            segment.unlink()
        if not attached.item():
            if error:
                logger.warning(
                    "collectives of group %s go through gloo, ten times slower: %s", self.unique_name, error
                )
            return None, f"gloo: {error or 'the ranks share no memory'}"
        assert segment is not None
        self._base = torch.frombuffer(segment.memory, dtype=torch.uint8)
        for word in self._peer_words:
            self._peer_fds[word] = _open_process(self._state[word + _PID])
        return segment, "shared memory"

    def _rank_of(self, peer_word: int) -> int:
        return self.ranks[peer_word // WORDS]

    def _wait(self, index: int, value: int, peer_word: int) -> None:
        """Return when the word at `index` of the state is `value` or more; the peer at `peer_word` writes it."""
        state, monotonic, sched_yield = self._state, time.monotonic, os.sched_yield
        start = now = monotonic()
        yields = _MOST_YIELDS
        # The first rounds decide the latency of a decode step. A peer may need this very core, hence the yield.
        while yields and now - start < _SPIN_S and state[peer_word] != FAILED:
            for _ in _LOOKS:
                if state[index] >= value:
                    return
            sched_yield()
            after = monotonic()
            if after - now > CROWDED_S:
                yields -= 1
            now = after
        pause, look, patience = 0.00002, start, Patience(self.timeout_s)
        while state[index] < value:
            now = monotonic()
            if state[peer_word] == FAILED:
                self._fail(f"rank {self._rank_of(peer_word)} failed in the middle of a step")
            if now - look > _LOOK_FOR_DEATH_S:
                look = now
                pid = state[peer_word + _PID]
                # Its last act may have been to write this word.
                if _process_has_ended(self._peer_fds[peer_word], pid) and state[index] < value:
                    self._fail(f"the process of rank {self._rank_of(peer_word)} (pid {pid}) has ended")
            if patience.left() < 0:
                self._fail(f"rank {self._rank_of(peer_word)} did not come within {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_SLEEP_S)

    def _describe(self) -> str:
        """What this rank is at, for messages: "collective 12"."""
        raise NotImplementedError

    def _fail(self, cause: str) -> None:
        self._failure = (
            f"{self._describe()} of group {self.unique_name} cannot finish on rank "
            f"{self.ranks[self.rank_in_group]}: {cause}"
        )
        # A peer that comes later must not go on alone.
        self._state[self._my_word] = FAILED
        raise CollectiveError(self._failure)

    def abort(self) -> None:
        """Tell the peers that this rank left a step by an exception, so that they fail now and not at a deadline.

        Ranks of which one has left out a collective would pair the wrong ones from then on: no further collective
        is possible.
        """
        if self._segment is not None and self._failure is None:
            self._failure = f"rank {self.ranks[self.rank_in_group]} of group {self.unique_name} failed before"
            self._state[self._my_word] = FAILED

    def close(self) -> None:
        """Unmap the segment; idempotent. Nothing can be exchanged afterwards."""
        if self._segment is None:
            return
        self._failure = self._failure or f"group {self.unique_name} is closed"
        self._state.release()
        del self._base
        for fd in self._peer_fds.values():
            if fd >= 0:
                os.close(fd)
        self._peer_fds.clear()
        # Tensors handed out may still point into the mapping; the last of them unmaps it.
        self._segment = None


def _shared_memory_directory() -> Path | None:
    directory = Path("/dev/shm")
    return directory if directory.is_dir() and os.access(directory, os.W_OK) else None


def _host_id() -> str:
    """The same for processes that share memory and process ids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}".replace(":", " ")
    except OSError:
        return "unknown"


def _open_process(pid: int) -> int:
    """A descriptor that becomes readable when the process ends, or -1 where there is no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _process_has_ended(fd: int, pid: int) -> bool:
    if fd >= 0:
        return bool(select.select([fd], [], [], 0)[0])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
