"""The set of runs that shows every step of the catalogue: nothing is missing, and nothing has to be excused."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from minivllm.timeline import VIEWS, build_views, meetings
from minivllm.timeline.render import Timeline
from minivllm.timeline.run import Run
from minivllm.trace_store import TraceStore
from minivllm.trace_store.coverage import SHOWN, cover

pytest.importorskip("llguidance", reason="the extra `structured` is not installed: no grammars")

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "walkthroughs" / "every_step.py"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("every-step") / "traces"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--trace", str(directory)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (directory.parent / "said.txt").write_text(done.stdout)
    return directory


def test_each_run_leads_to_a_walkthrough() -> None:
    chapters = re.findall(r'Run\(\w+, "(\w+)"', SCRIPT.read_text(encoding="utf-8"))
    assert len(chapters) >= 9
    assert not [name for name in chapters if not (ROOT / "walkthroughs" / f"{name}.py").is_file()]


def test_every_step_is_shown(traces: Path) -> None:
    runs = sorted(traces.iterdir())
    report = cover([TraceStore.open(run) for run in runs], [run.name for run in runs])
    assert not report.unknown
    assert not {row.spec.name: (row.status, row.reasons) for row in report.rows if row.status != SHOWN}
    assert "0 could not be shown, 0 are missing" in (traces.parent / "said.txt").read_text()


def test_each_run_is_what_it_says(traces: Path) -> None:
    def store(name: str) -> TraceStore:
        return TraceStore.open(traces / name)

    for name in ("spawn", "fork", "forkserver"):
        methods = {s.get("start_method") for s in store(name).spans("executor.make_worker_process")}
        assert methods == {name}
    assert store("async-pipeline").spans("worker.start_async_output_thread")
    assert store("raise").spans("worker.exception")
    killed = store("kill")
    assert killed.first_failure() is not None and killed.spans("monitor.worker_died")
    levels = {
        name: [
            level
            for level in ("graceful", "sigterm", "sigkill")
            if store(name).spans(f"executor.terminate_{level}")
        ]
        for name in ("calls", "hang", "stubborn")
    }
    assert levels == {
        "calls": ["graceful"],
        "hang": ["graceful", "sigterm"],
        "stubborn": ["graceful", "sigterm", "sigkill"],
    }


def test_the_command_agrees(traces: Path) -> None:
    done = subprocess.run(
        [
            *[sys.executable, "-m", "minivllm.cli.main", "spans", "--coverage"],
            *map(str, sorted(traces.iterdir())),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 could not be shown, 0 are missing" in " ".join(done.stdout.split())


def test_a_stage_waits_for_what_another_one_sends(traces: Path) -> None:
    run = Run(TraceStore.open(traces / "async-pipeline"))
    received = run.all("dist.recv")
    sent = meetings.collectives(run, received)
    assert received and len(sent) == len(received)
    for recv in received:
        send = sent[recv.span_id]
        assert (send.rank, send.get("what")) == (recv.get("src"), recv.get("what"))
        assert send.start_ns <= recv.end_ns
    assert len({s.span_id for s in sent.values()}) == len(received)


@pytest.mark.parametrize(
    ("name", "view", "said"),
    [
        ("raise", "failure", "the executor went on: the next call succeeded"),
        ("hang", "shutdown", "the workers closed down one after another, "),
        (
            "hang",
            "shutdown",
            "rank 1 did not leave in time when the death pipes were closed, and got SIGTERM",
        ),
        (
            "hang",
            "failure",
            "no step failed; rank 1 ended after SIGTERM (exit code 143), when all were to end",
        ),
        ("stubborn", "shutdown", "ranks 0 and 1 had to be killed"),
        ("spawn", "shutdown", "the workers closed down side by side, "),
    ],
)
def test_timelines_tell_what_became_of_whom(traces: Path, name: str, view: str, said: str) -> None:
    assert said in " / ".join(build_views(TraceStore.open(traces / name), [view])[0].explanation)


def test_nothing_is_cut_off_at_eighty_columns(traces: Path) -> None:
    for trace in sorted(traces.iterdir()):
        for view in build_views(TraceStore.open(trace), list(VIEWS)):
            console = Console(file=io.StringIO(), width=80, highlight=False)
            console.print(Timeline(view, styled=False))
            lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
            assert not [line for line in lines if "…" in line and "≈" not in line], (trace.name, view.name)
