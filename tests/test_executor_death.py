"""Workers and parents that die, and shutting down (part 2 §2.3.2, §2.3.3, §2.3.8, §2.3.9, §2.4.7, §2.6)."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from executor_helpers import make_executor
from scenario import (
    TESTS,
    Skip,
    children,
    descriptors,
    in_threads,
    is_gone,
    raises,
    run_limited,
    scenario,
    segments,
    slack,
    wait_until,
    zombies,
)

from minivllm.exceptions import ExecutorFailedError

# --- a worker dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["sleep", "hold_gil"])
@scenario()
def test_D1_D2_L18_L20_killed_while_the_other_is_busy(peer: str) -> None:
    """Obligation 4: the caller hears at once, with rank, pid, signal, step and call; the callback comes once and
    before the other worker is ended; that one is ended, too, and nothing stays a zombie (D4, L19)."""
    executor = make_executor()
    pid = executor.workers[1].pid
    called: list[tuple[bool, bool]] = []
    busy = psutil.Process(executor.workers[0].pid)
    executor.register_failure_callback(lambda: called.append((executor.is_failed, not is_gone(busy))))
    method, args = ("sleep", (60, None, 0)) if peer == "sleep" else ("hold_gil", (0,))
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.3, kill).start()
    with raises(ExecutorFailedError, f"worker rank 1 (pid {pid})", "SIGKILL", "worker.busy_loop"):
        executor.collective_rpc(method, args=args, unique_reply_rank=0)
    took = time.monotonic() - killed[0]
    assert took < 0.5 * slack(), took
    # D2, D3: later calls and the health check name the cause, too.
    for call in (lambda: executor.collective_rpc("echo"), executor.check_health):
        with raises(ExecutorFailedError, "rank 1", "SIGKILL", within_s=0.1):
            call()
    wait_until(lambda: called, 0.5, "the callback")
    assert called == [(True, True)]
    wait_until(lambda: not children() and not zombies(), 3, "the busy worker is not ended and reaped")
    executor.shutdown()
    assert called == [(True, True)]
    print(f"error after {took * 1000:.0f} ms")


@scenario()
def test_D1_death_reports_what_was_running() -> None:
    with make_executor() as executor:
        with raises(ExecutorFailedError, "rank 1", "SIGKILL", "while executing die (seq 1)", within_s=0.5):
            executor.collective_rpc("die", args=(1,))
    for how, text in (
        ("kill:11", "SIGSEGV"),
        ("kill:15", "ended after SIGTERM"),
        ("exit:3", "exited with code 3"),
    ):
        with make_executor(tp=1, distributed_executor_backend="mp") as executor:
            with raises(ExecutorFailedError, "rank 0", text, within_s=0.8):
                executor.collective_rpc("die", args=(0, how))
    with make_executor(tp=1, distributed_executor_backend="mp") as executor:
        with raises(ExecutorFailedError, "rank 0", "exited with code 7", within_s=0.8):
            executor.collective_rpc("raise_kind", args=("exit",))


@pytest.mark.parametrize(
    ("how", "text"), [("kill:15", "ended after SIGTERM (exit code 143)"), ("sleep:0", "exited with code 7")]
)
@scenario()
def test_a_rank_that_cleans_up_before_it_is_gone_is_the_one_that_is_named(how: str, text: str) -> None:
    """Its peer's error is there half a second earlier; and what it was doing has ended by the time it is gone."""
    with tempfile.TemporaryDirectory() as directory, make_executor() as executor:
        told = f"worker rank 0 (pid {executor.workers[0].pid}) {text} in worker.busy_loop while executing leave_and_be_missed"
        with raises(ExecutorFailedError, told, within_s=1.5) as caught:
            executor.collective_rpc("leave_and_be_missed", args=(how, os.path.join(directory, "left")))
        assert "rank 1" not in caught.text


@scenario()
def test_death_fails_every_kind_of_waiting() -> None:
    """Blocked callers, futures with and without anybody waiting, done callbacks, and a monitor that is idle."""
    executor = make_executor()
    called = threading.Event()
    idle = executor.collective_rpc("sleep", args=(60,), non_block=True)
    watched = executor.collective_rpc("echo", non_block=True)
    watched.add_done_callback(lambda future: called.set())
    errors: list[BaseException] = []

    def blocked() -> None:
        try:
            executor.collective_rpc("echo")
        except ExecutorFailedError as error:
            errors.append(error)

    thread = threading.Thread(target=blocked)
    thread.start()
    time.sleep(0.2)
    os.kill(executor.workers[1].pid, signal.SIGKILL)
    thread.join(1)
    assert len(errors) == 1 and "SIGKILL" in str(errors[0])
    assert called.wait(1)
    assert idle.done() and "rank 1" in str(idle.exception())
    with raises(ExecutorFailedError, "SIGKILL"):
        watched.result()
    executor.shutdown()


