"""Collectives between ranks of one host through shared memory; large tensors go through gloo.

vLLM 0.25.1: vllm/distributed/device_communicators/cpu_communicator.py (CpuCommunicator, _CPUSHMDistributed)
Articles: part 1 §5, part 2 §4.4

A decode step of a small model makes a dozen collectives of a few kilobytes each. gloo takes 60 to 100 microseconds
for one of them, a copy into shared memory and a flag take about ten.

Layout of the segment: one cache line of state per rank (`_SEQUENCE`, `_BYTES`), then two banks of one buffer per
rank. Collective number n uses bank n % 2:

1. A rank writes its contribution into its buffer of bank n % 2, and only then sets its sequence number to n.
2. A rank reads the others' buffers only after it has seen their sequence numbers at n or later.
3. A rank writes bank n % 2 again in collective n + 2. To get there it has seen everyone's n + 1, which a rank
   sets only after it has finished reading bank n % 2. So one wait per collective is enough.
4. Every rank adds the contributions in the order of ranks, so that all get the same bits.
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
from torch import Tensor

_LINE: Final = 64
_SEQUENCE: Final = 0  # index of the sequence number in a rank's line, in 8-byte words
_BYTES: Final = 1  # bytes of the contribution in bank 0, then in bank 1
_PID: Final = 3
_WORDS: Final = _LINE // 8
_FAILED: Final = -1  # as sequence number: this rank has left a collective by an exception

MAX_BYTES: Final = 1 << 20  # contribution of one rank; what is larger goes through gloo
_SPIN_S: Final = 0.002
_LONGEST_SLEEP_S: Final = 0.0005
_LOOK_FOR_DEATH_S: Final = 0.02
_MAX_CACHED_VIEWS: Final = 256

logger = logging.getLogger(__name__)
_fence_lock = threading.Lock()


class CollectiveError(RuntimeError):
    """A collective that can never finish: a peer died, failed or is late. Names the group, the peer and the cause."""


def _fence() -> None:
    # Taking and releasing a lock is the one full memory barrier that Python offers. x86 would do without it, ARM may
    # show a peer the new sequence number before the data it announces.
    _fence_lock.acquire()
    _fence_lock.release()


def _shared_memory_directory() -> Path | None:
    directory = Path("/dev/shm")
    return directory if directory.is_dir() and os.access(directory, os.W_OK) else None


class ShmSegment:
    """Shared memory of one group: state lines and two banks of buffers."""

    def __init__(self, path: Path, world_size: int, create: bool) -> None:
        size = world_size * (_LINE + 2 * MAX_BYTES)
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
        self.data_start = world_size * _LINE

    def unlink(self) -> None:
        """Take the name away; the memory lives on until the last rank unmaps it, even after SIGKILL."""
        self.path.unlink(missing_ok=True)


class _Views:
    """Tensors over the buffers of one bank for one shape: this rank's own, and all ranks' in order."""

    __slots__ = ("all", "mine")

    def __init__(self, mine: Tensor, all_ranks: list[Tensor]) -> None:
        self.mine = mine
        self.all = all_ranks


class CpuCommunicator:
    """Collectives of one group of ranks on CPU tensors.

    Args:
        group: gloo group of the same ranks: carries large tensors, and the name of the segment.
        ranks: global ranks of the group, for messages.
        unique_name: name of the group, for messages.
        timeout_s: how long a rank waits for a peer in one collective.

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
    ) -> None:
        self.group = group
        self.ranks = ranks
        self.rank_in_group = rank_in_group
        self.world_size = len(ranks)
        self.unique_name = unique_name
        self.timeout_s = timeout_s
        self._peer_words = [r * _WORDS for r in range(self.world_size) if r != rank_in_group]
        self._peer_fds: dict[int, int] = {}
        self._sequence = 0
        self._failure: str | None = None
        self._views: dict[tuple[torch.Size, torch.dtype], tuple[_Views, _Views]] = {}
        self._my_word = rank_in_group * _WORDS
        self._segment, self.transport = self._attach()

    def _attach(self) -> tuple[ShmSegment | None, str]:
        """Create or open the segment; all ranks use it or none does."""
        segment: ShmSegment | None = None
        name: list[str | None] = [None]
        error = ""
        directory = _shared_memory_directory()
        if self.rank_in_group == 0 and directory is not None:
            path = directory / f"minivllm-{os.getpid()}-{secrets.token_hex(4)}"
            try:
                segment = ShmSegment(path, self.world_size, create=True)
                name = [f"{_host_id()}:{path}"]
            except OSError as e:
                error = f"{path} cannot be reserved: {e.strerror}"
        dist.broadcast_object_list(name, src=self.ranks[0], group=self.group)
        host, _, file = (name[0] or "").partition(":")
        if self.rank_in_group and file and host == _host_id():
            try:
                segment = ShmSegment(Path(file), self.world_size, create=False)
            except OSError as e:
                error = f"{file} cannot be opened: {e.strerror}"
        if segment is not None:
            self._state = memoryview(segment.memory)[: segment.data_start].cast("q")
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

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Sum over the ranks, in place, with the same bits on every rank. `input_` must be contiguous.

        Raises:
            CollectiveError: a peer died, failed, is late, or is at a different collective.
        """
        size = input_.nbytes
        if size > MAX_BYTES or self._segment is None:
            dist.all_reduce(input_, group=self.group)
            return input_
        parts = self._exchange(input_, size)
        torch.add(parts[0], parts[1], out=input_)
        for part in parts[2:]:
            input_.add_(part)
        return input_

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along `dim`, in the order of ranks. `input_` must be contiguous.

        Raises:
            CollectiveError: as all_reduce.
        """
        size = input_.nbytes
        if size > MAX_BYTES or self._segment is None:
            parts = [torch.empty_like(input_) for _ in self.ranks]
            dist.all_gather(parts, input_, group=self.group)
            return torch.cat(parts, dim)
        return torch.cat(self._exchange(input_, size), dim)

    def _exchange(self, input_: Tensor, size: int) -> list[Tensor]:
        if self._failure is not None:
            raise CollectiveError(self._failure)
        views = self._views.get((input_.shape, input_.dtype))
        if views is None:
            views = self._make_views(input_)
        self._sequence = sequence = self._sequence + 1
        parity = sequence & 1
        bank = views[parity]
        bank.mine.copy_(input_)
        state, word = self._state, self._my_word
        state[word + _BYTES + parity] = size
        _fence()
        state[word] = sequence
        for peer_word in self._peer_words:
            if state[peer_word] < sequence:
                self._wait(peer_word, sequence)
        _fence()
        for peer_word in self._peer_words:
            if state[peer_word + _BYTES + parity] != size:
                self._fail(
                    f"rank {self._rank_of(peer_word)} brings {state[peer_word + _BYTES + parity]} bytes and this "
                    f"rank {size}: the ranks run different programs"
                )
        return bank.all

    def _rank_of(self, peer_word: int) -> int:
        return self.ranks[peer_word // _WORDS]

    def _make_views(self, input_: Tensor) -> tuple[_Views, _Views]:
        assert self._segment is not None
        if len(self._views) >= _MAX_CACHED_VIEWS:
            # Prefill brings a new shape nearly every time; the few shapes of decode come back at once.
            self._views.clear()
        size, start = input_.nbytes, self._segment.data_start
        banks = []
        for bank in range(2):
            first = start + bank * self.world_size * MAX_BYTES
            offsets = (first + rank * MAX_BYTES for rank in range(self.world_size))
            parts = [self._base[o : o + size].view(input_.dtype).view(input_.shape) for o in offsets]
            banks.append(_Views(parts[self.rank_in_group], parts))
        views = self._views[(input_.shape, input_.dtype)] = (banks[0], banks[1])
        return views

    def _wait(self, word: int, sequence: int) -> None:
        """Return when the peer whose state begins at `word` has reached collective `sequence`."""
        state, monotonic, sched_yield = self._state, time.monotonic, os.sched_yield
        start = monotonic()
        while monotonic() - start < _SPIN_S and state[word] != _FAILED:
            # The first rounds decide the latency of a decode step. A peer may need this very core, hence the yield.
            for _ in range(64):
                sched_yield()
                if state[word] >= sequence:
                    return
        pause, look = 0.00002, start
        while state[word] < sequence:
            now = monotonic()
            if state[word] == _FAILED:
                self._fail(f"rank {self._rank_of(word)} failed in the middle of a step")
            if now - look > _LOOK_FOR_DEATH_S:
                look = now
                pid = state[word + _PID]
                # Its last act may have been to finish this collective.
                if _process_has_ended(self._peer_fds[word], pid) and state[word] < sequence:
                    self._fail(f"the process of rank {self._rank_of(word)} (pid {pid}) has ended")
            if now - start > self.timeout_s:
                self._fail(f"rank {self._rank_of(word)} did not come within {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_SLEEP_S)

    def _fail(self, cause: str) -> None:
        self._failure = (
            f"collective {self._sequence} of group {self.unique_name} cannot finish on rank "
            f"{self.ranks[self.rank_in_group]}: {cause}"
        )
        # A peer that comes later must not go on alone.
        self._state[self._my_word] = _FAILED
        raise CollectiveError(self._failure)

    def abort(self) -> None:
        """Tell the peers that this rank left a step by an exception, so that they fail now and not at a deadline.

        Ranks of which one has left out a collective would pair the wrong ones from then on: no further collective
        is possible.
        """
        if self._segment is not None and self._failure is None:
            self._failure = f"rank {self.ranks[self.rank_in_group]} of group {self.unique_name} failed before"
            self._state[self._my_word] = _FAILED

    def close(self) -> None:
        """Unmap the segment; idempotent. No collective is possible afterwards."""
        if self._segment is None:
            return
        self._failure = self._failure or f"group {self.unique_name} is closed"
        self._views.clear()
        self._state.release()
        del self._base
        for fd in self._peer_fds.values():
            if fd >= 0:
                os.close(fd)
        self._peer_fds.clear()
        # Tensors handed out may still point into the mapping; the last of them unmaps it.
        self._segment = None


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
