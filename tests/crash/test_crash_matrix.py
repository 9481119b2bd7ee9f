"""The crash matrix: kill a process inside a step, for every lifecycle and rpc step and every process that has it.

Each time: the caller is told which process died and in which step, or, when the caller itself is killed or is already
shutting down, everything else ends by itself; within a second of the death; nothing is left; and the merged trace
shows the step as unfinished.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm.trace_store import Span, TraceStore
from tests.crash import cells, report
from tests.crash.harness import BOUND_S, Cell, Outcome, run_cell

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180)]

# A span that lasts for a worker's whole life belongs to no thread; what the parent is in is the start of the worker.
SHOWN_AS = {"worker.process": "executor.make_worker_process"}
# The first word of the error that the caller gets when this process dies.
NAMES = {"engine": "EngineCore", "rank0": "rank 0", "rank1": "rank 1"}


@pytest.fixture
def temp_dir() -> Iterator[Path]:
    """Short, since a socket's path has at most 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="cm-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("cell", cells.CELLS, ids=lambda cell: cell.id)
def test_kill(cell: Cell, temp_dir: Path) -> None:
    trace_dir = temp_dir / "trace"
    outcome = run_cell(cell, trace_dir, temp_dir)
    said = f"\nevents: {outcome.events}\nstderr: {outcome.stderr[-3000:]}"
    assert not outcome.timed_out, f"the run never ended{said}"
    killed = unfinished(TraceStore.open(trace_dir), cell)
    assert killed is not None, f"the trace does not show {cell.id} as unfinished{said}"
    assert killed.unfinished and killed.is_error
    seconds = check(cell, outcome, time_of_death_ns(trace_dir, killed), said)
    assert not outcome.left, f"left behind: {outcome.left}{said}"
    assert seconds <= BOUND_S, f"{seconds:.2f} s from death to news{said}"
    report.add(cell, outcome, seconds)


def unfinished(store: TraceStore, cell: Cell) -> Span | None:
    role, rank = ("worker", int(cell.who[4:])) if cell.who.startswith("rank") else (cell.who, None)
    role = {"engine": "engine_core"}.get(role, role)
    spans = [s for s in store.spans(name=cell.span) if s.process.role == role and s.process.rank == rank]
    return next((s for s in spans if s.unfinished), None)


def time_of_death_ns(trace_dir: Path, killed: Span) -> int:
    """When the process last wrote to its trace: a failpoint writes down what is open, and then kills."""
    files = trace_dir.glob(f"{killed.process.role}-{killed.process.pid}.*")
    return max(path.stat().st_mtime_ns for path in files)


def check(cell: Cell, outcome: Outcome, death_ns: int, said: str) -> float:
    """Assert that the right one was told the right thing; returns the seconds between the death and the news."""
    if cell.who == "client":
        assert outcome.caller_code == -9, f"the caller was not killed{said}"
        return (outcome.last_exit_at_ns - outcome.caller_exit_at_ns) / 1e9
    down = outcome.event("down")
    assert down is not None, f"the caller did not get through{said}"
    error = outcome.event("error")
    if cell.phase == "stop":
        # A worker that dies while it is being ended has done what was asked; the caller need not hear of it.
        if error is not None:
            assert NAMES[cell.who] in error["text"], said
        return (down["at_ns"] - death_ns) / 1e9
    assert error is not None, f"the caller was told nothing{said}"
    assert NAMES[cell.who] in error["text"], f"the error does not name {NAMES[cell.who]}{said}"
    assert "SIGKILL" in error["text"], f"the error does not name the signal{said}"
    assert "could not import" not in error["text"], f"the error guesses wrong{said}"
    assert SHOWN_AS.get(cell.span, cell.span) in error["text"], f"the error does not name the step{said}"
    return (error["at_ns"] - death_ns) / 1e9


def test_cells_are_what_a_run_emits(temp_dir: Path) -> None:
    """The matrix has a cell for every lifecycle and rpc step of a TP=2 run, on every process that has it."""
    trace_dir = temp_dir / "trace"
    outcome = run_cell(None, trace_dir, temp_dir)
    assert outcome.caller_code == 0, outcome.stderr
    assert cells.emitted(TraceStore.open(trace_dir)) == {(cell.span, cell.who) for cell in cells.CELLS}


@pytest.fixture(scope="session", autouse=True)
def write_report(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a run of all cells, write docs/crash_matrix.md when asked to (CRASH_MATRIX=write)."""
    yield
    if os.environ.get("CRASH_MATRIX") == "write":
        report.write()
