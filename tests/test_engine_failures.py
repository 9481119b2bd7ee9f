"""How the engine fails, ends, and is interrupted: real processes, each scenario in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import scenario

HERE = Path(__file__).parent
SCENARIOS = [
    "engine_killed_in_generate",
    "engine_killed_in_collective_rpc",
    "engine_killed_while_idle",
    "engine_terminated",
    "worker_killed_in_generate",
    "worker_killed_in_collective_rpc",
    "worker_killed_while_idle",
    "step_raises",
    "start_up_raises",
    "start_up_killed",
    "engine_killed_while_it_imports",
    "start_up_rpc_raises",
    "start_up_is_late",
    "trace_disk_is_full",
    "engine_killed_with_a_worker_stopped",
    "pool_too_small",
    "shutdown_during_generate",
    "interrupted_generate_leaves_the_engine_usable",
    "interrupted_between_sending_and_waiting",
    "signals_that_interrupt_no_call",
    "rpc_timeout",
    "twenty_starts_and_stops",
    "forked_child_cannot_use_or_end_the_engine",
]


def popen(*args: str, **kwargs: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str], limit: float = 60) -> tuple[str, str]:
    try:
        return process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # Where faulthandler is on, the process says where it stands.
        process.send_signal(signal.SIGABRT)
        time.sleep(1)
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not done after {limit} s\n{out}\n{err}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    output = scenario.run("engine_scenarios", name, {}, limit_s=60, leaks=False)
    print(output)
    assert "Traceback" not in output and "leaked" not in output, output


def test_exit_without_shutdown() -> None:
    before = time.monotonic()
    process = popen(str(HERE / "engine_scenarios.py"), "exit_without_shutdown")
    out, err = finish(process)
    assert process.returncode == 7, f"{out}\n{err}"
    assert time.monotonic() - before < 10
    assert "Traceback" not in err and "leaked" not in err, err


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    """Nothing of ours gets their numbers, into which the workers' prints would go; and nothing misses them."""
    command = f'exec "$@" {closed}'
    process = subprocess.Popen(
        [
            "sh",
            "-c",
            command,
            "sh",
            sys.executable,
            str(HERE / "engine_scenarios.py"),
            "standard_streams_are_closed",
        ],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = finish(process)
    assert process.returncode == 7 and not err, f"{out}\n{err}"
    if "2" in closed:
        assert out.count("printed by a worker") == 2


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("FAMILY"), f"{line} {process.communicate()}"
    return [psutil.Process(int(pid)) for pid in line.split()[1:]]


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_end(family: list[psutil.Process], within: float) -> float:
    """Seconds until all are gone; they have been adopted by somebody else by then, so a zombie counts as gone."""
    begun = time.monotonic()
    while True:
        alive = [process for process in family if not _is_gone(process)]
        if not alive:
            return time.monotonic() - begun
        if time.monotonic() - begun > within:
            lines = [line for process in alive for line in _described(process)]
            for process in alive:
                process.kill()
            pytest.fail(f"alive after {within} s:\n" + "\n".join(lines))
        time.sleep(0.01)


def _described(process: psutil.Process) -> Iterator[str]:
    """What it is, and who else has its pipes open: it may be waiting for one of those to end."""
    yield f"{process.pid} ({process.status()}, child of {process.ppid()}): {' '.join(process.cmdline())}"
    own = {name for _, name in _descriptors(process.pid) if name.startswith("pipe:")}
    for other in psutil.process_iter():
        for descriptor, name in _descriptors(other.pid):
            if name in own and other.pid != process.pid:
                with contextlib.suppress(psutil.Error):
                    yield f"  {name} is also {descriptor} of {other.pid}: {' '.join(other.cmdline())}"


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield entry.name, os.readlink(entry)
    except OSError:
        return


@pytest.mark.parametrize("phase", ["start", "idle", "generate", "rpc"])
def test_a_killed_client_takes_everything_with_it(phase: str, tmp_path: Path) -> None:
    process = popen(str(HERE / "engine_scenarios.py"), "run_until_killed", phase)
    family = family_of(process)
    assert len(family) >= 3
    if phase == "generate":
        time.sleep(0.3)
    process.kill()
    print(f"{phase}: {all_end(family, 1.0 + 0.5):.2f} s")
    finish(process)


def test_a_client_killed_at_any_moment_of_its_start_leaves_nothing(tmp_path: Path) -> None:
    """Every 60 ms of the first 0.7 s: neither processes nor files."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    for i in range(12):
        tag = f"moment-{os.getpid()}-{i}"
        process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_scenarios.py"), "run_until_killed", "idle"],
            env={**environment, "MINIVLLM_TEST_MOMENT": tag},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(0.15 + 0.06 * i)
        process.kill()
        process.wait()
        # A child that has only just been started notices when it has imported the main module.
        all_end(_tagged("MINIVLLM_TEST_MOMENT", tag), 10)
        # What was being started at that moment may appear in the table only now.
        all_end(_tagged("MINIVLLM_TEST_MOMENT", tag), 10)
        left = [path.name for path in tmp_path.iterdir() if path.name.startswith("minivllm-")]
        assert not left, f"killed after {0.15 + 0.06 * i:.2f} s: {left}"


def test_a_child_watches_its_client_before_it_imports_what_it_runs(tmp_path: Path) -> None:
    """That import takes a fifth of a second, and a whole one on a busy machine. Here it does not end at all."""
    endless = """
        import os, time
        if os.getpid() != int(os.environ["CLIENT"]):
            print("importing", os.getpid(), flush=True)
            time.sleep(60)
        def function(watch): pass
    """
    client = """
        import multiprocessing, os, time
        from minivllm.utils.first_watch import Later, run_watched
        if __name__ == "__main__":
            os.environ["CLIENT"] = str(os.getpid())
            from endless import function
            context = multiprocessing.get_context("spawn")
            reader, writer = context.Pipe(duplex=False)
            arguments = os.getpid(), reader, "watch", Later((function, ()))
            context.Process(target=run_watched, args=arguments).start()
            time.sleep(60)
    """
    for name, text in (("endless", endless), ("client", client)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    process = popen(str(tmp_path / "client.py"))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("importing"), f"{line} {process.communicate()}"
    child = psutil.Process(int(line.split()[1]))
    process.kill()
    all_end([child], 1.0)
    finish(process)


def _tagged(name: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize("phase", ["start", "idle", "generate", "rpc"])
def test_ctrl_c_ends_everything_within_a_second(phase: str) -> None:
    """SIGINT goes to the whole group, as from a terminal."""
    process = popen(str(HERE / "engine_scenarios.py"), "run_until_killed", phase, start_new_session=True)
    family = family_of(process)
    if phase == "generate":
        time.sleep(0.3)
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = finish(process, 10)
    print(f"{phase}: {time.monotonic() - begun:.2f} s")
    assert time.monotonic() - begun < 1.0 + 0.5
    assert process.returncode == -signal.SIGINT or process.returncode == 130
    assert err.count("Traceback") <= 1 and "KeyboardInterrupt" in err, err
    all_end(family, 0.5)


def test_a_script_without_the_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from minivllm import LLM\n"
        "LLM(worker_cls='counting_worker.CountingWorker', distributed_executor_backend='mp', device='cpu')\n"
    )
    process = popen(str(script))
    _, err = finish(process)
    assert process.returncode != 0
    assert err.count("__main__") == 1 and "ConfigError" in err, err


@pytest.mark.parametrize("multiprocess", ["1", "0"])
def test_a_script_from_a_pipe_is_told_so(multiprocess: str) -> None:
    script = (
        f"import os; os.environ['MINIVLLM_ENABLE_MULTIPROCESSING'] = '{multiprocess}'\n"
        "from minivllm import LLM\n"
        "if __name__ == '__main__':\n"
        "    LLM(worker_cls='counting_worker.CountingWorker', distributed_executor_backend='mp', device='cpu')\n"
    )
    process = popen("-", stdin=subprocess.PIPE)
    _, err = process.communicate(script, timeout=60)
    assert process.returncode == 1
    assert "ConfigError: the main module '<stdin>' is no file" in err and "put the script into a file" in err
    assert err.count("Traceback") == 1
