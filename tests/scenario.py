"""Runs the body of a test in a process of its own: with a hard limit, a dump of all stacks, and a look for leaks.

    @scenario(limit_s=20)
    def test_something() -> None: ...

Under pytest the function has scenario_server.py fork a process, in which the body runs, and waits. A failed or late body
shows its output and the stacks of all its processes. Afterwards nothing may be left: no process, no shared memory, no
temporary directory, no descriptor that was not there before.
"""

from __future__ import annotations

import concurrent.futures
import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parent
_INSIDE = "MINIVLLM_TEST_SCENARIO"
DUMP_SIGNAL = signal.SIGUSR2


def scenario(
    limit_s: float = 30.0, leaks: bool = True, env: dict[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test in a process of its own.

    Args:
        limit_s: after so long all its processes dump their stacks and are killed, and the test fails.
        leaks: check that nothing is left behind.
        env: additional environment.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            assert not args
            if os.environ.get(_INSIDE) == f"{body.__module__}.{body.__name__}":
                body(**kwargs)
            else:
                run(body.__module__, body.__name__, kwargs, limit_s, leaks, env)

        return wrapper

    return decorate


def run(
    module: str,
    name: str,
    kwargs: dict[str, Any],
    limit_s: float,
    leaks: bool,
    env: dict[str, str] | None = None,
) -> str:
    """Run a function in a process of its own; returns its output.

    Raises:
        AssertionError: it failed, was late, or left something behind; with its output.
    """
    environment = {**os.environ, _INSIDE: f"{module}.{name}", **(env or {})}
    with tempfile.TemporaryFile() as log:
        process = Server.running().fork(module, name, kwargs, leaks, environment, log.fileno())
        code = wait_limited(process, limit_s * slack())
        log.seek(0)
        output = log.read().decode(errors="replace")
    if code is None:
        raise AssertionError(f"{name} took longer than {limit_s} s\n{output}")
    if code == 77:
        import pytest

        pytest.skip(output.strip().splitlines()[-1])
    if code != 0:
        raise AssertionError(f"{name} failed (exit code {code})\n{output}")
    return output


def run_limited(command: list[str], env: dict[str, str], limit_s: float) -> tuple[str, int | None]:
    """Output (stdout and stderr) and exit code of a command; None when it was ended at the limit, with all stacks."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=TESTS.parent)
        code = wait_limited(process, limit_s)
        log.seek(0)
        return log.read().decode(errors="replace"), code


def wait_limited(process: subprocess.Popen[bytes] | Forked, limit_s: float) -> int | None:
    """Exit code; None when the process was ended at the limit, after it and all below it have dumped their stacks."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            _signal(member.pid, DUMP_SIGNAL)
        time.sleep(1.0)
        for member in family:
            _signal(member.pid, signal.SIGKILL)
        process.wait(None)
        return None


class Forked:
    """A process that the server has forked, and reaps."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.pid: int = connection.recv()

    def wait(self, timeout: float | None) -> int:
        if not self._connection.poll(timeout):
            raise subprocess.TimeoutExpired("scenario", timeout or 0)
        code: int = self._connection.recv()
        self._connection.close()
        return code


class Server:
    """The client's end of the process that forks scenarios."""

    _running: Server | None = None

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        # Settings of the test that happens to come first are not for all the others.
        env = {name: value for name, value in os.environ.items() if not name.startswith("MINIVLLM_")}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(TESTS / "scenario_server.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=env,
                cwd=TESTS.parent,
            )

    @classmethod
    def running(cls) -> Server:
        if cls._running is None:
            cls._running = Server()
        return cls._running

    @classmethod
    def stop(cls) -> None:
        """End the server, if there is one."""
        if cls._running is not None:
            cls._running._socket.close()
            cls._running._process.wait(30)
            cls._running = None

    def fork(
        self, module: str, name: str, kwargs: dict[str, Any], leaks: bool, env: dict[str, str], log: int
    ) -> Forked:
        ours, theirs = Pipe(duplex=False)
        with theirs:
            request = json.dumps([module, name, kwargs, leaks, env]).encode()
            socket.send_fds(self._socket, [len(request).to_bytes(4, "big")], [theirs.fileno(), log])
            self._socket.sendall(request)
        return Forked(ours)


def _signal(pid: int, number: int) -> None:
    """Only to processes that have faulthandler on it or die of it anyway; they are all of this test's family."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def slack() -> float:
    """By how much time limits are stretched: this machine may have other things to do."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Skip(Exception):
    """The scenario cannot run here; the text says why."""


# --- inside -------------------------------------------------------------------------------------------------------


def children() -> list[psutil.Process]:
    """Processes below this one, without Python's own helpers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if is_gone(process):
            continue
        if "resource_tracker" not in command and "forkserver" not in command:
            found.append(process)
    return found


def zombies() -> list[int]:
    return [
        process.pid for process in psutil.Process().children() if process.status() == psutil.STATUS_ZOMBIE
    ]


def is_gone(process: psutil.Process) -> bool:
    """Ended, whether or not whoever inherited it has reaped it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("minivllm-*")} if os.path.isdir("/dev/shm") else set()


def own_segments() -> set[str]:
    """Segments made by this process or its children: others run on this machine, too."""
    pids = {str(os.getpid()), *(str(process.pid) for process in children())}
    return {name for name in segments() if name.split("-")[1] in pids}


def rendezvous_directories() -> set[str]:
    pattern = f"minivllm-rendezvous-{os.getpid()}-*"
    return {path.name for path in Path(tempfile.gettempdir()).glob(pattern)}


def descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], Any], limit_s: float, what: str) -> float:
    """Seconds until the condition held; fails at the limit, stretched by `slack`."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > limit_s * slack():
            raise AssertionError(f"{what}: not within {limit_s} s")
        time.sleep(0.005)
    return time.monotonic() - started


def in_threads(count: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body(i)` returned or raised in each of `count` threads that began at the same moment."""
    barrier = threading.Barrier(count)

    def run(index: int) -> Any:
        barrier.wait()
        try:
            return body(index)
        except BaseException as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class Caught:
    """What `raises` has caught."""

    error: BaseException
    seconds: float

    @property
    def text(self) -> str:
        return str(self.error)


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], *parts: str, within_s: float | None = None
) -> Iterator[Caught]:
    """The block must raise `kind`, with all `parts` in its text, within so many seconds."""
    caught = Caught()
    started = time.monotonic()
    try:
        yield caught
    except kind as error:
        caught.error, caught.seconds = error, time.monotonic() - started
    else:
        raise AssertionError(f"{kind} was not raised")
    for part in parts:
        assert part in caught.text, f"{part!r} is not in {caught.text}"
    assert within_s is None or caught.seconds <= within_s * slack(), f"took {caught.seconds:.2f} s"


def _look_for_leaks(before: dict[str, str]) -> None:
    gc.collect()
    wait_until(lambda: not children(), 3.0, f"processes are left: {children()}")
    assert not zombies(), f"zombies are left: {zombies()}"
    pid = os.getpid()
    left = {name for name in segments() if name.split("-")[1] == str(pid)}
    assert not left, f"shared memory is left: {left}"
    assert not rendezvous_directories(), f"directories are left: {rendezvous_directories()}"
    # The helpers of multiprocessing keep one pipe each.
    new = {fd: target for fd, target in descriptors().items() if before.get(fd) != target}
    assert len(new) <= 3, f"descriptors are left: {new}"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    threads = [name for name in threads if name != "minivllm-trace"]
    assert not threads, f"threads are left: {threads}"


def run_inside(module: str, name: str, kwargs: dict[str, Any], leaks: bool) -> int:
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    body = getattr(importlib.import_module(module), name)
    before = descriptors()
    try:
        body(**kwargs)
        if leaks:
            _look_for_leaks(before)
    except Skip as reason:
        print(reason)
        return 77
    except BaseException:
        traceback.print_exc()
        if "minivllm.tracing" in sys.modules:
            sys.stderr.flush()
        return 1
    return 0
