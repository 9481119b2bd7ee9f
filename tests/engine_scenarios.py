"""Engines that are broken on purpose; each scenario runs as a process of its own: `engine_scenarios.py NAME [args]`.

A scenario asserts what its caller must see, and prints OK at the end. Those whose process is killed from outside
print lines for the test to act upon.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from minivllm import LLM, SamplingParams, tracing
from minivllm.exceptions import ConfigError, EngineDeadError, RemoteError, WorkerStartupError

LONG = SamplingParams(max_tokens=100_000, ignore_eos=True)
# So many that they cannot all have ended before the scenario strikes, however fast the machine is.
MANY = [[1, 2]] * 200
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
# What the design promises, and what a loaded two-core machine adds to it.
ERROR_S = 0.5
SLACK_S = 0.5


def start(**kwargs: Any) -> LLM:
    kwargs.setdefault("tensor_parallel_size", 2)
    kwargs.setdefault("max_model_len", 1000)
    kwargs.setdefault("distributed_executor_backend", "mp")
    return LLM(
        worker_cls="counting_worker.CountingWorker",
        device="cpu",
        max_num_seqs=4,
        **kwargs,
    )


def engine_pid(llm: LLM) -> int:
    pid = llm.llm_engine.engine_core.resources.process.pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


def worker_pids(llm: LLM) -> list[int]:
    return llm.collective_rpc("pid")


def expect_death(
    call: Callable[[], object], kill: Callable[[], object], *texts: str, delay: float = 0.3
) -> str:
    """Kill while `call` is blocked; it must raise EngineDeadError in time, naming each of `texts`."""
    killed: list[float] = []

    def later() -> None:
        time.sleep(delay)
        killed.append(time.monotonic())
        kill()

    thread = threading.Thread(target=later)
    thread.start()
    if not delay:
        thread.join()
    try:
        call()
    except EngineDeadError as error:
        after = time.monotonic() - killed[0]
        message = str(error)
    else:
        raise AssertionError("no error")
    thread.join()
    assert after < ERROR_S + SLACK_S, f"the error came after {after:.2f} s"
    for text in texts:
        assert text in message, f"{text!r} is not in {message!r}"
    print(f"error after {after * 1000:.0f} ms: {message}")
    return message


def expect(kind: type[BaseException], call: Callable[[], object], *texts: str) -> BaseException:
    """`call` must raise `kind`, with each of `texts` in its message."""
    try:
        call()
    except kind as error:
        message = str(error)
        for text in texts:
            if text not in message:
                raise AssertionError(f"{text!r} is not in {message!r}") from error
        return error
    raise AssertionError(f"no {kind.__name__}")


def family_gone(pids: list[int], within: float) -> None:
    begun = time.monotonic()
    alive = pids
    while alive and time.monotonic() - begun < within + SLACK_S:
        alive = [pid for pid in alive if psutil.pid_exists(pid) and not _zombie(pid)]
        time.sleep(0.01)
    assert not alive, f"still alive: {alive}"
    print(f"all gone after {time.monotonic() - begun:.2f} s")


def _zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def engine_killed_in_generate() -> None:
    llm = start()
    pids = [engine_pid(llm), *worker_pids(llm)]
    message = expect_death(
        lambda: llm.generate(MANY, LONG), lambda: os.kill(pids[0], signal.SIGKILL), "SIGKILL"
    )
    assert f"pid {pids[0]}" in message
    family_gone(pids, 1.0)
    for call in (lambda: llm.generate([1]), lambda: llm.collective_rpc("echo", args=(1,))):
        assert str(expect(EngineDeadError, call)) == message, "the first cause must stay"
    llm.shutdown()


def engine_killed_in_collective_rpc() -> None:
    llm = start()
    pids = [engine_pid(llm), *worker_pids(llm)]
    expect_death(
        lambda: llm.collective_rpc("sleep", args=(30,)), lambda: os.kill(pids[0], signal.SIGKILL), "SIGKILL"
    )
    family_gone(pids, 1.5)
    llm.shutdown()


def engine_killed_while_idle() -> None:
    llm = start()
    os.kill(engine_pid(llm), signal.SIGKILL)
    time.sleep(0.2)
    expect_death(lambda: llm.generate([1]), lambda: None, "SIGKILL", delay=0)
    llm.shutdown()


def engine_terminated() -> None:
    llm = start()
    pids = [engine_pid(llm), *worker_pids(llm)]
    expect_death(
        lambda: llm.generate(MANY, LONG),
        lambda: os.kill(pids[0], signal.SIGTERM),
        "EngineCore was ended by SIGTERM",
    )
    family_gone(pids, 1.0)
    llm.shutdown()


def worker_killed_in_generate() -> None:
    llm = start()
    pids = [engine_pid(llm), *worker_pids(llm)]
    expect_death(
        lambda: llm.generate(MANY, LONG),
        lambda: os.kill(pids[2], signal.SIGKILL),
        "rank 1",
        "SIGKILL",
        str(pids[2]),
    )
    family_gone(pids, 1.0)
    llm.shutdown()


def worker_killed_in_collective_rpc() -> None:
    llm = start()
    pids = [engine_pid(llm), *worker_pids(llm)]
    expect_death(
        lambda: llm.collective_rpc("sleep", args=(30,)),
        lambda: os.kill(pids[1], signal.SIGKILL),
        "rank 0",
        "SIGKILL",
    )
    llm.shutdown()
    family_gone(pids, 1.0)


def worker_killed_while_idle() -> None:
    """Nobody is waiting; the next call says what has happened meanwhile."""
    llm = start()
    pids = [engine_pid(llm), *worker_pids(llm)]
    os.kill(pids[1], signal.SIGKILL)
    family_gone(pids, 1.0)
    expect_death(lambda: llm.generate([1]), lambda: None, "rank 0", "SIGKILL", delay=0)
    llm.shutdown()


def step_raises() -> None:
    os.environ["COUNTING_FAIL"] = "1:execute_model:raise:5"
    llm = start()
    pids = [engine_pid(llm), *worker_pids(llm)]
    texts = ("rank 1", "ValueError", "execute_model was told to fail", "counting_worker.py")
    expect(EngineDeadError, lambda: llm.generate([[1, 2]] * 3, [LONG] * 3), *texts)
    family_gone(pids, 1.0)
    llm.shutdown()


def start_up_raises() -> None:
    os.environ["COUNTING_FAIL"] = "1:load_model:raise"
    before = time.monotonic()
    expect(WorkerStartupError, start, "rank 1", "ValueError", "load_model was told to fail")
    assert time.monotonic() - before < 5
    no_children()
    del os.environ["COUNTING_FAIL"]
    with start() as llm:
        assert llm.generate([1], SHORT)[0].finished


def start_up_killed() -> None:
    os.environ["COUNTING_FAIL"] = "1:init_device:kill"
    expect(WorkerStartupError, start, "rank 1", "SIGKILL")
    no_children()


def engine_killed_while_it_imports() -> None:
    """Who is killed has not failed to import anything."""

    def kill() -> None:
        while True:
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if any("spawn_main" in word for word in child.cmdline()):
                        child.kill()
                        return

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    message = str(expect(EngineDeadError, start, "SIGKILL", "during start-up"))
    assert "could not import" not in message, message
    no_children()


def start_up_rpc_raises() -> None:
    os.environ["COUNTING_FAIL"] = "0:determine_available_memory:raise"
    expect(EngineDeadError, start, "rank 0", "ValueError", "determine_available_memory")
    no_children()


def start_up_is_late() -> None:
    os.environ["COUNTING_FAIL"] = "1:load_model:sleep"
    before = time.monotonic()
    expect(WorkerStartupError, lambda: start(startup_timeout_s=1.5), "1.5 s", "rank 1", "worker.init")
    assert time.monotonic() - before < 6
    no_children()


def pool_too_small() -> None:
    expect(ConfigError, lambda: start(block_size=1 << 16), "rank 0", "block")
    no_children()


def no_children() -> None:
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        left = [
            p
            for p in psutil.Process().children(recursive=True)
            if "resource_tracker" not in " ".join(p.cmdline())
        ]
        if not left:
            return
        time.sleep(0.02)
    raise AssertionError(f"left: {left}")


def shutdown_during_generate() -> None:
    llm = start()
    expect_death(lambda: llm.generate(MANY, LONG), llm.shutdown, "shut down")
    no_children()


def interrupted_generate_leaves_the_engine_usable() -> None:
    llm = start()
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    expect(KeyboardInterrupt, lambda: llm.generate(MANY, LONG))
    assert not llm.llm_engine.has_unfinished_requests()
    first = llm.generate([[1, 2], [3]], SHORT)
    assert [len(output.outputs[0].token_ids) for output in first] == [4, 4]
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    expect(KeyboardInterrupt, lambda: llm.collective_rpc("sleep", args=(0.6,)))
    assert llm.collective_rpc("echo", args=("mine",)) == ["mine"] * 2
    llm.shutdown()


def interrupted_between_sending_and_waiting() -> None:
    """EngineCore is at the call although nobody has waited for it yet, so it is not asked to end in its own time."""
    llm = start()
    client = llm.llm_engine.engine_core
    receive = client._receive

    def interrupted() -> None:
        client._receive = receive
        time.sleep(0.2)
        raise KeyboardInterrupt

    client._receive = interrupted
    expect(KeyboardInterrupt, lambda: llm.collective_rpc("sleep", args=(30,)))
    begun = time.monotonic()
    llm.shutdown()
    assert time.monotonic() - begun < 2, f"{time.monotonic() - begun:.2f} s"


def _leave_to_other_threads(worker: object, number: int) -> None:
    """From now on this signal interrupts no call of this thread, as if it always came just before one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])


