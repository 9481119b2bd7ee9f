"""The executor's small parts, each by itself, and UniProcExecutor."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from executor_helpers import make_config
from scenario import TESTS, raises, scenario
from workers import LightWorker, Odd

from minivllm.exceptions import ConfigError, ExecutorFailedError, WorkerStartupTimeout
from minivllm.executor.abstract import Executor
from minivllm.executor.remote_exception import describe_exception
from minivllm.executor.status_page import StatusPage, WorkerState
from minivllm.executor.uniproc_executor import UniProcExecutor
from minivllm.platforms import cpu
from minivllm.utils import numa_utils, system_utils
from minivllm.worker.worker_base import WorkerWrapperBase, resolve_worker_class

# --- UniProcExecutor ----------------------------------------------------------------------------------------------


def make_uni(**parallel: Any) -> UniProcExecutor:
    config = make_config(tp=1, **parallel)
    executor_class = Executor.get_class(config)
    assert executor_class is UniProcExecutor
    return UniProcExecutor(config)


@scenario()
def test_uniproc_is_of_no_use_in_a_forked_child() -> None:
    executor = make_uni()
    if (pid := os.fork()) == 0:
        with raises(ExecutorFailedError, f"belongs to process {os.getppid()}, and process {os.getpid()}"):
            executor.collective_rpc("echo")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert executor.collective_rpc("echo", args=(1,)) == [1]
    executor.shutdown()


def test_uniproc_has_the_same_interface() -> None:
    with make_uni() as executor:
        call = executor.collective_rpc
        assert call("identify") == [(0, os.getpid())]
        assert call("identify", unique_reply_rank=0) == (0, os.getpid())
        assert call(lambda worker, x: worker.rank + x, args=(2,)) == [2]
        assert call("late", args=(3,)) == [3]
        with raises(KeyError, "boom"):
            call("fail_on", args=(0,))
        future = call("echo", args=(1,), non_block=True)
        assert future.done() and future.result() == [1]
        late = call("late", args=(4, 0.01), non_block=True, unique_reply_rank=0)
        assert late.result() == 4 and late.result() == 4
        failing = call("fail_on", args=(0,), non_block=True)
        assert isinstance(failing.exception(), KeyError)
        with raises(RuntimeError, "the copy failed"):
            call("late_error", non_block=True).result()
        assert wait([future], 1).done
        executor.initialize_from_config(["caches"])  # type: ignore[list-item]
        assert call("get_kept") == ["caches"]
        assert executor.determine_available_memory() == [1 << 20]
        executor.check_health()
        assert not executor.is_failed and len(executor.status_snapshot()) == 1
    with raises(ExecutorFailedError, "shut down"):
        executor.collective_rpc("echo")
    executor.shutdown()


@scenario()
def test_uniproc_failed_start_leaves_nothing() -> None:
    os.environ["LIGHT_INIT"] = "load_model@0=raise"
    with raises(ValueError, "no such weights"):
        make_uni()


def test_uniproc_refuses_several_ranks() -> None:
    with raises(ConfigError, "one rank, not 2"):
        UniProcExecutor(make_config(tp=2))


# --- the wrapper --------------------------------------------------------------------------------------------------


def test_wrapper_before_and_after_the_worker_exists() -> None:
    wrapper = WorkerWrapperBase(rpc_rank=1, global_rank=5)
    wrapper.shutdown()
    with raises(AttributeError, "no worker yet"):
        wrapper.echo(1)
    with raises(RuntimeError, "init_worker"):
        wrapper.initialize_from_config([])
    kwargs = {
        "vllm_config": make_config(tp=2),
        "local_rank": 1,
        "rank": 5,
        "distributed_init_method": "file:///nowhere",
    }
    wrapper.init_worker([{}, kwargs])
    assert isinstance(wrapper.worker, LightWorker) and wrapper.rank == 5
    assert wrapper.execute_method("echo", 3) == 3
    wrapper.initialize_from_config(list("abcdef"))  # type: ignore[arg-type]
    assert wrapper.get_kept() == "f"


def test_worker_class_auto_is_the_platforms() -> None:
    config = make_config()
    config.parallel_config.worker_cls = "auto"
    assert resolve_worker_class(config).__module__ == "minivllm.worker.gpu_worker"


def test_extension_does_not_change_the_worker_class() -> None:
    extended = resolve_worker_class(make_config(worker_extension_cls="workers.Extension"))
    assert issubclass(extended, LightWorker) and not hasattr(LightWorker, "extended")
    with raises(ConfigError, "worker_cls", "workers.Missing"):
        resolve_worker_class(make_config(worker="Missing"))


# --- parts --------------------------------------------------------------------------------------------------------


def test_no_torch_in_the_executor() -> None:
    """Client, EngineCore and light workers stay light."""
    script = (
        "import sys, minivllm.executor.multiproc_executor, minivllm.executor.uniproc_executor\n"
        "heavy = {'torch', 'numpy', 'cloudpickle', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=TESTS.parent)


def test_describe_exception_never_raises() -> None:
    try:
        raise Odd
    except Odd as error:
        described = describe_exception(error)
    assert described.type_name == "workers.Odd"
    assert "__str__ raised ValueError" in described.message and "test_describe" in described.traceback


def test_startup_timeout_is_both_kinds_of_error() -> None:
    error = WorkerStartupTimeout("late")
    assert isinstance(error, TimeoutError) and isinstance(error, ExecutorFailedError) and str(error) == "late"


def test_status_page() -> None:
    page = StatusPage(2)
    assert page.status(1).state is WorkerState.STARTING and page.status(1).step == "worker.bootstrap"
    page.set_state(1, WorkerState.RUNNING)
    page.words[page.index(1, 10)] = (3 << 40) | 7
    page.words[page.index(1, 11)] = 8
    assert (page.status(1).finished, page.status(1).executing) == (7, 8)
    assert page.status(0).finished == 0
    with raises(TypeError, "at its start only"):
        import pickle

        pickle.dumps(page)
    page.close_descriptor()
    page.close_descriptor()


def test_explain_exit() -> None:
    assert system_utils.explain_exit(-9) == "was killed by SIGKILL"
    assert system_utils.explain_exit(143) == "ended after SIGTERM (exit code 143)"
    assert system_utils.explain_exit(1) == "exited with code 1"
    assert system_utils.explain_exit(-200) == "was killed by signal 200"
    assert "__main__" in system_utils.explain_exit(system_utils.MAIN_GUARD_EXIT_CODE)


def test_log_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line once, also when it comes in pieces; a closed stream kills nobody; a later name replaces the first."""

    class Stream(io.StringIO):
        pass

    out = Stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    system_utils.decorate_logs("Worker")
    print("one")
    system_utils.decorate_logs("Worker_TP1")
    print("two", end="")
    print(" and a half\nthree")
    head = f"(Worker pid={os.getpid()}) "
    tail = f"(Worker_TP1 pid={os.getpid()}) "
    assert out.getvalue() == f"{head}one\n{tail}two and a half\n{tail}three\n"
    out.close()
    print("nobody hears this")