@scenario()
def test_callbacks_of_a_failure_may_ask_for_other_results() -> None:
    executor = make_executor()
    first = executor.collective_rpc("sleep", args=(60,), non_block=True)
    second = executor.collective_rpc("echo", non_block=True)
    seen: list[BaseException | None] = []
    first.add_done_callback(lambda future: seen.append(second.exception(1)))
    second.add_done_callback(lambda future: seen.append(first.exception(1)))
    os.kill(executor.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: len(seen) == 2, 1, "callbacks")
    assert all(isinstance(error, ExecutorFailedError) for error in seen)
    executor.shutdown()


@scenario()
def test_death_while_idle_is_noticed_at_once() -> None:
    executor = make_executor()
    os.kill(executor.workers[0].pid, signal.SIGKILL)
    took = wait_until(lambda: executor.is_failed, 0.5, "not noticed")
    print(f"noticed after {took * 1000:.0f} ms")
    executor.shutdown()


@scenario()
def test_F7_L22_failure_callback_is_called_exactly_once() -> None:
    """Registered before, after, and at the very moment of the failure."""
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.2):
        executor = make_executor(tp=1, distributed_executor_backend="mp")
        calls: list[int] = []
        os.kill(executor.workers[0].pid, signal.SIGKILL)
        time.sleep(delay_s)
        executor.register_failure_callback(lambda calls=calls: calls.append(1))
        wait_until(lambda calls=calls: calls, 1, "the callback was lost")
        executor.shutdown()
        assert calls == [1]


@scenario()
def test_F7_callback_race_forced() -> None:
    """The monitor announces while a registration holds the lock: it waits, and then finds the callback."""
    executor = make_executor(tp=1, distributed_executor_backend="mp")
    calls: list[int] = []
    with executor._callback_lock:
        os.kill(executor.workers[0].pid, signal.SIGKILL)
        wait_until(lambda: executor.is_failed, 1, "not noticed")
        time.sleep(0.1)
        executor._failure_callback = lambda: calls.append(1)
    wait_until(lambda: calls, 1, "the callback was lost")
    executor.shutdown()
    assert calls == [1]


@scenario()
def test_callback_may_shut_down_and_may_raise() -> None:
    executor = make_executor()
    executor.register_failure_callback(executor.shutdown)
    os.kill(executor.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: not children(), 3, "workers are left")
    executor.shutdown()


# --- the parent dies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("doing", ["", "spin", "hold_gil"])
@scenario()
def test_E1_L16_orphans_end(method: str, doing: str) -> None:
    """Obligation 6: SIGKILL of the parent ends all workers within a second, idle, computing in Python, or inside a
    call that never gives up the GIL."""
    command = [sys.executable, str(TESTS / "executor_helpers.py"), *([doing] if doing else [])]
    with tempfile.TemporaryDirectory() as directory:
        env = {**os.environ, "MINIVLLM_WORKER_MULTIPROC_METHOD": method, "TMPDIR": directory}
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()[1:]]
        assert len(workers) == 2
        time.sleep(0.3)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        limit_s = 1.5 if doing == "hold_gil" else 1.0
        took = wait_until(lambda: all(map(is_gone, workers)), limit_s, f"{workers} outlive their parent")
        print(f"gone after {took:.2f} s")
        assert not {name for name in segments() if name.split("-")[1] == str(parent.pid)}
        # A fork server whose parent is killed leaves its own socket; workers that cannot run can remove nothing.
        if doing != "hold_gil":
            assert not list(Path(directory).glob("minivllm-*"))


# --- shutting down ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@scenario()
def test_idle_shutdown_is_quick_and_polite(method: str) -> None:
    os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = method
    for asynchronous in (False, True):
        executor = make_executor(async_scheduling=asynchronous)
        executor.collective_rpc("echo")
        time.sleep(0.3)
        started = time.monotonic()
        executor.shutdown()
        took = time.monotonic() - started
        assert [worker.exitcode for worker in executor.workers] == [0, 0]
        assert took < 0.4 * slack(), took
        print(f"{method}: {took:.3f} s")


@scenario()
def test_F1_worker_gets_its_time_to_shut_down() -> None:
    with tempfile.TemporaryDirectory() as directory:
        marker = Path(directory) / "marker"
        executor = make_executor()
        executor.collective_rpc("take_time_to_shut_down", args=(0.5, str(marker)))
        executor.shutdown()
        assert marker.read_text()
        assert [worker.exitcode for worker in executor.workers] == [0, 0]