def signals_that_interrupt_no_call() -> None:
    """A signal may come between the last look for one and a call that waits; nothing may wait on for that."""
    llm = start(tensor_parallel_size=1, distributed_executor_backend="uni")
    llm.collective_rpc(_leave_to_other_threads, args=(signal.SIGTERM,))
    begun = time.monotonic()
    llm.shutdown()
    assert time.monotonic() - begun < 0.5 + SLACK_S, (
        f"EngineCore ended after {time.monotonic() - begun:.2f} s"
    )

    llm = start()
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    _leave_to_other_threads(None, signal.SIGINT)
    begun = time.monotonic()
    expect(KeyboardInterrupt, lambda: llm.collective_rpc("sleep", args=(5,)))
    assert time.monotonic() - begun < 1 + SLACK_S, f"interrupted after {time.monotonic() - begun:.2f} s"
    llm.shutdown()


def rpc_timeout() -> None:
    llm = start()
    expect(TimeoutError, lambda: llm.collective_rpc("sleep", timeout=0.2, args=(0.5,)), "sleep")
    assert llm.collective_rpc("echo", args=(2,)) == [2, 2]
    error = expect(RemoteError, lambda: llm.collective_rpc("fail_on", args=(1,)), "LookupError")
    assert isinstance(error, RemoteError) and error.rank == 1
    llm.shutdown()


