"""What the checks of exercises are made of: processes and calls with a limit, and an error that says what is broken.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# spawn, like minivllm's own workers: a child has only what it was given.
context = multiprocessing.get_context("spawn")


@dataclass
class Place:
    """What every process of a check knows.

    Attributes:
        file: the learner's file.
        stacks: the directory in which a process writes its stack when it is asked to.
    """

    file: Path
    stacks: Path


place = Place(Path(), Path())


class Broken(Exception):
    """An invariant does not hold; the text says how that was seen."""


def slack() -> float:
    """By how much limits are stretched: this machine may have other things to do."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def start(function: Callable[..., object], *args: Any) -> BaseProcess:
    """Start `function(*args)` in a process of its own, which can be asked where it is (`where`)."""
    process = context.Process(target=_enter, args=(place.file, place.stacks, function, args), daemon=True)
    process.start()
    return process


def _enter(file: Path, stacks: Path, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    with answer_where(file, stacks):
        function(*args)


@contextmanager
def answer_where(file: Path, stacks: Path) -> Iterator[None]:
    """Have this process write its stack into a file of its own on SIGUSR1."""
    place.file, place.stacks = file, stacks
    # Not SIGTERM: that one's handler is the learner's matter.
    with (stacks / str(os.getpid())).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        yield


def where(process: BaseProcess) -> str:
    """`file:line in function` of the learner's code that a process is in; "" when it is in none."""
    path = place.stacks / str(process.pid)
    if not path.exists() or process.pid is None or process.exitcode is not None:
        return ""
    os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 1
    while not path.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.02)
    return innermost(frames_of(path.read_text()), place.file)


def frames_of(stack: str) -> list[tuple[str, str, str]]:
    """File, line and function of each frame that faulthandler has written, innermost first."""
    return re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)


def innermost(frames: list[tuple[str, str, str]], learners_file: Path) -> str:
    """`file:line in function` of the first of these frames that is in the learner's file; "" when none is."""
    for file, line, function in frames:
        if Path(file) == learners_file:
            return f"{Path(file).name}:{line} in {function}"
    return ""


def must_end(process: BaseProcess, limit_s: float, who: str) -> int:
    """Exit code of a process that must end by itself.

    Raises:
        Broken: it runs on.
    """
    process.join(limit_s * slack())
    if process.exitcode is None:
        line = where(process)
        process.kill()
        process.join()
        raise Broken(f"{who} still runs after {limit_s:g} s" + (f", at {line}" if line else ""))
    return process.exitcode


def end(*processes: BaseProcess) -> None:
    """Kill what is left of a check."""
    for process in processes:
        process.kill()
        process.join()


def within(limit_s: float, what: str, function: Callable[..., T], *args: Any) -> T:
    """What `function(*args)` returns or raises, if it does in time.

    Raises:
        Broken: it does not; `what` has begun the sentence that says so.
    """
    value: T = Call(function, *args).result(limit_s, what)
    return value


class Call:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._value = function(*args)
        except BaseException as error:
            self._error = error

    def returns_within(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def result(self, limit_s: float, what: str) -> Any:
        if not self.returns_within(limit_s * slack()):
            line = self._line()
            raise Broken(
                f"{what} does not return within {limit_s:g} s" + (f"; it is at {line}" if line else "")
            )
        if self._error is not None:
            raise self._error
        return self._value

    def _line(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)
        frames = []
        while frame is not None:
            frames.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
            frame = frame.f_back
        return innermost(frames, place.file)


def until(condition: Callable[[], object], limit_s: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit_s * slack()
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
