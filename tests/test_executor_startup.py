"""Coming up: READY and FAILED, deadlines, deaths at any moment, start methods (part 2 §2.3.1, §2.4)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from executor_helpers import make_config, make_executor
from scenario import (
    TESTS,
    children,
    in_threads,
    is_gone,
    own_segments,
    raises,
    run_limited,
    scenario,
    segments,
    wait_until,
)

from minivllm.exceptions import (
    ConfigError,
    ExecutorFailedError,
    RemoteError,
    WorkerConfigError,
    WorkerStartupError,
)
from minivllm.executor.abstract import Executor
from minivllm.executor.status_page import RankStatus
from minivllm.executor.termination import ExecutorResources


def steps_in_order(names: list[str], *expected: str) -> bool:
    """Whether `expected` occurs in `names` in this order."""
    rest = iter(names)
    return all(step in rest for step in expected)


@scenario()
def test_start_and_end() -> None:
    """Names, titles, threads, thread numbers, no listening socket (G4), and a quick, quiet end (F1: exit code 0)."""
    started = time.monotonic()
    executor = make_executor(tp=2, pp=2)
    took = time.monotonic() - started
    assert executor.world_size == 4 and executor.output_rank == 2 and executor.max_concurrent_batches == 2
    assert [worker.rank for worker in executor.workers] == [0, 1, 2, 3]
    assert executor.collective_rpc(lambda worker: worker.is_driver_worker) == [True, False, True, False]
    assert executor.collective_rpc("title") == [
        f"minivllm::Worker_PP{pp}_TP{tp}" for pp in (0, 1) for tp in (0, 1)
    ]
    assert executor.collective_rpc("threads")[0] == ["MainThread", "minivllm-death-pipe"]
    (method,) = set(executor.collective_rpc(lambda worker: worker.distributed_init_method))
    assert method.startswith("file:///") and Path(method.removeprefix("file://")).parent.is_dir()
    pids = {child.pid for child in children()}
    listening = [
        c
        for pid in (*pids, os.getpid())
        for c in psutil.Process(pid).net_connections()
        if c.status == "LISTEN"
    ]
    assert not listening
    assert not own_segments(), "names of segments are left although all have attached"
    started = time.monotonic()
    executor.shutdown()
    print(f"start {took:.2f} s, end {time.monotonic() - started:.2f} s")
    assert [worker.exitcode for worker in executor.workers] == [0, 0, 0, 0]
    with raises(ExecutorFailedError, "has been shut down"):
        executor.collective_rpc("echo")
    assert not executor.is_failed


@scenario(env={"OMP_NUM_THREADS": ""})
def test_J4_omp_threads_share_the_cores() -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    with make_executor() as executor:
        assert executor.collective_rpc("setting", args=("OMP_NUM_THREADS",)) == [str(max(1, cores // 2))] * 2
    assert os.environ.get("OMP_NUM_THREADS") == before
    os.environ["OMP_NUM_THREADS"] = "3"
    with make_executor() as executor:
        assert executor.collective_rpc("setting", args=("OMP_NUM_THREADS",)) == ["3", "3"]


@scenario()
def test_progress_is_reported_while_workers_start() -> None:
    os.environ["LIGHT_INIT"] = "load_model@1=sleep:0.5"
    seen: list[list[RankStatus]] = []
    executor = make_executor_with_progress(seen.append)
    executor.collective_rpc("sleep", args=(0.3,))
    during_rpc = len(seen)
    executor.initialize_from_config([1, 2])  # type: ignore[list-item]
    assert executor.collective_rpc("get_kept") == [1, 2]
    executor.collective_rpc("sleep", args=(0.3,))
    assert len(seen) <= during_rpc + 1, "still reporting after the start-up"
    executor.shutdown()
    assert 4 <= len(seen) <= 60
    assert "worker.load_model" in {ranks[1].step for ranks in seen}
    assert all(ranks[0].pid and ranks[1].pid for ranks in seen)


def make_executor_with_progress(callback: Any) -> Any:
    from minivllm.executor.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(make_config(), on_progress=callback)


@scenario()
def test_a_worker_without_room_for_its_trace_says_so() -> None:
    from minivllm import tracing

    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace")
        tracing.configure("client", trace_dir=str(trace), level="lifecycle")
        trace.rename(Path(directory, "moved"))
        trace.touch()
        told = f"failed to start in worker.bootstrap: cannot write traces to {trace}: "
        with raises(WorkerConfigError, told, "File exists"):
            make_executor()
        trace.unlink()
        Path(directory, "moved").rename(trace)
        tracing.shutdown()


@scenario()
def test_a_worker_that_is_terminated_explains_one_that_fails_before_it_is_gone() -> None:
    os.environ["LIGHT_INIT"] = "load_model@0=linger:0.4; load_model@1=await_left; load_model@1=raise:closed"
    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIGHT_LEFT"] = os.path.join(directory, "left")
        with raises(WorkerStartupError, "rank 0", "ended after SIGTERM", "worker.load_model during start-up"):
            make_executor()


@pytest.mark.parametrize("step", ["init_worker", "init_device", "load_model"])
@scenario()
def test_A6_L43_failed_start_says_why(step: str) -> None:
    """Obligation 10: rank, step, type, text and traceback arrive at once; nothing stays; a second start works."""
    os.environ["LIGHT_INIT"] = f"{step}@1=raise:no.such.weights"
    for _ in range(2):
        with raises(
            WorkerStartupError,
            "rank 1",
            f"worker.{step}",
            "ValueError",
            "no.such.weights",
            "Traceback",
            within_s=10,
        ) as caught:
            make_executor()
        cause = caught.error.__cause__
        assert isinstance(cause, RemoteError) and cause.type_name == "ValueError"
        del cause, caught.error
        gc.collect()  # L44: in the original this blocks for ever
        assert not children()
    del os.environ["LIGHT_INIT"]
    with make_executor() as executor:
        assert executor.collective_rpc("echo", args=(1,)) == [1, 1]


@scenario()
def test_A6_failed_start_does_not_wait_for_a_busy_peer() -> None:
    """Rank 0 sits in a call that never ends; the error is there within the short limits for a failed start."""
    os.environ["LIGHT_INIT"] = "load_model@1=raise; load_model@0=gil"
    with raises(WorkerStartupError, "rank 1", "no such weights", within_s=5):
        make_executor()


@pytest.mark.parametrize("step", ["init_worker", "load_model"])
@pytest.mark.parametrize("how", ["kill:9", "kill:11", "exit:3"])
@scenario()
def test_A9_death_during_start_up_is_named(step: str, how: str) -> None:
    os.environ["LIGHT_INIT"] = f"{step}@1={how}; load_model@0=sleep:60"
    ended = {"kill:9": "SIGKILL", "kill:11": "SIGSEGV", "exit:3": "exited with code 3"}[how]
    with raises(WorkerStartupError, "rank 1 (pid", ended, f"worker.{step}", within_s=6):
        make_executor()


@pytest.mark.parametrize(
    "span",
    [
        "worker.bootstrap",
        "worker.main",
        "worker.install_signal_handlers",
        "worker.init",
        "worker.init_worker",
        "worker.set_process_title",
        "worker.load_model",
        "worker.init_message_queues",
        "worker.send_ready",
        "worker.mq_handshake",
        "worker.busy_loop",
    ],
)
@scenario()
def test_L10_killed_in_any_step(span: str) -> None:
    """Obligation 9: also between READY and the handshake, the error is quick and names rank, signal and step."""
    os.environ["MINIVLLM_FAILPOINTS"] = f"{span}@rank1=kill"
    with raises(ExecutorFailedError, "rank 1 (pid", "SIGKILL", f"in {span}", within_s=6):
        with make_executor() as executor:
            # Only in the busy loop the start may succeed first.
            assert span == "worker.busy_loop"
            wait_until(lambda: executor.is_failed, 1, "the monitor has not noticed")
            executor.collective_rpc("echo")


@scenario()
def test_A7_L11_start_up_deadline_names_the_missing() -> None:
    os.environ["LIGHT_INIT"] = "init_device@1=sleep:60"
    with raises(TimeoutError, "rank 1 (pid", "is in worker.init_device", "3 s", within_s=8) as caught:
        make_executor(startup_timeout_s=3.0)
    assert isinstance(caught.error, WorkerStartupError) and "rank 0" not in caught.text
    os.environ["MINIVLLM_STARTUP_TIMEOUT_S"] = "0.6"
    with raises(TimeoutError, "0.6 s", within_s=8):
        make_executor()


@pytest.mark.parametrize("action", ["sleep:60", "spin"])
@scenario()
def test_L12_parent_killed_while_workers_load(action: str) -> None:
    """The death pipe is watched from the first instruction: orphans of a start end at once, whatever they do."""
    os.environ["LIGHT_INIT"] = f"load_model@*={action}"
    # First in the environment, since that is where the titles of processes are written: a variable that workers get anew.
    environment = {"MINIVLLM_FIRST": "1", **os.environ}
    parent = subprocess.Popen([sys.executable, str(TESTS / "executor_helpers.py")], env=environment)
    wait_until(lambda: loading_workers(parent.pid), 10, "no workers")
    workers = loading_workers(parent.pid)
    parent.kill()
    parent.wait()
    took = wait_until(lambda: all(map(is_gone, workers)), 2, "workers outlive their parent")
    print(f"gone after {took:.2f} s")
    left = {name for name in segments() if name.split("-")[1] == str(parent.pid)}
    assert not left and not list(Path(tempfile.gettempdir()).glob(f"minivllm-rendezvous-{parent.pid}-*"))


def loading_workers(pid: int) -> list[psutil.Process]:
    """The two workers, when both have got as far as having a title."""
    found = [
        child
        for child in psutil.Process(pid).children()
        if " ".join(child.cmdline()).startswith("minivllm::Worker")
    ]
    return found if len(found) == 2 else []


@scenario(limit_s=90)
def test_A1_concurrent_starts() -> None:
    """Obligation 16: eight executors at once in threads of one process, twice."""
    for _ in range(2):
        results = in_threads(8, _start_one)
        assert len({method for method, _ in results}) == 8, results
        assert {omp for _, omp in results} == {"1"}


def _start_one(index: int) -> tuple[str, str]:
    with make_executor(tp=1, distributed_executor_backend="mp") as executor:
        (method,) = executor.collective_rpc(lambda worker: worker.distributed_init_method)
        (threads,) = executor.collective_rpc("setting", args=("OMP_NUM_THREADS",))
        return method, threads


@scenario()
def test_half_initialised_executor_is_given_back() -> None:
    """An interrupt in the middle of the start leaves nothing."""
    os.environ["LIGHT_INIT"] = "load_model@1=sleep:30"
    threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with raises(KeyboardInterrupt, within_s=5):
        make_executor()
    assert not children()


@scenario(leaks=False)
def test_monitor_inline() -> None:
    """monitor_workers=False and start_worker_monitor(inline=True): the thread of the caller watches."""
    from minivllm.executor.multiproc_executor import MultiprocExecutor

    called: list[bool] = []
    executor = MultiprocExecutor(make_config(), monitor_workers=False)
    executor.register_failure_callback(lambda: called.append(executor.is_failed))
    threading.Timer(0.3, os.kill, (executor.workers[0].pid, signal.SIGKILL)).start()
    executor.start_worker_monitor(inline=True)
    assert called == [True]
    with raises(ExecutorFailedError, "rank 0", "SIGKILL"):
        executor.collective_rpc("echo")


@scenario()
def test_without_a_monitor_the_call_notices() -> None:
    from minivllm.executor.multiproc_executor import MultiprocExecutor

    with MultiprocExecutor(make_config(), monitor_workers=False) as executor:
        with raises(ExecutorFailedError, "rank 1", "SIGKILL", within_s=1.0):
            executor.collective_rpc("die", args=(1,))


# --- configuration ------------------------------------------------------------------------------------------------


@scenario()
def test_K8_bad_configuration_starts_nothing() -> None:
    from minivllm.executor.multiproc_executor import MultiprocExecutor

    for bad, text in (
        ({"nnodes": 2}, "several nodes are not supported"),
        ({"distributed_executor_backend": "ray"}, "'ray' is not known"),
        ({"distributed_executor_backend": "no.such.Executor"}, "cannot be found"),
        ({"distributed_executor_backend": int}, "not a subclass of Executor"),
        ({"distributed_executor_backend": "uni"}, "runs one rank, not 2"),
    ):
        config = make_config(**bad)
        with raises(ConfigError, text):
            Executor.get_class(config)(config)
    assert Executor.get_class(make_config()) is MultiprocExecutor
    assert (
        Executor.get_class(make_config(distributed_executor_backend=MultiprocExecutor)) is MultiprocExecutor
    )
    name = "minivllm.executor.multiproc_executor.MultiprocExecutor"
    assert Executor.get_class(make_config(distributed_executor_backend=name)) is MultiprocExecutor
    os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = "threads"
    with raises(ConfigError, "threads", "spawn, fork, forkserver"):
        make_executor()
    assert not children()


@scenario()
def test_J1_too_little_shared_memory_is_refused_before_any_worker() -> None:
    """Obligation 19, the executor's part: the queue's error arrives, with nothing started."""
    os.environ["MINIVLLM_MQ_MAX_CHUNK_BYTES"] = str(1 << 45)
    with raises(ConfigError, "/dev/shm", "MINIVLLM_MQ"):
        make_executor()
    assert not children()


@scenario(env={"MINIVLLM_MQ_MAX_CHUNK_BYTES": "65536", "MINIVLLM_MQ_MAX_CHUNKS": "3"})
def test_L39_the_size_of_a_slot_holds_for_every_ring() -> None:
    with make_executor() as executor:
        rings = [queue.buffer for queue in (executor.rpc_broadcast_mq, *executor.response_mqs)]
        assert {(ring.max_chunk_bytes, ring.max_chunks) for ring in rings} == {(65536, 3)}
        big = bytes(1 << 20)
        assert executor.collective_rpc("echo", args=(big,)) == [big, big]


@scenario()
def test_unknown_worker_class_is_named() -> None:
    with raises(
        WorkerStartupError, "worker.init_worker", "ConfigError", "worker_cls='workers.Nobody'", within_s=8
    ):
        make_executor(worker="Nobody")


@scenario()
def test_worker_extension() -> None:
    with make_executor(worker_extension_cls="workers.Extension") as executor:
        assert executor.collective_rpc("extended") == ["extension on rank 0", "extension on rank 1"]
    with raises(WorkerStartupError, "worker_extension_cls", "redefines", "echo", within_s=8):
        make_executor(worker_extension_cls="workers.LightWorker")


# --- the main guard -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_A4_missing_main_guard(tmp_path: Path, method: str) -> None:
    """One message that names the guard, a bad exit code, and no more processes than were asked for."""
    script = tmp_path / "no_guard.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(TESTS)!r})\n"
        f"open({str(tmp_path)!r} + f'/ran-{{os.getpid()}}', 'w').close()\n"
        "from executor_helpers import make_executor\n"
        "executor = make_executor()\n"
        "print(executor.collective_rpc('echo', args=(1,)))\n"
    )
    env = {**os.environ, "MINIVLLM_WORKER_MULTIPROC_METHOD": method}
    output, code = run_limited([sys.executable, str(script)], env, 30)
    assert code == 1, output
    assert output.count("if __name__ == '__main__':") == 1, output
    assert len(list(tmp_path.glob("ran-*"))) <= 3
    assert "bootstrapping" not in output


@scenario()
def test_finalizer_exists_before_anything_is_taken() -> None:
    """Invariant 1 of _init_executor: an error in the very first step gives everything back."""
    made: list[ExecutorResources] = []
    original = ExecutorResources.__init__

    def remember(self: ExecutorResources) -> None:
        original(self)
        made.append(self)

    ExecutorResources.__init__ = remember  # type: ignore[method-assign]
    os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = "nonsense"
    with raises(ConfigError):
        make_executor()
    assert made[0].shutting_down