def twenty_starts_and_stops() -> None:
    import tempfile

    pids: set[int] = set()
    descriptors: list[int] = []
    for number in range(20):
        llm = start()
        pids |= {engine_pid(llm), *worker_pids(llm)}
        assert llm.generate([number], SHORT)[0].finished
        before = time.monotonic()
        llm.shutdown()
        assert time.monotonic() - before < 0.5 + SLACK_S
        no_children()
        descriptors.append(psutil.Process().num_fds())
    # minivllm-<pid of the creator>-…; others may be at work on this machine.
    left = [n for n in os.listdir("/dev/shm") if n.startswith("minivllm-") and int(n.split("-")[1]) in pids]
    assert not left, left
    own = {str(pid) for pid in (os.getpid(), *pids)}
    names = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("minivllm-")]
    assert not [name for name in names if own & {*name.split("-")}]
    # What the first engine needs once and for all stays; nothing is added by any further one.
    assert len(psutil.Process().open_files()) < 10 and descriptors[-1] == descriptors[0] < 40, descriptors


def exit_without_shutdown() -> None:
    llm = start()
    llm.generate([1], SHORT)
    sys.exit(7)


def engine_killed_with_a_worker_stopped() -> None:
    """The stopped one cannot notice that it is an orphan; nothing is left when shutdown() returns."""
    llm = start()
    workers = worker_pids(llm)
    os.kill(workers[1], signal.SIGSTOP)
    os.kill(engine_pid(llm), signal.SIGKILL)
    begun = time.monotonic()
    llm.shutdown()
    took = time.monotonic() - begun
    for pid in workers:
        # Its next parent may not have reaped it yet.
        with suppress(FileNotFoundError, ProcessLookupError):
            assert ") Z " in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8"), "a worker is left"
    assert took < 3 + SLACK_S, took


