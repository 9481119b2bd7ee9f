"""Live stepping: everybody stops before each step, goes when let go, and nothing stays behind however it is quit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from terminal_session import Session

from minivllm.engine.arg_utils import EngineArgs
from minivllm.exceptions import ConfigError
from minivllm.live_step.processes import Processes
from minivllm.live_step.script import check_processes, parse
from minivllm.tracing.catalogue import SPANS
from minivllm.tracing.gate import STEPS
from minivllm.tracing.spec import LIFECYCLE

TESTS = Path(__file__).resolve().parent
LIMIT_S = 60.0
SHM = Path("/dev/shm")


def environment(**changes: str) -> dict[str, str]:
    drop = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING")
    env = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith("MINIVLLM_")}
    return {**env, "TERM": "xterm-256color", "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", **changes}


def scripted(commands: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = arguments or (str(TESTS / "live_run.py"), commands)
    return subprocess.run(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(**env),
        check=False,
    )


def session(*commands: str, **env: str) -> Session:
    return Session([str(TESTS / "live_run.py"), *commands], environment(**env), columns=100, rows=30)


def session_with_workers() -> tuple[Session, list[psutil.Process]]:
    """At the moment in which rank 1 is about to build its worker."""
    live = session("until worker.init_worker@rank1; keys")
    live.wait_for("before worker.init_worker")
    processes = family(live.pid)
    assert len(processes) >= 3
    return live, processes


def press_until(live: Session, key: str, text: str, most: int = 120) -> str:
    """Press a key again and again until the screen shows a text."""
    for _ in range(most):
        if re.search(text, live.settle()):
            return live.screen
        os.write(live.fd, key.encode())
    raise AssertionError(f"{text!r} did not appear in:\n{live.screen}")


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_left(processes: list[psutil.Process], client: int) -> None:
    deadline = time.monotonic() + 15
    # psutil.wait_procs takes seconds to find that processes are gone which are no children of ours.
    while alive := [p for p in processes if is_alive(p)]:
        assert time.monotonic() < deadline, [p.pid for p in alive]
        time.sleep(0.02)
    pids = [client, *(p.pid for p in processes)]
    assert not [name for pid in pids for name in SHM.glob(f"minivllm-{pid}-*")]


# --- without a terminal


def test_commands() -> None:
    parsed = parse("step; step rank1 3\nuntil worker.load_model@rank1 ; run engine; stop; show; quit")
    assert [(c.verb, c.who, c.times, c.span) for c in parsed] == [
        ("step", "", 1, ""),
        ("step", "rank1", 3, ""),
        ("until", "rank1", 1, "worker.load_model"),
        ("run", "engine", 1, ""),
        ("stop", "all", 1, ""),
        ("show", "all", 1, ""),
        ("quit", "all", 1, ""),
    ]
    for text, said in (
        ("jump", "is no command"),
        ("until rpc.call", "nobody stops at"),
        ("", "no command"),
        ("keys; show", "only be the last"),
        ("step everybody", "is no command"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(text)


def test_a_command_about_a_process_that_will_not_be_there_is_refused() -> None:
    """Else everybody stands and waits for it, for ever."""
    two, one = Processes(True, (0, 1)), Processes(True, ())
    inside = Processes(False, ())
    for processes, text, said in (
        (two, "step rank2", "'step rank2': the run has ranks 0 and 1"),
        (
            two,
            "show; until dist.rendezvous@rank5; keys",
            "'until dist.rendezvous@rank5': the run has ranks 0 and 1",
        ),
        (Processes(False, (0, 1)), "run engine", "EngineCore runs in the client's process; say client"),
        (one, "stop rank0", "the only worker runs in EngineCore's process; say engine"),
        (inside, "stop rank0", "the only worker runs in the client's process; say client"),
        (two, "until dist.rendezvous@engine", "dist.rendezvous is a step of ranks 0 and 1"),
        (two, "until executor.init@client", "executor.init is a step of EngineCore"),
        (one, "until run@engine", "run is a step of the client"),
    ):
        with pytest.raises(ConfigError) as refused:
            check_processes(parse(text), processes)
        assert str(refused.value).endswith(said), text
    check_processes(
        parse("step; step rank1; until worker.init@rank0; until executor.init@engine; run client"), two
    )
    check_processes(parse("until worker.init_device@engine; until run@client; step all"), one)
    check_processes(parse("until worker.init_device@client; until engine_core.init"), inside)


def test_processes_are_known_before_they_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**arguments: Any) -> Processes:
        return Processes.of(EngineArgs(device="cpu", **arguments).create_engine_config())

    assert of() == Processes(True, ())
    assert of(distributed_executor_backend="mp") == Processes(True, (0,))
    assert of(tensor_parallel_size=2, pipeline_parallel_size=2) == Processes(True, (0, 1, 2, 3))
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "0")
    assert of() == Processes(False, ())


def test_everybody_stops_at_every_lifecycle_step_but_one() -> None:
    assert {s.name for s in SPANS.values() if s.level == LIFECYCLE} - {"worker.bootstrap"} == STEPS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--live-step"], "is not a terminal; give commands instead"),
        (["--live-step", "dance"], "'dance' is no command"),
        (["--live-step", "until dist.rendezvous@rank5; run"], "the run has ranks 0 and 1"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = scripted("", "-m", "minivllm.cli.main", "demo", "--trace", str(tmp_path / "t"), *arguments)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "t").exists()


def test_ranks_stand_in_the_rendezvous_until_the_last_one_comes(tmp_path: Path) -> None:
    commands = "until dist.rendezvous@rank0; step rank0; show; until dist.init_process_group@rank0; show; run"
    done = scripted(
        "",
        *["-m", "minivllm.cli.main", "demo", "--device", "cpu", "--max-tokens", "2"],
        *["--trace", str(tmp_path / "trace"), "--live-step", commands],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    blocked, _, together = done.stdout.partition("> step rank0\n")[2].partition("> until")
    assert "rank 0      in dist.rendezvous; waits for rank 1, which is" in blocked, done.stdout
    assert "rank 0      stopped before dist.init_process_group" in together, done.stdout
    picture = done.stdout.partition("> show\n")[2].partition("> until")[0]
    assert "processes stopped" in picture and "dist.rendezvous" in picture, picture
    # Now a rank stands for sure, and the picture has its code.
    picture = together.partition("> show\n")[2].partition("> run")[0]
    assert "stopped before dist.init_process_group" in picture and "tracing.span(" in picture, picture
    assert "The for statement" in done.stdout
    # What the reader's patience costs stands in the trace.
    from minivllm.trace_store import TraceStore

    span = TraceStore.open(tmp_path / "trace").spans("dist.rendezvous", rank=0)[0]
    assert "live_step" in {event.name for event in span.events}


def test_waiting_for_a_step_that_is_over_ends_with_the_run() -> None:
    """Rank 1 stands before the step, too; EngineCore waits for it, and rank 0 for EngineCore."""
    until = "until worker.send_ready@rank0"
    done = scripted(f"{until}; step rank0; {until}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run has ended without coming to worker.send_ready" in done.stdout
    assert "generated" in done.stdout


def test_no_deadline_runs_while_somebody_stands() -> None:
    """Limits of a few tenths of a second, and seconds of standing, at the start and at the end."""
    commands = "until worker.send_ready@rank1; step all; until worker.parent_died@rank0; step engine; show; show; step rank1; run"
    done = scripted(
        commands,
        MINIVLLM_STARTUP_TIMEOUT_S="0.3",
        MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S="0.3",
        MINIVLLM_WORKER_SIGTERM_TIMEOUT_S="0.3",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is over" in done.stdout and "has died" not in done.stdout
    assert "in executor.terminate_graceful; waits for ranks 0 and 1" in done.stdout


def test_the_clock_of_deadlines_stands_quite_still() -> None:
    """While somebody stands it says one number, so that a limit of 0 has passed at the next look; then it goes on from there."""
    from minivllm.live_step.server import Server
    from minivllm.tracing.deadlines import Patience, deadline_clock, stand_still_for
    from minivllm.tracing.gate import Gate

    server = Server()
    gate = Gate(server.address)
    begun, begun_real = deadline_clock(), time.monotonic()
    try:
        stand_still_for(gate.clock)
        for _ in range(2):
            gate._take({"held": True})
            seen = {deadline_clock() for _ in range(20_000)}
            assert len(seen) == 1
            assert all(Patience(0.0).left() <= 0 for _ in range(1000))
            time.sleep(0.1)
            gate._take({"held": False})
            assert seen.pop() <= deadline_clock()
        stand_still_for(None)
        lost = (time.monotonic() - begun_real) - (deadline_clock() - begun)
        assert lost >= 0.2
    finally:
        stand_still_for(None)
        gate.close_copy()
        server.close()


# Rank 1 stands for 2 s: 0.4 s for each `until` and each `step` after which somebody comes to no next step.
STAND = f"{'until worker.get_kv_cache_spec@rank1; ' * 4}step rank0; step rank0; step rank1"


def test_the_limits_of_calls_stand_still_too() -> None:
    """A worker stands for longer than its caller wants to wait; where nobody stands, the limit is what it was."""
    done = scripted(f"{STAND}; {STAND}; run", CALL_LIMIT_S="1.2", MINIVLLM_ENABLE_MULTIPROCESSING="0")
    assert done.returncode == 0, done.stdout + done.stderr
    answers = dict(re.findall(r"^(\w+) after ([\d.]+) s: .*$", done.stdout, re.MULTILINE))
    assert float(answers["enter_step"]) > 1.5
    assert re.search(r"enter_step after [\d.]+ s: \[0, 1\]", done.stdout), done.stdout
    assert float(answers["check_health"]) > 1.5
    assert re.search(r"check_health after [\d.]+ s: None", done.stdout), done.stdout + done.stderr
    assert re.search(r"sleep after [\d.]+ s: TimeoutError: RPC sleep .* timed out after 1.2 s", done.stdout)


def test_limits_of_calls_without_live_stepping() -> None:
    """The same calls, with rank 1 held in the same step by a failpoint and not by a reader."""
    done = scripted(
        "-",
        CALL_LIMIT_S="0.4",
        MINIVLLM_ENABLE_MULTIPROCESSING="0",
        MINIVLLM_FAILPOINTS="worker.get_kv_cache_spec@rank1=sleep:1.2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for call in ("enter_step", "check_health", "sleep"):
        assert re.search(rf"{call} after 0\.\d+ s: TimeoutError: RPC {call} ", done.stdout), done.stdout


def test_quitting_while_a_limited_call_stands() -> None:
    live = session("until worker.get_kv_cache_spec@rank1; keys", CALL_LIMIT_S="0.2")
    live.wait_for("before worker.get_kv_cache_spec")
    processes = family(live.pid)
    assert len(processes) >= 3
    time.sleep(0.5)
    os.write(live.fd, b"q")
    assert live.end() in (1, 130, -2), live.shown.decode()
    assert "TimeoutError" not in live.shown.decode()
    assert_nothing_left(processes, live.pid)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_other_start_methods(method: str) -> None:
    done = scripted(
        "step client; until worker.init_worker@rank1; run",
        MINIVLLM_WORKER_MULTIPROC_METHOD=method,
        MINIVLLM_ENABLE_MULTIPROCESSING="0" if method == "forkserver" else "1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "client      stopped before engine_core." in done.stdout
    assert "rank 1      stopped before worker.init_worker" in done.stdout and "all is over" in done.stdout


def test_a_death_is_seen() -> None:
    done = scripted(
        "until monitor.worker_died; show; step engine; run",
        MINIVLLM_FAILPOINTS="rpc.execute@rank1#2=kill",
    )
    assert done.returncode == 1 and "was killed by SIGKILL" in done.stderr
    assert "rank 1      has died" in done.stdout, done.stdout + done.stderr


def test_quit_by_command() -> None:
    done = scripted("until worker.init_worker@rank1; quit")
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
    assert "the engine is ready" not in done.stdout


# --- at the terminal


def test_a_session_from_the_first_step_to_the_last() -> None:
    live = session()
    first = live.wait_for("client before run")
    assert "1 of 1 processes stopped" in first and "Root of a traced run" in first and "n next" in first
    assert len(first.splitlines()) == 30
    live.press("n", "client before engine_core.spawn")
    live.press("?", "one step of the process that has been standing longest")
    live.press("x", "processes stopped")
    live.press("7", "the run has ranks 0 and 1")
    live.press("1", "there is no rank1 now")
    press_until(live, "n", "rank 1 pid")
    live.press("0", "rank 0 (before|in)")
    live.press("\t", "rank 1|client|EngineCore")
    press_until(live, "a", "before worker.init_message_queues")
    live.resize(60, 20)
    live.shown = b""
    assert len(live.wait_for("stopped").splitlines()) == 20
    live.resize(100, 30)
    live.press("g", "all run on")
    # The script itself prints while the screen is ours; what it said is there when it is over.
    assert live.end() == 0, live.shown.decode()
    left = live.shown.decode().rpartition("\x1b[?1049l")[2]
    assert "the engine is ready" in left and "all is over" in left and "Traceback" not in left


def test_running_on_and_stopping_again() -> None:
    live = session("until executor.mq_handshake; keys", PAUSE_S="1")
    live.wait_for("before executor.mq_handshake")
    live.press("g", "all run on")
    live.wait_for("the run says generated")
    live.press("s", "stops at the next step")
    live.wait_for(r"EngineCore before|stopped before\s+(│.*\n\s+)?(engine_core|executor)\.shutdown")
    press_until(live, "n", r"thread minivllm-death-pipe")
    live.press_last("g")
    assert live.end() == 0
    assert "all is over" in live.shown.decode()


QUITS: dict[str, tuple[Callable[[Session], None], tuple[int, ...]]] = {
    "q": (lambda live: os.write(live.fd, b"q") and None, (1, 130, -2)),
    "ctrl-c": (lambda live: os.write(live.fd, b"\x03") and None, (1, 130, -2)),
    "sigterm": (lambda live: os.kill(live.pid, signal.SIGTERM), (-15,)),
    "sigkill": (lambda live: os.kill(live.pid, signal.SIGKILL), (-9,)),
    "hangup": (lambda live: os.close(os.dup(live.fd)), (1, 130, -1, -2)),
}


@pytest.mark.parametrize("how", QUITS)
def test_quitting_leaves_nothing(how: str) -> None:
    live, processes = session_with_workers()
    quit_run, codes = QUITS[how]
    if how == "hangup":
        os.close(live.fd)
        deadline = time.monotonic() + 20
        while (done := os.waitpid(live.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, "still running without a terminal"
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(done[1])
    else:
        quit_run(live)
        code = live.end()
        if how != "sigkill":
            assert b"\x1b[?1049l" in live.shown, "the terminal is given back"
    assert code in codes, (code, live.shown.decode())
    assert_nothing_left(processes, live.pid)


def test_a_worker_that_is_killed_while_it_stands_is_shown() -> None:
    live, processes = session_with_workers()
    victim = next(int(pid) for pid in re.findall(r"rank 1 pid (\d+)", live.screen))
    os.kill(victim, signal.SIGKILL)
    live.wait_for(r"has died in|has died")
    live.press_last("g")
    assert live.end() == 1
    assert "was killed by SIGKILL" in live.shown.decode()
    assert_nothing_left(processes, live.pid)
