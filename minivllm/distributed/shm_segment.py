"""Pieces of shared memory: reserved when they are made, unlinked as early as possible, found again when leaked.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (ShmRingBuffer.__init__, __del__)
Articles: part 2 §2.5.1

Deviation from vLLM: the standard library's SharedMemory is not used. Its resource tracker takes a segment that was
merely attached for one that leaked, and tmpfs hands out pages at first touch, so that a /dev/shm that is too small
kills a process with SIGBUS in the middle of a step.
"""

from __future__ import annotations

import _posixshmem
import errno
import fcntl
import mmap
import os
import secrets
import stat
import sys
import weakref
from collections.abc import Callable
from typing import Final

from minivllm.exceptions import ConfigError

SHM_DIR: Final = "/dev/shm"
_PREFIX: Final = "minivllm-"
_ANONYMOUS: Final = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class NotEnoughSharedMemory(ConfigError):
    """A segment for which /dev/shm has no room: what was found, and what to do."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found, advice)
        self.found, self.advice = found, advice

    def __str__(self) -> str:
        return f"{self.found}; {self.advice}"


class SharedSegment:
    """One mapped piece of shared memory.

    Invariants:
        1. All of its memory is reserved before any of it is mapped: a later write cannot fail. But for the spare bytes:
           they are reserved before they are first used, or not used.
        2. Only the process that created a name removes it without being asked (a forked copy does not).
        3. `close` is idempotent; the memory is gone when the last process has closed it and the name is unlinked.
    """

    __slots__ = ("__weakref__", "_fd", "_unlink", "mm", "name", "size")

    def __init__(self, name: str, fd: int, size: int, unlink: Callable[[], object] | None) -> None:
        self.name = name
        self.size = size
        self._fd = fd
        self.mm = mmap.mmap(fd, size)
        self._unlink = unlink

    @classmethod
    def create(cls, size: int, lower: str, anonymous: bool = False, spare: int = 0) -> SharedSegment:
        """A new zeroed segment of `size` bytes.

        Args:
            lower: what to make smaller when there is not enough memory (for the error's text).
            anonymous: without a name in /dev/shm, where the platform allows it. Other processes of this user open it
                by the descriptor of this process, so it can never be left behind and is not bounded by /dev/shm.
            spare: bytes behind the others that are mapped too, but take no memory before `reserve_spare`.

        Raises:
            NotEnoughSharedMemory: /dev/shm has less than `size` bytes left.
            ConfigError: the machine has no more memory for an anonymous one.
        """
        if anonymous and _ANONYMOUS:
            fd = os.memfd_create("minivllm", os.MFD_CLOEXEC)
            name, unlink = f"/proc/{os.getpid()}/fd/{fd}", None
        else:
            fd, name = _create_named()
            unlink = name
        try:
            _reserve(fd, size, spare, lower, unlink)
            segment = cls(name, fd, size + spare, None)
        except BaseException:
            os.close(fd)
            if unlink is not None:
                _unlink_name(unlink)
            raise
        if unlink is not None:
            # Runs at garbage collection and at exit. A forked child inherits the finalizer but not the duty.
            segment._unlink = weakref.finalize(segment, _unlink_if_owner, name, os.getpid())
        return segment

    @classmethod
    def attach(cls, name: str, size: int) -> SharedSegment:
        """Map an existing segment.

        Raises:
            FileNotFoundError: it is not there (any more), or is not the one that was meant.
        """
        try:
            if name.startswith("/"):
                # The descriptor of another process: O_NONBLOCK since a number that was reused for a pipe must not block.
                fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            else:
                fd = _posixshmem.shm_open("/" + name, os.O_RDWR, mode=0o600)
        except OSError as error:
            gone = "no such shared memory: its creator is gone, or all its readers have attached before"
            raise FileNotFoundError(errno.ENOENT, f"{gone} ({error.strerror})", name) from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size < size:
                raise FileNotFoundError(errno.ENOENT, "not a segment of the expected size", name)
            return cls(name, fd, size, None)
        except BaseException:
            os.close(fd)
            raise

    def reserve_spare(self, spare: int) -> bool:
        """Make the last `spare` bytes usable, in the process that made the segment; False: there is no memory for them."""
        try:
            if sys.platform != "darwin":
                os.posix_fallocate(self._fd, self.size - spare, spare)
        except OSError:
            return False
        return True

    def same_as_descriptor(self, pid: int, fd: int) -> bool:
        """Whether descriptor `fd` of process `pid` can be seen from here and is this segment."""
        try:
            return os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), os.fstat(self._fd))
        except OSError:
            return False

    @property
    def fd(self) -> int:
        return self._fd

    def unlink(self) -> None:
        """Remove the name, from whichever process. What is mapped stays; nobody can attach any more."""
        if self.name.startswith("/"):
            return
        if self._unlink is not None:
            self._unlink()
        else:
            _unlink_name(self.name)

    def close(self) -> None:
        """Unmap, and remove the name if this process made it. All views of `mm` must have been released."""
        if self._unlink is not None:
            self._unlink()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.mm.close()

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)


def _create_named() -> tuple[int, str]:
    while True:
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            fd = _posixshmem.shm_open("/" + name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        except FileExistsError:
            continue
        try:
            # Held until the last process that inherited it is gone: tells a live segment from a stale one even when
            # the creator's pid was given to somebody else or belongs to another pid namespace.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            pass
        return fd, name


def _reserve(fd: int, size: int, spare: int, lower: str, name: str | None) -> None:
    """Invariant 1. macOS has no posix_fallocate; there ftruncate reserves, and may be called only once for a segment."""
    try:
        if sys.platform == "darwin":
            os.ftruncate(fd, size + spare)
        else:
            os.posix_fallocate(fd, 0, size)
            if spare:
                os.ftruncate(fd, size + spare)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        if name is None:
            raise ConfigError(
                f"not enough memory: {size} bytes ({size / 2**20:.1f} MiB) are needed for a message; lower {lower}"
            ) from None
        free = free_bytes()
        known = "" if free is None else f", {free} bytes ({free / 2**20:.1f} MiB) are free"
        raise NotEnoughSharedMemory(
            f"not enough shared memory in {SHM_DIR}: {size} bytes ({size / 2**20:.1f} MiB) are needed for a message "
            f"queue{known}",
            f"lower {lower}, or enlarge {SHM_DIR} (docker run --shm-size=…)",
        ) from None


def free_bytes() -> int | None:
    """Bytes left in /dev/shm, or None where that cannot be asked."""
    try:
        state = os.statvfs(SHM_DIR)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def _unlink_name(name: str) -> None:
    try:
        _posixshmem.shm_unlink("/" + name)
    except FileNotFoundError:
        pass


def _unlink_if_owner(name: str, pid: int) -> None:
    if os.getpid() == pid:
        _unlink_name(name)


def list_stale_segments() -> list[str]:
    """Names in /dev/shm of segments whose creator is dead: what a SIGKILL before all readers had attached leaves.

    On platforms that cannot list shared memory the answer is empty.
    """
    try:
        names = os.listdir(SHM_DIR)
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(_PREFIX) and _is_stale(name))


def _is_stale(name: str) -> bool:
    pid = name[len(_PREFIX) :].split("-")[0]
    if not pid.isdigit() or _alive(int(pid)):
        return False
    try:
        fd = os.open(os.path.join(SHM_DIR, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _alive(pid: int) -> bool:
    """A zombie counts as dead: it holds nothing and will never unlink."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def clean_stale_segments() -> list[str]:
    """Remove what `list_stale_segments` finds; the names that were removed."""
    removed = []
    for name in list_stale_segments():
        try:
            os.unlink(os.path.join(SHM_DIR, name))
        except OSError:
            continue
        removed.append(name)
    return removed
