"""The process in which a check runs: imports the learner's file, tries one invariant after the other, and reports.

vLLM 0.25.1: no counterpart
Articles: –

Whoever judges (judge.py) reads the report, a line of JSON per event, and ends this process and all its children at
the hard limit, whatever the learner's code does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from minivllm.learn import kit
from minivllm.learn.exercise import find


def main(name: str, file: str, stacks: str, report_fd: int, import_limit_s: float) -> None:
    """Try every invariant of an exercise on a file, up to the first that is broken, and end the process."""
    # Python's helper that removes semaphores of processes that are gone must outlive them: it stays in the group of
    # whoever judges, and everything else is in one that can be ended as a whole.
    resource_tracker.ensure_running()
    os.setpgid(0, 0)
    with (
        kit.answer_where(Path(file), Path(stacks)),
        os.fdopen(report_fd, "w", encoding="utf-8") as report,
    ):

        def say(event: str, text: str = "") -> None:
            report.write(json.dumps([event, text]) + "\n")
            report.flush()

        _try(name, say, import_limit_s)
        say("done")
    # A thread of the learner that is stuck must not keep this process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _try(name: str, say: Callable[..., None], import_limit_s: float) -> None:
    try:
        # At the end: a file of the learner that is called queue.py must not hide Python's.
        sys.path.append(str(kit.place.file.parent))
        with _limited(import_limit_s):
            module: Any = importlib.import_module(kit.place.file.stem)
    except BaseException as error:
        say("unusable", _describe(error))
        return
    for check in find(name).checks():
        try:
            check(module)
        except kit.Broken as error:
            say("broken", str(error))
            return
        except BaseException as error:
            say("broken", _describe(error))
            return
        say("held")


class _TooSlow(BaseException):
    """The learner's file is being imported for so long that it will not end."""


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Interrupt what Python code runs, or sleeps, inside for too long; what cannot be interrupted meets the hard limit."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise _TooSlow(f"importing it does not end within {limit_s:g} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s * kit.slack())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _describe(error: BaseException) -> str:
    """What was raised, and where in the learner's file."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, _TooSlow):
        text = str(error)
    if isinstance(error, SyntaxError):
        return f"{kit.place.file.name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        (frame.filename, str(frame.lineno), frame.name)
        for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    place = kit.innermost(frames, kit.place.file)
    if not place:
        traceback.print_exception(error)
    return f"{text} (at {place})" if place else text


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
