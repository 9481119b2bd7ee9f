"""Run one cell of the crash matrix: start a caller with a failpoint that kills one process, and look at what follows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
CALLER = Path(__file__).with_name("caller.py")
TAG_NAME = "MINIVLLM_CRASH_CELL"
LIMIT_S = 60.0
# How long after the death the caller may still be without an error, or the others alive.
BOUND_S = 1.0


@dataclass(frozen=True, order=True)
class Cell:
    """One place to die: the span, and the process that enters it.

    Attributes:
        who: "client", "engine", "rank0" or "rank1".
        phase: "up" while the engine starts or runs, "stop" while it is being shut down.
        light: whether a worker without a model is enough to reach the span.
        nth: at which entry of the span; the first ones of a step's spans are part of the warm-up.
    """

    span: str
    who: str
    phase: str
    light: bool
    nth: int = 1

    @property
    def id(self) -> str:
        return f"{self.span}@{self.who}" + (f"#{self.nth}" if self.nth > 1 else "")


@dataclass
class Outcome:
    """What followed from one kill. Times are wall-clock nanoseconds.

    Attributes:
        error: what the caller was told ("" when it was told nothing).
        error_at_ns: when.
        caller_code: exit code of the caller; negative for a signal.
        last_exit_at_ns: when the last process of the run was gone.
        left: processes, segments and sockets that were still there after BOUND_S and a grace.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    stderr: str = ""
    caller_code: int = 0
    caller_exit_at_ns: int = 0
    last_exit_at_ns: int = 0
    left: list[str] = field(default_factory=list)
    timed_out: bool = False

    def event(self, name: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event["event"] == name), None)


def run_cell(cell: Cell | None, trace_dir: Path, temp_dir: Path) -> Outcome:
    """Run the caller with the cell's failpoint (None: without) until every process is gone, at most LIMIT_S."""
    tag = uuid.uuid4().hex
    env = {
        **os.environ,
        TAG_NAME: tag,
        "TMPDIR": str(temp_dir),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONFAULTHANDLER": "1",
        "MINIVLLM_TRACE": "rpc",
        "MINIVLLM_FAILPOINTS": f"{cell.id}=kill" if cell else "",
    }
    command = [sys.executable, str(CALLER), str(trace_dir), *(["light"] if cell and cell.light else [])]
    outcome = Outcome()
    # Files, not pipes: a pipe would stay open as long as any orphan lives, and the orphan is what we look for.
    out_path, err_path = temp_dir / "out", temp_dir / "err"
    with out_path.open("wb") as out, err_path.open("wb") as err:
        caller = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL
        )
    try:
        outcome.caller_code = caller.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        outcome.timed_out = True
        end(tagged(tag))
        outcome.caller_code = caller.wait()
    outcome.caller_exit_at_ns = time.time_ns()
    grace = time.monotonic() + 2 * BOUND_S
    while alive := tagged(tag):
        if time.monotonic() > grace:
            outcome.left += [describe(process) for process in alive]
            end(alive)
            break
        time.sleep(0.01)
    outcome.last_exit_at_ns = time.time_ns()
    outcome.left += sorted(segments_of({caller.pid, *pids_in(trace_dir)}))
    outcome.left += [str(path) for path in temp_dir.rglob("*") if path.is_socket()]
    outcome.stderr = err_path.read_text(errors="replace")
    outcome.events = [json.loads(line) for line in out_path.read_text().splitlines() if line.startswith("{")]
    return outcome


def pids_in(trace_dir: Path) -> set[int]:
    """Process ids of a run, from the names of its trace files (<role>-<pid>.jsonl)."""
    return {int(path.name.split(".")[0].rpartition("-")[2]) for path in trace_dir.glob("*-*.jsonl")}


def segments_of(pids: set[int]) -> set[str]:
    """Shared memory that these processes have made and left: minivllm-<pid>-<random>."""
    return {str(path) for path in Path("/dev/shm").glob("minivllm-*") if int(path.name.split("-")[1]) in pids}


def tagged(tag: str) -> set[psutil.Process]:
    """Living processes of this cell, whoever their parent is now."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG_NAME) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
        except (psutil.Error, OSError):
            continue
    return found


def describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return f"process {process.pid}"


def end(processes: set[psutil.Process]) -> None:
    """SIGABRT first, which makes faulthandler print every stack to stderr, then SIGKILL."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        for process in processes:
            try:
                process.send_signal(number)
            except psutil.Error:
                continue
        time.sleep(0.5)
