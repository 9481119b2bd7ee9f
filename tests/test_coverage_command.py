"""`minivllm spans --coverage`: what runs show, could not show and lack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import recorded
from trace_fixtures import Run, write_run

from minivllm.trace_store import TraceStore
from minivllm.trace_store.coverage import EXCUSED, MISSING, SHOWN, Coverage, conditions, cover
from minivllm.tracing.catalogue import SPANS

LIMIT_S = 60.0


def rows_of(*directories: Path) -> dict[str, Coverage]:
    stores = [TraceStore.open(directory) for directory in directories]
    return {row.spec.name: row for row in cover(stores, [d.parent.name for d in directories]).rows}


def spans(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", "spans", *args],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_every_condition_of_the_catalogue_can_be_judged() -> None:
    store = TraceStore.open(recorded())
    assert {spec.when for spec in SPANS.values()} - {""} == set(conditions(store))


def test_a_real_run_lacks_nothing_and_says_why_not() -> None:
    rows = rows_of(recorded())
    assert list(rows) == list(SPANS)
    assert not [name for name, row in rows.items() if row.status == MISSING]
    assert rows["rpc.call"].status == SHOWN and rows["rpc.call"].count > 5
    for name, reason in (
        ("worker.close_inherited_fds", "start method spawn, not fork"),
        ("dist.send", "pipeline parallel size 1"),
        ("worker.start_async_output_thread", "no async scheduling"),
        ("monitor.worker_died", "no worker died"),
        ("worker.exception", "no method raised on a worker"),
        ("runner.apply_grammar", "no request had a grammar"),
        ("runner.propose_draft", "no speculative decoding"),
        ("executor.terminate_sigkill", "no worker outlived SIGTERM"),
        ("model.forward", "a worker class of its own: counting_worker.CountingWorker"),
    ):
        assert (rows[name].status, rows[name].reasons) == (EXCUSED, (reason,)), name


def test_a_low_level_excuses_what_it_does_not_record() -> None:
    rows = rows_of(recorded(level="lifecycle"))
    assert rows["rpc.call"].reasons == ("recorded at level lifecycle",)
    assert not [name for name, row in rows.items() if row.status == MISSING]


def test_runs_add_up() -> None:
    healthy, killed = recorded(), recorded("rpc.execute@rank1#6=kill")
    rows = rows_of(healthy, killed)
    assert rows["monitor.worker_died"].status == SHOWN and rows["monitor.worker_died"].counts == (0, 1)
    assert rows["worker.shutdown"].status == SHOWN
    assert not [name for name, row in rows.items() if row.status == MISSING]


def test_what_a_run_should_have_shown_is_missing(tmp_path: Path) -> None:
    """The synthetic run is healthy and leaves out many steps."""
    rows = rows_of(write_run(tmp_path / "trace"))
    assert rows["worker.set_process_title"].status == MISSING
    assert rows["worker.init_device"].status == SHOWN
    assert rows["dist.all_reduce"].status == MISSING, "two ranks, level message"
    done = spans("--coverage", str(tmp_path / "trace"))
    assert done.returncode == 1 and "worker.set_process_title" in done.stdout.split("\nmissing")[1]


def test_unknown_names_are_reported(tmp_path: Path) -> None:
    run = Run(tmp_path / "trace")
    run.process("client", None, 7, "minivllm.client").span("worker.lunch", 0, 1)
    report = cover([TraceStore.open(run.write())], ["x"])
    assert report.unknown == ["worker.lunch"] and not report.complete


def test_the_command() -> None:
    done = spans("--coverage", str(recorded()), str(recorded("rpc.execute@rank1#6=kill")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 are missing" in done.stdout and "could not be shown" in done.stdout
    data = json.loads(spans("--coverage", str(recorded()), "--json").stdout)
    assert data["complete"] and [row["name"] for row in data["steps"]] == list(SPANS)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--coverage", "/nowhere"], "is not a directory"),
        (["--coverage", ".", "--name", "x"], "leave --name"),
    ],
)
def test_bad_input(args: list[str], said: str) -> None:
    done = spans(*args)
    assert done.returncode == 2 and said in done.stderr
