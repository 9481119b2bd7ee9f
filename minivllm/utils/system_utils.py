"""What a process needs to know about processes: how to start them, how to name them, how they ended.

vLLM 0.25.1: vllm/utils/system_utils.py (get_mp_context, set_process_title, decorate_logs)
Articles: part 2 §2.0, §2.4.14, §2.7
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from types import FrameType
from typing import Any, TextIO

from minivllm import envs
from minivllm.exceptions import ConfigError

PROCESS_NAME_PREFIX = "minivllm"

# Threads of ours that may run while a process forks: a child touches none of their locks before it has reset them.
OWN_THREADS = ("minivllm-", "MultiprocWorkerMonitor")

_PR_SET_TIMERSLACK = 29

MAIN_GUARD_EXIT_CODE = os.EX_CONFIG
MAIN_GUARD_ERROR = (
    "the program starts minivllm while it is being imported. Each new process imports the main module first, so the "
    "module must not start processes by itself: put the code that uses minivllm under `if __name__ == '__main__':`"
)

# Let another process have this core, if one is waiting for it (macOS has no such call).
yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: None)

MPContext = SpawnContext | ForkContext | ForkServerContext


def get_mp_context() -> MPContext:
    """The multiprocessing context that MINIVLLM_WORKER_MULTIPROC_METHOD asks for.

    Raises:
        ConfigError: unknown method, fork where a forked child could not work, or another one with a main module that
            a child could not import; the text says why.
    """
    method = envs.MINIVLLM_WORKER_MULTIPROC_METHOD
    # Deviation from vLLM: an explicit fork that cannot work is refused with the reason; vLLM changes it to spawn.
    if method == "fork" and (reasons := reasons_against_fork()):
        raise ConfigError(
            "MINIVLLM_WORKER_MULTIPROC_METHOD=fork cannot be used here: "
            + "; ".join(reasons)
            + ". Use spawn or forkserver"
        )
    if method != "fork":
        check_main_file()
    context: MPContext = multiprocessing.get_context(method)
    return context


def reasons_against_fork() -> list[str]:
    """Why a child forked from this process now might hang or crash; empty when nothing speaks against it."""
    reasons = []
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        reasons.append("CUDA is initialised in this process, and a CUDA context does not survive a fork")
    current = threading.current_thread()
    threads = [
        thread.name
        for thread in threading.enumerate()
        if thread is not current and not thread.name.startswith(OWN_THREADS)
    ]
    if threads:
        reasons.append(
            f"other threads are running ({', '.join(sorted(threads))}), and a lock that one of them holds stays "
            "locked in the child for ever"
        )
    return reasons


def check_main_guard() -> None:
    """End this process at once if it is a child that is only just importing the main module of its parent.

    Such a child has met a call that starts processes, because the parent's script lacks the `__main__` guard. It
    leaves with MAIN_GUARD_EXIT_CODE and says nothing; the parent sees the code and explains, once
    (`explain_exit`). Call this first in everything that starts processes.
    """
    # multiprocessing sets the attribute while it prepares a spawned process, and checks it itself in the same way.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # Not an exception: the script may catch those, and would go on to start itself once more.
        os._exit(MAIN_GUARD_EXIT_CODE)


def check_main_file() -> None:
    """Refuse a main module that a new process could not import again: a script that came through a pipe.

    Call this where a process is about to be started by spawn or forkserver; a fork imports nothing.

    Raises:
        ConfigError: says what to do instead.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    # multiprocessing imports it by its name where it has one, and not at all without a file (`python -c`, a REPL).
    if file is None or getattr(main, "__spec__", None) is not None:
        return
    # multiprocessing looks where the program was started, whatever the working directory is by now.
    origin: str | None = getattr(multiprocessing.process, "ORIGINAL_DIR", None)
    if not os.path.exists(os.path.join(origin or "", file)):
        raise ConfigError(
            f"the main module {file!r} is no file, and each new process imports it again: put the script into a file "
            "and run that"
        )


def explain_exit(exitcode: int | None) -> str:
    """How a process ended, in words that follow "worker rank 1 (pid 123) ": "was killed by SIGKILL"."""
    if exitcode is None:
        return "is still running"
    if exitcode < 0:
        return f"was killed by {_signal_name(-exitcode)}"
    if exitcode == MAIN_GUARD_EXIT_CODE:
        return f"could not be started: {MAIN_GUARD_ERROR}"
    if ended_by_signal(exitcode):
        return f"ended after {_signal_name(exitcode - 128)} (exit code {exitcode})"
    return f"exited with code {exitcode}"


