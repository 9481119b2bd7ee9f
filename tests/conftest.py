"""What holds for every test: one OpenMP thread, and a run that leaves anything behind fails.

Left behind means: a process that this run started (also one whose parent is gone), a `minivllm-*` segment in
/dev/shm, or a socket file. The failure names the test after which each was first seen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm_processes
from hypothesis import settings
from scenario import Server
from walkthrough_runs import Runs
from xdist.scheduler import LoadFileScheduling

from minivllm import tracing

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it puts into the background with Ctrl-C ignored, and every process below would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run; HYPOTHESIS_PROFILE=explore draws new ones, which are where the bugs are.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Every process that a test starts inherits this, so an orphan is recognised whoever its parent is now.
TAG_NAME = "MINIVLLM_TEST_RUN"
TAG = uuid.uuid4().hex
SHM = Path("/dev/shm")
GRACE_S = 5.0

_first_seen: dict[str, str] = {}


def _segments() -> set[str]:
    return {f"/dev/shm/{path.name}" for path in SHM.glob("minivllm-*")} if SHM.is_dir() else set()


def _sockets() -> set[str]:
    found = set()
    for path in Path(tempfile.gettempdir()).rglob("*"):
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                found.add(f"socket {path}")
        except OSError:  # removed meanwhile
            continue
    return found


def _processes() -> set[str]:
    """Living processes of this run other than itself, and its own zombies."""
    found = set()
    own = {child.pid for child in psutil.Process().children()}
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                if process.pid in own:
                    found.add(f"zombie {process.pid}")
                continue
            if process.environ().get(TAG_NAME) != TAG:
                continue
            command = " ".join(process.cmdline())
        except (psutil.Error, OSError):
            continue
        # Python's helper for shared memory; it ends with the process that it serves, which may be this one.
        if "multiprocessing.resource_tracker" not in command:
            found.add(f"process {process.pid}: {command[:160]}")
    return found


def _made_elsewhere(segment: str) -> bool:
    """Whether the process that made the segment (its id is in the name) lives, and is not of this run."""
    try:
        return psutil.Process(int(segment.split("-")[1])).environ().get(TAG_NAME) != TAG
    except (psutil.Error, OSError, ValueError):
        return False


def _children() -> set[str]:
    """Children of this process; from the kernel's list where there is one, since this is asked after each test."""
    lists = [*Path("/proc/self/task").glob("*/children")]
    if lists:
        found = set()
        for path in lists:
            # A thread may end at any moment; its children are then another thread's.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found |= {f"process {pid}" for pid in path.read_text().split()}
        return found
    return {f"process {child.pid}" for child in psutil.Process().children()}


class ByFile(LoadFileScheduling):
    """With `-n 2`: a file's tests run in one process, which keeps what the file has made.

    So do those of files that cannot do without each other, or not stand each other.
    """

    TOGETHER = (
        # They look at the same runs of the walkthroughs.
        ("test_docs.py", "test_every_step.py", "test_walkthroughs.py"),
        # They remove all segments of dead processes, and count on some of their own.
        ("test_cli.py", "test_shm_broadcast.py", "test_shm_broadcast_processes.py"),
    )

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return next((files[0] for files in self.TOGETHER if file.endswith(files)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_runtest_logfinish(nodeid: str) -> None:
    for thing in _segments() | _children():
        _first_seen.setdefault(thing, nodeid)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the run when it leaves a process, a shared-memory segment or a socket file."""
    os.environ[TAG_NAME] = TAG
    # A directory of our own for temporary files, short because a socket's path has at most 107 characters.
    previous = os.environ.get("TMPDIR")
    home = tempfile.mkdtemp(prefix="mv-")
    os.environ["TMPDIR"] = tempfile.tempdir = home
    before = _segments()
    yield
    warm_processes.stop()
    Server.stop()
    deadline = time.monotonic() + GRACE_S
    while True:
        left = _processes() | _sockets() | {s for s in _segments() - before if not _made_elsewhere(s)}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    tempfile.tempdir = previous
    if previous is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = previous
    lines = [f"  {thing} (first seen after {_origin(thing)})" for thing in sorted(left)]
    assert not left, "the run left behind:\n" + "\n".join(lines)
    _remove(home)


def _origin(thing: str) -> str:
    return _first_seen.get(thing) or _first_seen.get(thing.split(":")[0], "an unknown test")


def _remove(directory: str) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process start workers that have torch already, see warm_processes.py."""
    warm_processes.use(monkeypatch)


@pytest.fixture
def failpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets failpoints for the engines of this process, and takes them away from it again."""
    yield lambda points: monkeypatch.setenv("MINIVLLM_FAILPOINTS", points)
    monkeypatch.delenv("MINIVLLM_FAILPOINTS", raising=False)
    tracing.configure("client")


@pytest.fixture(scope="session")
def walkthrough(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs a walkthrough by its name, once in a session; every further test looks at the same run."""
    return Runs(tmp_path_factory.mktemp("walkthroughs"))