def trace_disk_is_full() -> None:
    """The client's own files are there already; those of EngineCore find no room."""
    with tempfile.TemporaryDirectory() as directory:
        tracing.configure("client", trace_dir=directory, level="lifecycle")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        told = ""
        try:
            start(trace=directory)
        except ConfigError as error:
            told = str(error)
        assert told.startswith("cannot write traces to") and told.endswith("File too large"), told


def standard_streams_are_closed() -> None:
    """Started with some of the descriptors 0, 1 and 2 closed: in every process they lead to the null device."""
    closed = [fd for fd in range(3) if not os.path.exists(f"/proc/self/fd/{fd}")]
    llm = start()
    assert llm.generate([1], SHORT)[0].finished
    llm.collective_rpc(lambda worker: print("printed by a worker"))
    targets = llm.collective_rpc(lambda worker: [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)])
    assert all(target[fd] == os.devnull for target in targets for fd in closed), targets
    core = f"/proc/{engine_pid(llm)}/fd"
    assert all(os.readlink(f"{core}/{fd}") == os.devnull for fd in closed)
    llm.shutdown()
    os._exit(7)


def forked_child_cannot_use_or_end_the_engine() -> None:
    """With EngineCore in a process of its own and in this one; also while a thread of the parent is in a call."""

    def use_in_a_child(llm: LLM) -> None:
        busy = threading.Thread(target=llm.generate, args=([1], SHORT))
        busy.start()
        pid = os.fork()
        if pid == 0:
            signal.alarm(5)
            calls: list[Callable[[], object]] = [
                lambda: llm.generate([1], SHORT),
                lambda: llm.collective_rpc("pid"),
                lambda: llm.llm_engine.abort_requests(["0"]),
                llm.llm_engine.engine_core.get_output,
            ]
            for call in calls:
                try:
                    call()
                    os._exit(3)
                except EngineDeadError as error:
                    if f"belongs to process {os.getppid()}, and process {os.getpid()}" not in str(error):
                        os._exit(4)
            llm.shutdown()
            atexit._run_exitfuncs()  # as sys.exit() would, which this scenario's process must survive
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        busy.join()
        assert llm.generate([1], SHORT)[0].finished
        llm.shutdown()

    for own_process in ("1", "0"):
        os.environ["MINIVLLM_ENABLE_MULTIPROCESSING"] = own_process
        use_in_a_child(start())


def run_until_killed(phase: str) -> None:
    """Print the pids of the family, then be in `phase` until somebody ends this process."""
    if phase == "start":
        os.environ["COUNTING_FAIL"] = "1:load_model:sleep"

        def announce() -> None:
            me = psutil.Process()
            while True:
                workers = [
                    p.pid
                    for p in me.children(recursive=True)
                    if "orker" in p.name() or "orker" in str(p.cmdline()[:1])
                ]
                if len(workers) >= 2:
                    break
                time.sleep(0.02)
            time.sleep(0.3)
            print("FAMILY", *[p.pid for p in me.children(recursive=True)], flush=True)

        threading.Thread(target=announce, daemon=True).start()
        start()
    llm = start()
    print("FAMILY", *[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
    if phase == "idle":
        # A signal that comes just before a sleep begins does not end it, nor does one just before a wait; minivllm's
        # own waits are short for that reason.
        while True:
            time.sleep(0.1)
    elif phase == "generate":
        while True:
            llm.generate([[1, 2]] * 4, [LONG] * 4)
    elif phase == "rpc":
        llm.collective_rpc("sleep", args=(60,))


if __name__ == "__main__":
    if sys.stderr is not None:
        faulthandler.enable()
        faulthandler.dump_traceback_later(50, exit=True)
    globals()[sys.argv[1]](*sys.argv[2:])
    print("OK", flush=True)
