"""What the step-through answers to somebody who knows nothing of the code, from two runs in which rank 1 is held up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import recorded
from rich.cells import cell_len
from terminal_session import Session
from test_step import environment, process, step_of, walk_of

from minivllm.exceptions import ConfigError
from minivllm.stepper import History, Kind, Walk
from minivllm.stepper.help import help_lines
from minivllm.stepper.positions import find_position, hidden_remark, remark
from minivllm.stepper.screen import Screen
from minivllm.stepper.search import StepWords
from minivllm.stepper.source import find_place
from minivllm.stepper.words import Words
from minivllm.timeline import theme
from minivllm.tracing.catalogue import LIFECYCLE

START, CALL = "worker.init_worker@rank1=sleep:0.4", "rpc.execute@rank1#6=sleep:0.3"


@pytest.fixture(scope="module")
def directory() -> Path:
    """One run in which rank 1 is held while it starts, and once more in the sixth call."""
    return recorded(f"{START}; {CALL}")


@pytest.fixture(scope="module")
def walk(directory: Path) -> Walk:
    return walk_of(directory)


def failures(walk: Walk) -> list[int]:
    return [i for i in range(len(walk)) if walk[i].failed]


def shown(screen: Screen, index: int, columns: int = 140, rows: int = 45) -> str:
    return " ".join(" ".join(line.plain for line in screen.picture(index, columns, rows)).split())


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", "step", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**env),
        check=False,
    )


# --- what a failpoint holds up


def test_a_failpoint_says_for_how_long_and_who_waits(walk: Walk) -> None:
    screen = Screen(walk, "utf-8")
    first, second = failures(walk)
    for index, at_least in ((first, 0.4), (second, 0.3)):
        text = screen.explainer.failpoint(walk[index])
        assert "(sleeps 0." in text[0]
        held = re.fullmatch(r"held for (\d+) ms, until step ([\d,]+)", text[1])
        assert held is not None and int(held[1]) >= at_least * 1000
        until = int(held[2].replace(",", "")) - 1
        assert (
            walk[until].span.process.rank == 1 and walk[until].time_ns - walk[index].time_ns > at_least * 1e9
        )
        waiting = re.fullmatch(
            r"waiting for it then: (.*EngineCore \(since step .*client \(since step .*)", text[2]
        )
        assert waiting is not None, text
        for name, number in re.findall(r"(\w+) \(since step ([\d,]+)\)", waiting[1]):
            began = walk[int(number.replace(",", "")) - 1]
            assert walk.run.actor(began.span.process).name == name and began.index < until
        assert "held for" in shown(screen, index) and "waiting for it then" in shown(screen, index, 80, 24)


def test_a_failpoint_that_kills_holds_nobody() -> None:
    walk = walk_of(recorded("rpc.execute@rank1#6=kill"))
    assert walk.first_failure is not None
    screen = Screen(walk, "utf-8")
    assert len(screen.explainer.failpoint(walk[walk.first_failure])) == 1


def test_a_failure_is_found_at_every_level(walk: Walk, directory: Path) -> None:
    quiet = walk_of(directory)
    quiet.details = LIFECYCLE
    second = failures(walk)[1]
    assert quiet.next_failure(second - 1) == second == walk.next_failure(second - 1)
    assert "of level rpc" in hidden_remark(quiet, second) and not hidden_remark(walk, second)
    done = command(
        str(recorded("rpc.execute@rank1#6=kill")), "--level", "lifecycle", "--print", "--at", "failure"
    )
    assert done.returncode == 0 and "meets a failpoint" in done.stdout


# --- for whom they wait


def test_the_chain_of_waits_leads_to_the_rank_that_is_held(walk: Walk) -> None:
    words, history = Words(walk.run), History(walk)
    released = walk.next_of(process(walk, "worker", 1), failures(walk)[1])
    assert released is not None
    state = history.at(released - 1)
    engine, client = process(walk, "engine_core"), process(walk, "client")
    assert words.status(state, engine).text == "waits until rank 1 has finished sample_tokens #6"
    for waiting in (engine, client):
        assert f"rank 1 is held in rpc.execute by failpoint {CALL}" in words.chain(state, waiting)
    assert words.chain(state, client).startswith("EngineCore waits until rank 1 has")
    assert not words.chain(state, process(walk, "worker", 1)), "who is held waits for nobody"


def test_the_handshake_of_the_queues_names_whom_it_waits_for() -> None:
    walk = walk_of(recorded("worker.init_worker@rank1=sleep:1.5"))
    words, history = Words(walk.run), History(walk)
    assert walk.first_failure is not None
    released = walk.next_of(process(walk, "worker", 1), walk.first_failure)
    assert released is not None
    state, rank_0 = history.at(released - 1), process(walk, "worker", 0)
    status = words.status(state, rank_0)
    assert (status.text, status.note) == ("worker.mq_handshake", "waits for EngineCore")
    assert status.detail == "EngineCore waits for READY of rank 1"
    assert "rank 1 is held" in words.chain(state, rank_0)


def test_the_time_beside_a_process_is_that_of_what_is_named(walk: Walk) -> None:
    words, history, engine = Words(walk.run), History(walk), process(walk, "engine_core")
    begin = step_of(walk, "executor.wait_for_ready")
    note = step_of(walk, "executor.wait_for_ready", Kind.NOTE)
    end = step_of(walk, "executor.wait_for_ready", Kind.END)
    for index in (begin, note, end - 1):
        status = words.status(history.at(index), engine)
        assert status.since_ns == walk[begin].time_ns, f"{status} in step {index + 1}"
    client = words.status(history.at(0), process(walk, "client"))
    assert (client.kind, client.text) == ("working", "runs the script")


# --- searching and jumping


def test_what_the_screen_says_can_be_searched_both_ways(walk: Walk) -> None:
    screen = Screen(walk, "utf-8")
    told: list[int] = []
    words = StepWords(screen, told.append)
    for text in ("held", "waits", "waits for READY of rank", "rank 1", "mq.dequeue begins", "#6", "held for"):
        found = walk.search(text, -1, also=lambda step: words.of(step.index))
        assert found is not None, text
        assert walk.search(text, found + 1, False, lambda step: words.of(step.index)) == found
    assert told


def test_positions_are_read_as_they_are_printed_and_near_names_are_suggested(walk: Walk) -> None:
    assert remark(walk, "100s").startswith("the run ends at") and not remark(walk, "1ms")
    for text, said in (
        ("1,234,567", "no step 1,234,567"),
        ("rpc.call#0", "counts from 1"),
        ("rpc.cal", "near it: rpc.call"),
        ("rpc.execute#14@rank1", "write rpc.execute@rank1#14"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_position(walk, text)


def test_over_leads_forward_from_whatever_is_noted(walk: Walk) -> None:
    index = failures(walk)[0]
    end = walk.other_end(index)
    assert end is not None and end > index and walk[end].ends and walk[end].span is walk[index].span


# --- what fits


@pytest.mark.parametrize(("columns", "rows"), [(60, 15), (80, 24), (140, 45)])
def test_small_windows_keep_the_answer_and_the_way_out(walk: Walk, columns: int, rows: int) -> None:
    screen = Screen(walk, "utf-8")
    index = failures(walk)[1]
    lines = [line.plain for line in screen.picture(index, columns, rows)]
    assert lines[-1].startswith("? help  q quit")
    assert any("held by failpoint" in line for line in lines) and any("held for" in line for line in lines)
    if columns >= 80:
        assert CALL in " ".join(lines) and all(key in lines[-1] for key in ("o over", "u up", "Enter all"))
    for glyphs in (theme.UNICODE, theme.ASCII):
        text = help_lines(columns, glyphs)
        assert max(line.cell_len for line in text) <= columns
        assert text[0].plain.startswith("Why is a rank late?")


def test_in_ascii_the_panels_stay_where_they_are(walk: Walk) -> None:
    screen = Screen(walk, "ascii")
    for index in range(0, len(walk), 11):
        lines = screen.picture(index, 100, 24)
        edge = lines[1].plain.index("+")
        body = lines[
            2 : next(i for i, line in enumerate(lines[2:], 2) if "+" in line.plain and "---" in line.plain)
        ]
        assert {line.plain[edge] for line in body} == {"|"}
        assert max(cell_len(line.plain) for line in lines) <= 100


def test_what_waits_and_what_is_cut_off_have_different_signs() -> None:
    from minivllm.stepper.panels import MARKS

    for glyphs, column in ((theme.UNICODE, 0), (theme.ASCII, 1)):
        assert glyphs.ellipsis not in [marks[column] for marks in MARKS.values()]


def test_source_that_has_changed_is_marked_and_the_call_is_found() -> None:
    path, function = (
        "minivllm/executor/worker_proc.py",
        "minivllm.executor.worker_proc.WorkerProc._execute_traced",
    )
    moved = find_place("rpc.execute", path, 3, function)
    there = find_place("rpc.execute", path, moved.line, function)
    assert "tracing.hot_span(" in moved.lines[moved.line - 1], (
        "the first line of the call, not the one with the name"
    )
    assert "changed since the recording" in moved.note and "line 3" in moved.note
    assert there.line == moved.line and not there.note


def test_units_are_said_once_and_both_modes_use_the_same_verbs(directory: Path, walk: Walk) -> None:
    index = failures(walk)[1]
    done = command(str(directory), "--print", "--from", str(index + 1), "--count", "60")
    assert "meets a failpoint" in done.stdout and "notes failpoint" not in done.stdout
    assert "spin=" in done.stdout and not re.search(r"_ns=[\d.]+ [mµn]?s", done.stdout)


# --- keys


def test_keys_that_do_nothing_say_so_and_searches_go_round(directory: Path, walk: Walk) -> None:
    session = Session(
        ["-m", "minivllm.cli.main", "step", str(directory), "--level", "lifecycle"], environment()
    )
    session.wait_for("step 1 of")
    session.press("9", "no rank 9; the run has ranks 0 and 1")
    session.press("\t", "Tab does nothing")
    session.press("\x18", "Ctrl-X does nothing")
    session.press("\x1b[15~", "this key does nothing")
    session.press("f", "meets a failpoint")
    session.press("f", "of level rpc, which is hidden now")
    session.press("/send_ready\r", "from the first again|worker.send_ready")
    session.press("\\\r", "worker.send_ready")
    session.press("t100s\r", "the run ends at")
    session.press("?", "Why is a rank late")
    session.press("x", "step")
    os.write(session.fd, b"q")
    assert session.end() == 0


# --- damaged traces


def test_what_is_missing_from_a_trace_is_said(directory: Path, tmp_path: Path) -> None:
    def copy(name: str) -> tuple[Path, list[Path]]:
        target = tmp_path / name
        shutil.copytree(directory, target)
        rank_1 = process(walk_of(target), "worker", 1).pid
        return target, sorted(target.glob(f"worker-{rank_1}.*"))

    assert not walk_of(directory).store.warnings
    silent, files = copy("silent")
    for file in files:
        file.unlink()
    done = command(str(silent), "--print", "--count", "1")
    assert done.returncode == 0 and done.stderr == "minivllm: warning: no events of rank 1\n"
    garbled, files = copy("garbled")
    spans = next(file for file in files if not file.name.endswith(".journal.jsonl"))
    spans.write_bytes(b"\xff\x00 garbage\n" + spans.read_bytes())
    assert walk_of(garbled).store.warnings == [f"1 line unreadable in {spans.name}"]
    torn, files = copy("torn")
    spans = next(file for file in files if not file.name.endswith(".journal.jsonl"))
    spans.write_bytes(spans.read_bytes()[:2000])
    assert walk_of(torn).store.warnings == [f"{spans.name} is cut off"]