@scenario(env={"MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S": "0.3"})
def test_F2_L17_sigterm_works_after_the_death_pipe_has_fired() -> None:
    """Obligation 7: a worker in a 60 s sleep ends by SIGTERM, not by SIGKILL after all the time is used up."""
    executor = make_executor()
    executor.collective_rpc("sleep", args=(60,), non_block=True)
    time.sleep(0.3)
    started = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - started < 1.5 * slack()
    assert [worker.exitcode for worker in executor.workers] == [128 + signal.SIGTERM] * 2


@scenario(env={"MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S": "0.2", "MINIVLLM_WORKER_SIGTERM_TIMEOUT_S": "0.2"})
def test_L19_sigkill_is_the_last_resort_and_leaves_no_zombie() -> None:
    executor = make_executor()
    executor.collective_rpc("hold_gil", args=(1,), non_block=True)
    time.sleep(0.3)
    started = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - started < 1.5 * slack()
    assert [worker.exitcode for worker in executor.workers] == [0, -signal.SIGKILL]
    assert not zombies()


@scenario()
def test_killed_during_shutdown() -> None:
    """A worker that dies while it shuts down changes nothing: the shutdown ends, and is no failure."""
    with tempfile.TemporaryDirectory() as directory:
        executor = make_executor()
        executor.register_failure_callback(lambda: os._exit(99))
        executor.collective_rpc("take_time_to_shut_down", args=(0.6, str(Path(directory) / "marker")))
        threading.Timer(0.2, os.kill, (executor.workers[1].pid, signal.SIGKILL)).start()
        executor.shutdown()
        assert [worker.exitcode for worker in executor.workers] == [0, -signal.SIGKILL]
        assert not executor.is_failed


@scenario(env={"MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S": "0.3"})
def test_sigterm_ends_a_clean_up_that_hangs() -> None:
    executor = make_executor()
    executor.collective_rpc("take_time_to_shut_down", args=(60, ""))
    started = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - started < 1.0 * slack()
    assert [worker.exitcode for worker in executor.workers] == [128 + signal.SIGTERM] * 2


@scenario(limit_s=60)
def test_F6_L21_concurrent_shutdown() -> None:
    """Eight threads at once: no error, every one returns after the end, and the workers are ended once."""
    for _ in range(5):
        executor = make_executor()
        pids = [worker.pid for worker in executor.workers]
        seen = in_threads(8, partial(_shut_down_and_look, executor, pids))
        assert seen == [[False, False]] * 8, seen


def _shut_down_and_look(executor: Any, pids: list[int], index: int) -> list[bool]:
    executor.shutdown()
    return [psutil.pid_exists(pid) for pid in pids]


@scenario()
def test_F6_calls_during_shutdown_get_the_documented_error() -> None:
    executor = make_executor()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            while True:
                executor.collective_rpc("echo")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    executor.shutdown()
    for thread in threads:
        thread.join(2)
    assert len(errors) == 4 and all(isinstance(error, ExecutorFailedError) for error in errors), errors


@scenario()
def test_F8_L14_forgotten_executor_is_collected_and_its_workers_end() -> None:
    """Obligation 8: no reference, also not from a pending future, a callback, a monitor or a finalizer."""
    executor = make_executor()
    executor.register_failure_callback(executor.shutdown)
    future = executor.collective_rpc("echo", args=(1,), non_block=True)
    waiting = executor.collective_rpc("sleep", args=(0.1,), non_block=True)
    waiting.add_done_callback(lambda future: None)
    assert future.result() == [1, 1]
    reference = weakref.ref(executor)
    del executor
    gc.collect()
    assert reference() is None
    wait_until(lambda: not children(), 2, "workers are left")
    with make_executor() as second:
        assert second.collective_rpc("echo", args=(2,)) == [2, 2]


