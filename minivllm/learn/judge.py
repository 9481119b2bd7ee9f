"""Runs an exercise's check in processes of its own and says which invariant is broken; ends them all at a hard limit.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO

from minivllm.learn import kit
from minivllm.learn.exercise import Exercise

LIMIT_S = 60.0
# Importing a file defines functions and classes; torch, for those that need it, takes a second or two.
IMPORT_LIMIT_S = 10.0
# What a learner's prints may take of the screen.
OUTPUT_LINES = 20


class State(Enum):
    HOLDS = "holds"
    BROKEN = "broken"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Verdict:
    """What a check has found.

    Attributes:
        states: of each invariant, in order.
        why: what was seen of the first one that is broken, or why the file cannot be used; "" when all hold.
        output: the end of what the file has printed.
    """

    states: tuple[State, ...]
    why: str
    output: str

    @property
    def passed(self) -> bool:
        return not self.why and all(state is State.HOLDS for state in self.states)


def judge(
    exercise: Exercise, file: Path, limit_s: float = LIMIT_S, import_limit_s: float = IMPORT_LIMIT_S
) -> Verdict:
    """Try the invariants of `exercise` on the code in `file`; whatever that does, this returns.

    Args:
        limit_s: seconds after which every process of the check is killed; the limits inside are much shorter.
        import_limit_s: seconds that importing the file may take.
    """
    file = file.resolve()
    with tempfile.TemporaryDirectory(prefix="minivllm-learn-") as stacks, tempfile.TemporaryFile() as output:
        reader, writer = os.pipe()
        arguments = [exercise.name, str(file), stacks, str(writer), str(import_limit_s)]
        process = subprocess.Popen(
            [sys.executable, "-m", "minivllm.learn.inside", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[writer],
            env=_environment(),
        )
        os.close(writer)
        try:
            late = not _ends(process, limit_s * kit.slack())
            if late:
                _signal_group(process.pid, signal.SIGUSR1)
                time.sleep(0.3)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        with os.fdopen(reader, encoding="utf-8") as report:
            events = [json.loads(line) for line in report if line.endswith("\n")]
        line = _line_in(file, Path(stacks)) if late else ""
        return _verdict(exercise, events, _tail(output, file), limit_s if late else None, line)


def _environment() -> dict[str, str]:
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        # Python 3.11 and later: the directory in which the command was given is not a place to import from.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # A check that was cut short leaves semaphores, which Python's helper removes and remarks on.
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    }


def _ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_group(group: int, number: int) -> None:
    """To every process of the check, also when the first of them, whose group it is, has ended."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def _tail(output: IO[bytes], file: Path) -> str:
    output.seek(0)
    text = output.read().decode(errors="replace").replace(f"{file.parent}{os.sep}", "")
    return "\n".join(text.rstrip().splitlines()[-OUTPUT_LINES:])


def _line_in(file: Path, stacks: Path) -> str:
    """Where the learner's code is, from the stacks that the processes have written."""
    for path in sorted(stacks.iterdir()):
        if line := kit.innermost(kit.frames_of(path.read_text()), file):
            return line
    return ""


def _verdict(
    exercise: Exercise, events: list[list[str]], output: str, late_s: float | None, line: str
) -> Verdict:
    states = [State.NOT_TRIED] * len(exercise.invariants())
    held = sum(event == "held" for event, _ in events)
    states[:held] = [State.HOLDS] * held
    why = ""
    for event, text in events:
        if event == "broken":
            states[held], why = State.BROKEN, text
        elif event == "unusable":
            why = f"the file cannot be used: {text}"
    if not why and not any(event == "done" for event, _ in events):
        if held < len(states):
            states[held] = State.BROKEN
        why = "the check was ended by the code under test"
        if late_s is not None:
            why = f"nothing has happened for {late_s:g} s" + (f"; the code is at {line}" if line else "")
    return Verdict(tuple(states), why, output)