def test_sigint_waits_while_a_child_is_started() -> None:
    with raises(KeyboardInterrupt):
        with system_utils.undisturbed_start():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            survived = True
    assert survived


def test_the_first_child_of_a_process_starts_with_sigint_blocked() -> None:
    """Python's tracker of shared memory is started on the way to it, and unblocks SIGINT in its parent."""
    code = """
import multiprocessing, signal, time
from minivllm.utils.system_utils import undisturbed_start
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(60,))
    with undisturbed_start(context):
        child.start()
    with open(f"/proc/{child.pid}/status") as status:
        (blocked,) = [int(line.split()[1], 16) for line in status if line.startswith("SigBlk")]
    child.kill()
    child.join()
    print("blocked" if blocked >> (signal.SIGINT - 1) & 1 else "open")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("blocked\n", "")


def test_a_signal_that_another_thread_takes_waits_as_well() -> None:
    """The mask of this thread does not keep it off: Python runs handlers in the main thread, whoever took the signal."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with raises(KeyboardInterrupt):
            with system_utils.undisturbed_start():
                signal.pthread_kill(thread.ident or 0, signal.SIGINT)
                time.sleep(0.05)
                survived = True
        assert survived and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        stop.set()
        thread.join()


def test_each_rank_on_a_cpu_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 5, 8})
    assert [cpu.core_share(rank, 2) for rank in range(2)] == [{1, 2}, {3, 5}]
    assert [cpu.core_share(rank, 5) for rank in range(5)] == [{1}, {2}, {3}, {5}, {8}]
    assert cpu.core_share(0, 1) == {1, 2, 3, 5, 8}
    assert cpu.core_share(0, 6) is None, "more ranks than cores: nobody is bound"


@pytest.mark.skipif(cpu.usable_cores() < 2, reason="two ranks need two cores")
def test_a_rank_with_more_threads_than_its_share_is_not_bound() -> None:
    code = """
import os, torch
from minivllm.platforms.cpu import CpuPlatform, core_share
every, share = os.sched_getaffinity(0), core_share(1, 2)
for threads, expected in ((len(share) + 1, every), (len(share), share)):
    torch.set_num_threads(threads)
    CpuPlatform().bind_device(1, 2)
    assert os.sched_getaffinity(0) == expected, (threads, os.sched_getaffinity(0))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_numa(tmp_path: Path) -> None:
    assert numa_utils.parse_cpulist("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa_utils.parse_cpulist("\n") == set()
    mine = min(os.sched_getaffinity(0))
    for node, cpus in ((0, str(mine)), (1, f"{mine}-{mine + 1}"), (2, "9999")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    nodes = numa_utils.numa_nodes(tmp_path)
    assert set(nodes) == {0, 1}
    assert [numa_utils.choose_numa_node(rank, 4, nodes) for rank in range(4)] == [0, 0, 1, 1]
    assert numa_utils.choose_numa_node(0, 2, {0: {0}}) is None
    assert numa_utils.numa_nodes(tmp_path / "missing") == {}


@scenario()
def test_numa_binding_takes_effect() -> None:
    """On the node that there is: the process runs on its CPUs afterwards."""
    (node, cpus), *_ = numa_utils.numa_nodes().items()
    numa_utils.bind_to_numa_node(node)
    assert os.sched_getaffinity(0) == cpus