@scenario()
def test_F8_interrupt_during_a_call_ends_everything() -> None:
    """SIGINT to the whole group, as Ctrl-C does: one traceback, from the parent, and nobody is left."""
    script = [sys.executable, "-c", GROUP_SCRIPT.format(tests=str(TESTS))]
    with tempfile.TemporaryFile() as log:
        parent = subprocess.Popen(
            script, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        assert parent.stdout is not None and parent.stdout.readline().startswith("ready")
        family = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(0.3)
        started = time.monotonic()
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.wait(5) != 0
        assert time.monotonic() - started < 3 * slack()
        parent.stdout.close()
        wait_until(lambda: all(map(is_gone, family)), 2, "children are left")
        log.seek(0)
        text = log.read().decode()
    assert text.count("Traceback") == 1 and text.rstrip().endswith("KeyboardInterrupt"), text


GROUP_SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
from executor_helpers import make_executor
executor = make_executor()
print("ready", flush=True)
executor.collective_rpc("sleep", args=(0.5,))
executor.collective_rpc("sleep", args=(0.5,))
executor.collective_rpc("sleep", args=(0.5,))
"""


@pytest.mark.parametrize("how", ["return", "exit", "exception", "pending"])
@scenario(leaks=False)
def test_interpreter_exit_ends_the_workers(how: str) -> None:
    """Without any call of shutdown: quiet, quick, and nothing is left (F3: no word of a resource tracker either)."""
    ending = {
        "return": "",
        "exit": "sys.exit(3)",
        "exception": "raise KeyError('bye')",
        "pending": "executor.collective_rpc('sleep', args=(0.2,), non_block=True).add_done_callback(print)",
    }[how]
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from executor_helpers import make_executor\n"
        "executor = make_executor()\n"
        f"executor.collective_rpc('echo')\n{ending}\n"
    )
    started = time.monotonic()
    output, code = run_limited([sys.executable, "-W", "error", "-c", script], dict(os.environ), 15)
    assert time.monotonic() - started < 10 * slack()
    assert code == {"exit": 3, "exception": 1}.get(how, 0), output
    if how == "exception":
        assert output.count("Traceback") == 1 and output.rstrip().endswith("KeyError: 'bye'")
    else:
        assert output == "" or how == "pending", output
    assert "resource_tracker" not in output
    assert not children()


@scenario()
def test_F3_F4_many_starts_and_stops_leave_nothing() -> None:
    """Obligation 17: ten rounds; neither descriptors nor threads nor memory grow."""
    for round_number in range(10):
        with make_executor() as executor:
            executor.collective_rpc("echo")
        if round_number == 1:
            before = descriptors()
    assert len(descriptors()) <= len(before), (before, descriptors())


# --- E2, L15: inherited descriptors -------------------------------------------------------------------------------


@scenario()
def test_E2_L15_two_forking_executors() -> None:
    """The second one's workers do not hold the first one's pipes open."""
    os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    first = make_executor()
    second = make_executor()
    started = time.monotonic()
    first.shutdown()
    assert time.monotonic() - started < 0.6 * slack()
    assert [worker.exitcode for worker in first.workers] == [0, 0]
    assert second.collective_rpc("echo", args=(1,)) == [1, 1]
    second.shutdown()


@scenario()
def test_E2_child_that_somebody_else_forks() -> None:
    """It holds no pipe open, cannot call anything, and its end does not end the parent's workers."""
    executor = make_executor()
    future = executor.collective_rpc("sleep", args=(0.3, "mine"), non_block=True)
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        parent = os.getppid()
        for call in (lambda: executor.collective_rpc("echo"), executor.check_health, future.result):
            with raises(ExecutorFailedError, f"belongs to process {parent}, and process {os.getpid()}"):
                call()
        assert not future.done()
        executor.shutdown()  # not this process's to end
        del executor
        gc.collect()
        atexit._run_exitfuncs()  # as sys.exit() would
        time.sleep(1.5)
        os._exit(0)
    time.sleep(0.2)
    assert future.result() == ["mine", "mine"]
    assert executor.collective_rpc("echo", args=(1,)) == [1, 1]
    started = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - started < 0.6 * slack()
    assert [worker.exitcode for worker in executor.workers] == [0, 0]
    os.waitpid(pid, 0)


@scenario()
def test_fork_is_refused_with_the_reason() -> None:
    from minivllm.exceptions import ConfigError

    os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="SomebodyElse")
    thread.start()
    with raises(ConfigError, "fork", "SomebodyElse"):
        make_executor()
    stop.set()
    thread.join()

    class Cuda:
        @staticmethod
        def is_initialized() -> bool:
            return True

    class Torch:
        cuda = Cuda

    # CUDA is not at hand here; what counts is the answer that torch gives.
    before = sys.modules.get("torch")
    sys.modules["torch"] = Torch  # type: ignore[assignment]
    with raises(ConfigError, "fork", "CUDA is initialised"):
        make_executor()
    if before is None:
        del sys.modules["torch"]
    with make_executor() as executor:  # the monitor of one executor does not keep another from forking
        with make_executor() as second:
            assert second.collective_rpc("echo", args=(1,)) == executor.collective_rpc("echo", args=(1,))


@scenario()
def test_J4_fork_after_a_parallel_region() -> None:
    """OpenMP threads of the parent do not exist in the child; a worker must not wait for them."""
    try:
        import torch
    except ImportError:
        raise Skip("torch is not installed") from None
    torch.set_num_threads(2)
    matrix = torch.rand(512, 512)
    _ = matrix @ matrix
    os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    with make_executor() as executor:
        assert executor.collective_rpc(multiply, timeout=20) == [1, 1]


def multiply(worker: Any) -> int:
    import torch

    matrix = torch.rand(512, 512)
    _ = matrix @ matrix
    return torch.get_num_threads()