def ended_by_signal(exitcode: int | None) -> bool:
    """Whether a signal ended the process, at once or by way of a handler that cleaned up."""
    return exitcode is not None and (exitcode < 0 or 128 < exitcode < 128 + 65)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# A terminal sends these to every process in the foreground, on Ctrl-C and when it is closed. What they mean is the
# client's business: a child that they ended would leave its shared memory behind.
TERMINAL_SIGNALS = frozenset({signal.SIGINT, signal.SIGHUP})


def leave_terminal_signals_to_parent() -> None:
    """In a child that undisturbed_start() started: ignore them, and unblock what it has blocked."""
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)


@contextmanager
def undisturbed_start(context: MPContext | None = None) -> Iterator[None]:
    """Start a child without any signal in between; what came meanwhile is handled afterwards.

    1. The child starts with SIGINT and SIGHUP blocked (the mask is inherited over fork and exec), so that a Ctrl-C,
       or the closing of the terminal, cannot hit it before it has a handler.
    2. The parent's handlers wait: one that raises between the child's exec and the last byte of what the child is to
       read would leave it to print a traceback. The mask alone does not help, as another thread may take the signal.

    Args:
        context: what starts the child; None when that is a fork.
    """
    if context is not None and context.get_start_method() != "fork":
        # Python starts its tracker of shared memory on the way to the first child, and unblocks SIGINT behind it.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    came: list[int] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (*TERMINAL_SIGNALS, signal.SIGTERM, signal.SIGUSR1):
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda signum, frame: came.append(signum))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for signum in came:
            handlers[signum](signum, None)


@contextmanager
def timer_slack(seconds: float) -> Iterator[None]:
    """Threads that are started in here let the kernel wake them so much later than they ask for (Linux; elsewhere no
    difference). What happens to their descriptors, locks and signals still wakes them at once.

    For libraries whose threads look at a flag a hundred times a second all their life: each look is short, but takes an
    idle core out of its sleep.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None:
        yield
        return
    # By value, as the variadic C function wants them. A thread starts with the slack of the one that starts it.
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(int(seconds * 1e9)), 0, 0, 0)
    try:
        yield
    finally:
        # Zero: back to what this thread itself started with.
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0), 0, 0, 0)


def find_place_of_title() -> None:
    """To be called before this process changes its environment.

    A title is written over the arguments, which are found by the first variable of the environment, right behind them. Once
    that variable has another value it is somewhere else, and titles would silently stay what they are.
    """
    import setproctitle

    setproctitle.getproctitle()


def set_process_title(name: str) -> None:
    """Show `minivllm::<name>` in ps and top."""
    import setproctitle

    setproctitle.setproctitle(f"{PROCESS_NAME_PREFIX}::{name}")


def open_standard_descriptors() -> None:
    """Put the null device in the place of a standard input, output or error that is closed (`minivllm … >&-`).

    To be called before anything else is opened. Otherwise the next pipe, socket or file gets that number, and what a
    child process prints goes into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is what is opened.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


class _LinePrefix:
    """Stands in for the `write` method of a stream and puts a prefix before each line."""

    def __init__(self, write: Callable[[str], int]) -> None:
        self._write = write
        self._at_line_start = True
        self.prefix = ""

    def __call__(self, text: str) -> int:
        if not text:
            return 0
        lines = text.splitlines(keepends=True)
        out = "".join(
            self.prefix + line if index or self._at_line_start else line for index, line in enumerate(lines)
        )
        self._at_line_start = text.endswith("\n")
        try:
            self._write(out)
        except (ValueError, OSError):
            # The terminal or the log collector is gone; a worker does not die of that.
            pass
        return len(text)


def decorate_logs(process_name: str) -> None:
    """Put `(Worker_TP1 pid=123) ` before each line that this process prints or logs; a later call changes the name."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _decorate(stream, f"({process_name} pid={os.getpid()}) ")


def _decorate(stream: TextIO, prefix: str) -> None:
    # The stream object is kept, since log handlers hold it already.
    write = stream.write
    if not isinstance(write, _LinePrefix):
        write = _LinePrefix(stream.write)
        stream.write = write  # type: ignore[method-assign]
    write.prefix = prefix


def configure_logging() -> None:
    """Send the records of `minivllm` loggers to stderr at MINIVLLM_LOG_LEVEL, unless the process has its own handlers."""
    root = logging.getLogger("minivllm")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
        root.addHandler(handler)
    root.setLevel(envs.MINIVLLM_LOG_LEVEL)
