"""The step-through: order of events, state as a function of them, sources, keys, plain text."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_runs import recorded
from rich.cells import cell_len
from terminal_session import Session
from trace_fixtures import json_s, large_run, write_run

from minivllm.exceptions import ConfigError
from minivllm.stepper import History, Kind, RunState, Walk
from minivllm.stepper.positions import find_position
from minivllm.stepper.screen import Screen
from minivllm.stepper.source import find_place, place_of
from minivllm.stepper.words import Words
from minivllm.trace_store import Process, TraceStore
from minivllm.tracing.catalogue import LIFECYCLE

LIMIT_S = 60.0


def walk_of(directory: Path) -> Walk:
    return Walk(TraceStore.open(directory))


def process(walk: Walk, role: str, rank: int | None = None) -> Process:
    return next(p for p in walk.store.processes() if p.role == role and (rank is None or p.rank == rank))


def step_of(walk: Walk, name: str, kind: Kind = Kind.BEGIN, rank: int | None = None, start: int = -1) -> int:
    found = walk.find(
        start,
        lambda s: s.span.name == name and s.kind is kind and (rank is None or s.span.process.rank == rank),
    )
    assert found is not None, f"no {name} {kind.name}"
    return found


# --- the order of events


def test_steps_are_in_order_and_each_span_begins_and_ends_once() -> None:
    walk = walk_of(recorded())
    times = [walk[i].time_ns for i in range(len(walk))]
    assert times == sorted(times)
    begun: dict[str, int] = {}
    for i in range(len(walk)):
        step = walk[i]
        if step.kind is Kind.BEGIN:
            assert step.span.span_id not in begun
            begun[step.span.span_id] = 1
        elif step.ends:
            begun[step.span.span_id] += 1
        else:
            assert begun[step.span.span_id] == 1, "notes lie within their span"
    assert set(begun.values()) == {2} and len(begun) == len(walk.store.spans())


def test_on_each_thread_the_span_that_begins_last_ends_first() -> None:
    walk = walk_of(recorded())
    stacks: dict[object, list[str]] = {}
    for i in range(len(walk)):
        step = walk[i]
        if step.span.name in ("worker.process", "request", "run") or step.kind in (Kind.NOTE, Kind.WRITTEN):
            continue
        stack = stacks.setdefault((step.span.process.pid, step.span.attributes["thread.id"]), [])
        if step.kind is Kind.BEGIN:
            stack.append(step.span.span_id)
        else:
            assert stack.pop() == step.span.span_id, step.span.name
    assert not any(stacks.values())


# --- state


def replay(walk: Walk, index: int) -> RunState:
    state = RunState.before(walk)
    for i in range(index + 1):
        state.apply(walk[i])
    return state


def comparable(state: RunState) -> dict[str, object]:
    stacks = {
        (p.pid, thread): list(stack)
        for p, threads in state.stacks.items()
        for thread, stack in threads.items()
        if stack
    }
    names = ("time_ns", "spawned", "begun", "exits", "pipes", "rings", "futures", "requests", "ready", "held")
    return {"stacks": stacks, **{name: getattr(state, name) for name in names}}


def test_state_depends_on_the_step_only_and_not_on_the_way_there() -> None:
    walk = walk_of(recorded())
    history = History(walk, snapshot_every=37)
    dice = random.Random(5)
    for _ in range(60):
        index = dice.randrange(-1, len(walk))
        assert comparable(history.at(index)) == comparable(replay(walk, index)), index
    assert comparable(history.at(-1)) == comparable(RunState.before(walk))
    with pytest.raises(IndexError):
        history.at(len(walk))
    history.at(99)
    assert history.replay_length(99) == 0 and history.replay_length(101) == 2
    assert history.replay_length(98) == 99 - 74, "from the snapshot before step 74"


def test_rings_keep_their_protocol() -> None:
    """A slot is written only when it is free, read only when it is written, and by each reader once."""
    walk = walk_of(recorded())
    state = RunState.before(walk)
    written = 0
    for i in range(len(walk)):
        step = walk[i]
        queue, slot = step.span.get("queue"), step.span.get("slot", -1)
        before = state.rings[queue][slot] if slot >= 0 and queue in state.rings else None
        state.apply(step)
        if before is None or step.kind not in (Kind.WRITTEN, Kind.END):
            continue
        after = state.rings[queue][slot]
        if step.kind is Kind.WRITTEN:
            written += 1
            assert before.is_free and before.writing and after.written and not any(after.read)
        elif step.span.name == "mq.dequeue":
            assert before.written and sum(after.read) == sum(before.read) + 1
    assert written == len([s for s in walk.store.spans("mq.enqueue") if s.get("slot", -1) >= 0]) > 10


def test_queues_are_named_with_their_readers() -> None:
    walk = walk_of(recorded())
    channels = RunState.before(walk).facts.channels
    assert set(channels) == {"rpc broadcast", "response rank 0", "response rank 1"}
    broadcast = channels["rpc broadcast"]
    assert [p.rank for p in broadcast.readers] == [0, 1] and broadcast.slots == 10
    assert broadcast.writer is process(walk, "engine_core")
    assert channels["response rank 1"].readers == (broadcast.writer,)


def test_a_worker_from_not_started_to_ended() -> None:
    walk = walk_of(recorded())
    words, history, worker = Words(walk.run), History(walk), process(walk, "worker", 1)
    kinds = []
    for i in range(-1, len(walk)):
        kind = words.status(history.at(i), worker).kind
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    assert kinds[:3] == ["not started", "starting", "working"]
    assert kinds[-2:] == ["ending", "ended"] and "idle" in kinds and "dead" not in kinds
    assert words.status(history.at(len(walk) - 1), worker).text == "exited with code 0"


def test_the_parent_waits_for_ready_of_those_that_have_not_sent_it() -> None:
    walk = walk_of(recorded())
    words, history = Words(walk.run), History(walk)
    engine = process(walk, "engine_core")
    begin = step_of(walk, "executor.wait_for_ready")
    assert words.status(history.at(begin), engine).text == "waits for READY of ranks 0 and 1"
    first = step_of(walk, "executor.wait_for_ready", Kind.NOTE)
    other = 1 - walk[first].note.attributes["minivllm.rank"]  # type: ignore[union-attr]
    assert words.status(history.at(first), engine).text == f"waits for READY of rank {other}"
    assert history.at(first).pipes[1 - other].ready == "closed"


def test_pipes_of_a_worker() -> None:
    walk = walk_of(recorded())
    history = History(walk)
    made = step_of(walk, "executor.make_worker_process", Kind.BEGIN)
    rank = walk[made].span.get("rank")
    assert (history.at(made).pipes[rank].ready, history.at(made).pipes[rank].death) == ("empty", "open")
    watched = step_of(walk, "worker.monitor_death_pipe", Kind.END, rank)
    assert history.at(watched).pipes[rank].death == "watched"
    closed = step_of(walk, "executor.close_death_writers")
    assert {p.death for p in history.at(closed).pipes.values()} == {"EOF"}


def test_futures_are_queued_until_somebody_waits_for_them() -> None:
    walk = walk_of(recorded())
    history = History(walk)
    call = walk.find(
        -1, lambda s: s.span.name == "rpc.call" and s.kind is Kind.END and bool(s.span.get("non_block"))
    )
    assert call is not None
    sequence = walk[call].span.get("seq")
    assert [f.get("seq") for f in history.at(call).futures] == [sequence]
    result = walk.find(
        call, lambda s: s.span.name == "future.result" and s.ends and s.span.get("seq") == sequence
    )
    assert result is not None
    assert sequence not in [f.get("seq") for f in history.at(result).futures]


def test_a_killed_worker_is_dead_in_the_step_it_was_killed_in() -> None:
    walk = walk_of(recorded("rpc.execute@rank1#6=kill"))
    words, history, worker = Words(walk.run), History(walk), process(walk, "worker", 1)
    failpoint = walk.first_failure
    assert failpoint is not None and walk[failpoint].note is not None
    held = words.status(history.at(failpoint), worker)
    assert (held.kind, held.text) == ("waiting", "rpc.execute")
    assert held.note == "held by failpoint rpc.execute@rank1#6=kill"
    end = words.status(history.at(len(walk) - 1), worker)
    assert (end.kind, end.text) == ("dead", "was killed by SIGKILL in rpc.execute")
    failures = []
    index: int | None = -1
    while (index := walk.next_failure(index)) is not None:
        failures.append(walk[index].span.name)
    assert failures[0] == "rpc.execute" and "worker.process" in failures and "engine_core.step" in failures


def test_a_healthy_run_has_no_failures() -> None:
    assert walk_of(recorded()).first_failure is None


def test_a_late_rank_is_found() -> None:
    """Whoever knows nothing of the code sees what holds rank 1, and that the parent waits for it."""
    walk = walk_of(recorded("worker.init_worker@rank1=sleep:1.5"))
    assert walk.first_failure is not None
    screen = Screen(walk, "utf-8")
    shown = "\n".join(line.plain for line in screen.picture(walk.first_failure, 100, 30))
    assert "held by failpoint" in shown and "worker.init_worker@rank1=sleep:1.5" in shown
    following = walk.next_of(process(walk, "worker", 1), walk.first_failure)
    assert following is not None and walk[following].time_ns - walk[walk.first_failure].time_ns > 1.4e9
    after = screen.words.status(screen.history.at(following), process(walk, "worker", 1))
    assert "failpoint" not in after.note, "it is let go with its next step"


def test_ranks_wait_for_each_other_in_the_rendezvous(tmp_path: Path) -> None:
    walk = walk_of(write_run(tmp_path / "trace"))
    words, history = Words(walk.run), History(walk)
    begin = step_of(walk, "dist.rendezvous", rank=0)
    waiting = words.status(history.at(begin), process(walk, "worker", 0))
    assert (waiting.kind, waiting.note) == ("waiting", "waits for rank 1")
    assert waiting.detail.startswith("rank 1 is in worker.bootstrap")
    arrived = step_of(walk, "dist.rendezvous", rank=1)
    assert words.status(history.at(arrived), process(walk, "worker", 0)).kind == "working"


def test_runs_without_messages_say_so(tmp_path: Path) -> None:
    walk = walk_of(write_run(tmp_path / "trace", level="rpc"))
    shown = "\n".join(line.plain for line in Screen(walk, "utf-8").picture(len(walk) - 30, 100, 40))
    assert "--trace-level message" in shown


# --- sources


def test_each_step_of_a_real_run_has_its_source_line() -> None:
    walk = walk_of(recorded())
    for span in {span.name: span for span in walk.store.spans()}.values():
        place = place_of(span)
        assert not place.note, f"{span.name}: {place.note}"
        near = place.lines[place.line - 1 : place.line + 2]
        assert any(f'"{span.name}"' in line for line in near), f"{span.name}: {near}"
    spawn = place_of(walk.store.spans("executor.make_worker_process")[0])
    assert spawn.function == "make_worker_process" and spawn.why


def test_a_line_that_has_moved_is_found_and_a_foreign_file_is_not(tmp_path: Path) -> None:
    span = walk_of(recorded()).store.spans("executor.init")[0]
    span.attributes["code.line.number"] = 3
    place = place_of(span)
    assert "this was line 3" in place.note and '"executor.init"' in place.lines[place.line - 1]
    span.attributes["code.file.path"] = "../../etc/passwd"
    place = place_of(span)
    assert place.path == "minivllm/executor/abstract.py" and "changed since the recording" in place.note
    span.attributes["code.file.path"] = ""
    assert not place_of(span).lines


def test_a_decorated_method_is_named_and_not_its_class() -> None:
    path = "minivllm/worker/gpu_worker.py"
    lines = (Path(__file__).parents[1] / path).read_text(encoding="utf-8").splitlines()
    decorator = lines.index('    @tracing.instrument("worker.load_model")') + 1
    for line in (decorator - 1, decorator, decorator + 1):
        place = find_place("worker.load_model", path, line, "minivllm.worker.gpu_worker.Worker.load_model")
        assert (place.function, place.line, place.note) == ("Worker.load_model", decorator, "")


# --- finding steps


def test_positions() -> None:
    walk = walk_of(recorded())
    assert find_position(walk, "1") == 0 and find_position(walk, str(len(walk))) == len(walk) - 1
    assert find_position(walk, "last") == len(walk) - 1
    index = find_position(walk, "100ms")
    assert walk.run.at(walk[index].time_ns) >= 100_000_000 > walk.run.at(walk[index - 1].time_ns)
    later = find_position(walk, "+20ms", index)
    assert walk[later].time_ns >= walk[index].time_ns + 20_000_000
    call = walk[find_position(walk, "rpc.execute@rank1#3")]
    assert call.kind is Kind.BEGIN and call.span is walk.store.spans("rpc.execute", rank=1)[2]
    for text, said in (
        ("rpc.execute@rank7", "rpc.execute@rank7: the run has ranks 0 and 1"),
        ("rpc.call@rank1", "rank 1 has no rpc.call, but other processes have"),
        ("rpc.call#999", "rpc.call#999: the run has"),
        ("dist.send", "the run has no dist.send"),
        ("0", "no step 0"),
        ("999999", "no step 999999"),
        ("soon", "no step number"),
        ("failure", "nothing failed"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_position(walk, text)


def test_search_over_and_up() -> None:
    walk = walk_of(recorded())
    found = walk.search("RPC.METHOD=check_health", -1)
    assert found is not None and walk[found].span.name == "rpc.call"
    end = walk.other_end(found)
    assert end is not None and walk[end].ends and walk[end].span is walk[found].span
    assert walk.other_end(end) == found
    execution = step_of(walk, "rpc.execute", start=found)
    up = walk.parent(execution)
    assert up == found, "the caller is in another process"
    assert walk.search("nowhere to be found", -1) is None


def test_levels_hide_steps() -> None:
    walk = walk_of(recorded())
    walk.details = LIFECYCLE
    index: int | None = -1
    while (index := walk.find(index, lambda step: True)) is not None:
        assert not walk[index].span.name.startswith(("rpc.", "mq."))


# --- pictures


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (140, 50), (50, 14), (300, 20)])
def test_pictures_fit(columns: int, rows: int) -> None:
    walk = walk_of(recorded("rpc.execute@rank1#6=kill"))
    for encoding in ("utf-8", "ascii"):
        screen = Screen(walk, encoding)
        for index in range(0, len(walk), 7):
            lines = screen.picture(index, columns, rows)
            assert len(lines) == rows
            assert max(cell_len(line.plain) for line in lines) <= columns
            if encoding == "ascii":
                assert all(line.plain.isascii() for line in lines)


def test_a_newcomer_finds_why_a_rank_was_late() -> None:
    """With what --help and the screen say, and nothing else: no knowledge of the code, of spans, or of failpoints."""
    late = "worker.init_worker@rank1=sleep:1.5"
    directory = str(recorded(late))
    help_text = step("--help").stdout.decode()
    assert "--at failure" in help_text and "began" not in help_text
    # The first thing that is not as it should be: who stands still, by what, and who waits for it.
    picture = " ".join(step(directory, "--print", "--at", "failure").stdout.decode().split())
    assert "Worker_TP1" in picture and "held by failpoint" in picture and late in picture
    assert re.search(r"waits for READY of ranks? .*1", picture)
    # The next step of that process, as the key r finds it, says how long that was.
    walk = walk_of(Path(directory))
    assert walk.first_failure is not None
    held = walk[walk.first_failure]
    following = walk.next_of(held.span.process, held.index)
    assert following is not None
    said = step(directory, "--print", "--from", str(following + 1), "--count", "1").stdout.decode()
    assert "worker.init_worker" in said and re.search(r"ends after 1\.5\d* s", said), said


def test_a_newcomer_without_a_failure_asks_whom_they_wait_for(tmp_path: Path) -> None:
    """Nothing failed: a process that waits says for whom, and what that one is doing."""
    directory = write_run(tmp_path / "trace")
    done = step(str(directory), "--print", "--at", "failure")
    assert done.returncode == 2 and b"nothing failed" in done.stderr
    text = step(str(directory), "--print", "--at", "dist.rendezvous@rank0").stdout.decode()
    assert "waits for rank 1" in text and "rank 1 is in worker.bootstrap" in " ".join(text.split())


def test_a_tiny_terminal_is_told(tmp_path: Path) -> None:
    screen = Screen(walk_of(recorded()), "utf-8")
    assert "too small" in screen.picture(0, 30, 5)[0].plain


# --- the command


def environment(**changes: str) -> dict[str, str]:
    drop = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING")
    env = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith("MINIVLLM_T")}
    return {**env, "TERM": "xterm-256color", **changes}


def step(*args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", "step", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        env=environment(**env),
        check=False,
    )


def test_print_a_sequence() -> None:
    done = step(str(recorded()), "--print", "--from", "5", "--count", "3")
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert [int(n) for n in re.findall(r"^ *(\d+)  +\d+\.\d{6} s", text, re.M)] == [5, 6, 7]
    assert "more steps: --from 8" in text and "vllm/v1/" in text and "minivllm/" in text
    assert max(cell_len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("columns", ["5", "40"])
def test_print_at_any_width(columns: str) -> None:
    for args in (["--at", "20"], ["--from", "20", "--count", "3"]):
        done = step(str(recorded()), "--print", *args, COLUMNS=columns)
        text = done.stdout.decode()
        assert done.returncode == 0 and "too small" not in text and len(text) > 200, text
        assert max(map(cell_len, text.splitlines())) <= (50 if "--at" in args else 40)
        assert not re.search(r" $", text, re.M)


def test_print_the_picture_of_a_failure_in_plain_ascii() -> None:
    done = step(
        str(recorded("rpc.execute@rank1#6=kill")), "--print", "--at", "failure", PYTHONIOENCODING="ascii"
    )
    text = done.stdout.decode("ascii")
    assert "rpc.execute@rank1#6=kill" in text and "Worker" in text and "\x1b" not in text
    assert "?" not in text.replace("? help", ""), "nothing is lost for want of characters"


def test_without_a_terminal_it_says_what_to_do(tmp_path: Path) -> None:
    done = step(str(recorded()))
    assert done.returncode == 2 and done.stdout == b""
    assert b"not a terminal" in done.stderr and b"--print" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_long_run_opens_in_time() -> None:
    """100,000 spans: twice the time of json for the same ones, and no more than twice that."""
    directory = large_run()
    limit = json_s()
    # CPU time of the child: what else the machine does is not the point.
    before = os.times()
    done = step(str(directory), "--print", "--at", "1")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == 0 and b"step 1 of 2" in done.stdout
    assert used < 4 * limit, f"{used:.2f} s, json {limit:.2f} s"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--print", "--at", "9999999"], "no step 9999999"),
        (["--print", "--at", "failure"], "nothing failed"),
        (["--print", "--at", "1", "--count", "2"], "--at prints the picture"),
        (["--from", "3"], "go with --print"),
        (["--print", "--level", "lifecycle", "--from", "rpc.call#2"], "use --level rpc"),
    ],
)
def test_bad_input(args: list[str], said: str) -> None:
    done = step(str(recorded()), *args)
    assert done.returncode == 2 and said in done.stderr.decode() and len(done.stderr.splitlines()) == 1


def session_of(*args: str, **env: str) -> Session:
    return Session(["-m", "minivllm.cli.main", "step", *args], environment(**env))


def test_a_session_at_the_terminal() -> None:
    directory = str(recorded("rpc.execute@rank1#6=kill"))
    session = session_of(directory)
    first = session.wait_for("step 1 of")
    assert "EngineCore" in first and "not started" in first and "why" not in first.splitlines()[0]
    assert len(first.splitlines()) == 24
    session.press("n", "step 2 of")
    session.press("\x1b[C\x1b[C", "step 4 of")
    session.press("p", "step 3 of")
    session.press("f", "held by failpoint")
    session.press("F", "no failure before")
    session.press("g", "step 1 of")
    session.press("/check_he\x7fhealth\r", "is in no step")
    session.press("/send_ready\r", "worker.send_ready begins")
    session.press("o", "worker.send_ready ends")
    session.press("r", "step")
    session.press("1", "on Worker_")
    session.press("e", "on EngineCore")
    session.press("t100000s\r", "100%|run ends")
    session.press("t12 parsecs\r", "no step number")
    session.press("?", "Why is a rank late")
    session.press("x", "step")
    session.press("\r", "code.file.path")
    session.press("q", "n next")
    session.press("l", "rpc")
    session.press("G", "run ends|run")
    session.press("z", "z does nothing")
    session.resize(120, 40)
    session.shown = b""
    assert len(session.wait_for("step").splitlines()) == 40
    session.shown = b""
    os.write(session.fd, b"q")
    assert session.end() == 0
    assert b"\x1b[?25h" in session.shown and b"\x1b[?1049l" in session.shown, "the terminal is given back"


def test_ctrl_c_gives_the_terminal_back() -> None:
    session = session_of(str(recorded()), NO_COLOR="1")
    session.wait_for("step 1 of")
    assert not re.search(rb"\x1b\[[0-9;]*(3[0-8]|4[0-8])[;m]", session.shown), "NO_COLOR is honoured"
    os.write(session.fd, b"\x03")
    assert session.end() == 130
    assert b"\x1b[?1049l" in session.shown and b"Traceback" not in session.shown


def test_ctrl_z_leaves_a_sane_terminal_and_comes_back() -> None:
    session = session_of(str(recorded()))
    session.wait_for("step 1 of")
    session.press("n", "step 2 of")
    os.write(session.fd, b"\x1a")
    deadline = time.monotonic() + LIMIT_S
    while os.waitpid(session.pid, os.WNOHANG | os.WUNTRACED) == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    session.shown = os.read(session.fd, 65536)
    assert b"\x1b[?1049l" in session.shown, "the shell gets its screen back"
    session.shown = b""
    os.kill(session.pid, signal.SIGCONT)
    session.wait_for("step 2 of")
    os.write(session.fd, b"q")
    assert session.end() == 0


def test_a_dumb_terminal_is_refused() -> None:
    session = session_of(str(recorded()), TERM="dumb")
    assert session.end() == 2
    assert b"--print" in session.shown and b"\x1b[?1049h" not in session.shown
