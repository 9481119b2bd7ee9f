"""Scenes in which multi-process layers break, the same lines on vLLM 0.25.1 and on minivllm.

    python tests/originals/scenes.py minivllm 7       # one scene
    python tests/originals/scenes.py vllm 7           # the same in an environment that has vLLM 0.25.1 (CPU is enough)
    python tests/originals/record.py minivllm         # all, into docs/originals.json

A scene prints what happened. It runs in a process of its own, which may be left in any state.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import cpu_s, engine, is_alive, say, state
from methods import Poison

Scene = Callable[[Any], None]
SCENES: dict[int, Scene] = {}


def scene(number: int) -> Callable[[Scene], Scene]:
    def register(function: Scene) -> Scene:
        SCENES[number] = function
        return function

    return register


def outcome(call: Callable[[], Any]) -> str:
    """What a call returned or raised, in a line."""
    started = time.monotonic()
    try:
        return repr(call())
    except BaseException as error:
        text = str(error).split("\n--- traceback")[0].split(", please check")[0].replace("\n", " ")
        took = time.monotonic() - started
        after = f"  [after {took:.1f} s]" if took >= 0.15 else ""
        return f"{type(error).__name__}: {text}{after}"


class Caller:
    """A call in a thread, since it may never return."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.outcome = ""
        self.ended_at = 0.0
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        self.outcome = outcome(call)
        self.ended_at = time.monotonic()

    def after(self, seconds: float) -> str:
        self.thread.join(seconds)
        if not self.thread.is_alive():
            return self.outcome
        frame = sys._current_frames()[self.thread.ident or 0]
        stack = [f for f in traceback.extract_stack(frame) if "/threading.py" not in f.filename]
        ours = [f for f in stack if "vllm" in f.filename and f.name != "sched_yield"] or stack
        where = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} {ours[-1].name}"
        return f"still blocked after {seconds:g} s, at {where}"


def pids(executor: Any) -> list[int]:
    return [worker.proc.pid for worker in executor.workers]


@scene(1)
def next_call_after_a_failed_rank(engine: Any) -> None:
    executor = engine.make()
    say("call 1, fails on rank 0:  " + outcome(lambda: executor.collective_rpc("fail_on", args=(0, "old"))))
    say("call 2, echo('new'):      " + outcome(lambda: executor.collective_rpc("echo", args=("new",))))
    say("call 3, echo('third'):    " + outcome(lambda: executor.collective_rpc("echo", args=("third",))))


@scene(2)
def next_call_after_a_timeout(engine: Any) -> None:
    executor = engine.make()
    call = lambda: executor.collective_rpc("sleep", args=(1.0, "old"), timeout=0.2)  # noqa: E731
    say("call 1, sleeps 1 s, limit 0.2 s: " + outcome(call))
    say("call 2, echo('new'):             " + outcome(lambda: executor.collective_rpc("echo", args=("new",))))
    say(
        "call 3, echo('third'):           "
        + outcome(lambda: executor.collective_rpc("echo", args=("third",)))
    )


@scene(3)
def failure_on_a_rank_that_does_not_reply(engine: Any) -> None:
    executor = engine.make()
    call = lambda: executor.collective_rpc("fail_on", args=(1, "x"), unique_reply_rank=0)  # noqa: E731
    say("rank 0 replies, rank 1 raises: " + outcome(call))
    say(f"is_failed: {executor.is_failed}")


@scene(4)
def death_while_the_other_rank_is_busy(engine: Any) -> None:
    executor = engine.make()
    rank_1 = pids(executor)[1]
    called = threading.Event()
    executor.register_failure_callback(called.set)
    caller = Caller(lambda: executor.collective_rpc("sleep", args=(60, "x"), timeout=120))
    time.sleep(0.5)
    killed = time.monotonic()
    os.kill(rank_1, signal.SIGKILL)
    called.wait(30)
    say(f"failure callback {time.monotonic() - killed:.2f} s after SIGKILL of rank 1")
    caller.after(30)
    say(f"blocked caller {caller.ended_at - killed:.2f} s after it: {caller.outcome.split('  [')[0]}")
    say("next call: " + outcome(lambda: executor.collective_rpc("echo", args=(1,))))


@scene(5)
def writer_on_a_full_ring(engine: Any) -> None:
    executor = engine.make()
    rank_1 = pids(executor)[1]
    os.kill(rank_1, signal.SIGSTOP)
    done = []

    def call() -> None:
        for i in range(30):
            executor.collective_rpc("echo", args=(i,), unique_reply_rank=0, timeout=2, non_block=True)
            done.append(i)

    caller = Caller(call)
    quiet_since, count = time.monotonic(), 0
    while time.monotonic() - quiet_since < 0.5 and not caller.outcome:
        time.sleep(0.01)
        if len(done) > count:
            quiet_since, count = time.monotonic(), len(done)
    before = time.process_time()
    time.sleep(1)
    used = time.process_time() - before
    say(
        f"rank 1 stopped, limit 2 s: {len(done)} calls go through; in a second of waiting the caller uses {used:.2f} s of processor"
    )
    say(f"call {len(done) + 1}: " + caller.after(4))
    os.kill(rank_1, signal.SIGKILL)
    if not caller.outcome:
        say("14 s after SIGKILL of rank 1: " + caller.after(14))
    else:
        time.sleep(0.5)
        say("after SIGKILL of rank 1: " + outcome(lambda: executor.collective_rpc("echo", args=(1,))))
    os._exit(0)


@scene(6)
def killed_parent(engine: Any) -> None:
    for doing in ("idle", "inside a call"):
        reader, writer = os.pipe()
        parent = os.fork()
        if parent == 0:
            executor = engine.make()
            if doing != "idle":
                executor.collective_rpc("spin", non_block=True)
                time.sleep(0.5)
            os.write(writer, " ".join(map(str, pids(executor))).encode())
            time.sleep(100)
        workers = [int(pid) for pid in os.read(reader, 100).split()]
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        killed = time.monotonic()
        while time.monotonic() - killed < 8 and any(map(is_alive, workers)):
            time.sleep(0.01)
        took = time.monotonic() - killed
        alive = sum(map(is_alive, workers))
        say(
            f"workers {doing}: "
            + (f"{alive} of 2 alive after {took:.0f} s" if alive else f"gone after {took:.2f} s")
        )
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGKILL)


@scene(7)
def two_safety_nets(engine: Any) -> None:
    executor = engine.make()
    executor.collective_rpc("sleep", args=(60, "x"), non_block=True)
    time.sleep(0.5)
    started = time.monotonic()
    executor.shutdown()
    took = time.monotonic() - started
    say(f"shutdown with two busy workers:   {took:.2f} s, exit codes {exit_codes(executor)}")
    executor = engine.make()
    if engine.name == "vllm":  # its monitor shall not close the death pipes when the first of the two is gone
        executor.monitor, executor.shutting_down = None, True
    executor.collective_rpc("sleep", args=(60, "x"), non_block=True)
    time.sleep(0.5)
    started = time.monotonic()
    for pid in pids(executor):
        os.kill(pid, signal.SIGTERM)
    while any(map(is_alive, pids(executor))):
        time.sleep(0.005)
    took = time.monotonic() - started
    say(f"SIGTERM, the death pipe untouched: {took:.2f} s, exit codes {exit_codes(executor)}")
    os._exit(0)


def exit_codes(executor: Any) -> list[int]:
    """Of the workers; minivllm has closed the process objects by then, and its handles know."""
    codes = []
    for worker in executor.workers:
        if hasattr(worker, "exitcode"):
            worker.has_ended()
            codes.append(worker.exitcode)
        else:
            worker.proc.join(2)
            codes.append(worker.proc.exitcode)
    return codes


@scene(8)
def forgotten_executor(engine: Any) -> None:
    executor = engine.make()
    workers, reference = pids(executor), weakref.ref(executor)
    del executor
    gc.collect()
    time.sleep(1)
    gc.collect()
    say(
        f"after del and gc.collect(): collected {reference() is None}, workers alive {sum(map(is_alive, workers))}"
    )
    if (left := reference()) is not None:
        say("held by: " + ", ".join(sorted({type(holder).__name__ for holder in gc.get_referrers(left)})))
        left.shutdown()


@scene(9)
def death_between_ready_and_handshake(engine: Any) -> None:
    engine.die_after_ready()
    say("rank 1 dies right after READY: " + Caller(engine.make).after(25))
    os._exit(0)


@scene(10)
def failed_start(engine: Any) -> None:
    before = engine.segments()
    engine.fail_in_init()
    started = time.monotonic()
    try:
        engine.make()
    except Exception as error:
        text = str(error).split("\n--- traceback")[0].replace("\n", " ")
        say(
            f"rank 1 raises ValueError('no such weights') in init_device; {time.monotonic() - started:.1f} s later:"
        )
        say(f"{type(error).__name__}: {text}")
        say(f"cause: {type(error.__cause__).__name__ if error.__cause__ else 'none'}")
    left = len(engine.segments() - before)
    say(f"segments left: {left}")
    collector = Caller(gc.collect)
    collected = collector.after(10)
    say("gc.collect(): " + ("returns" if not collected.startswith("still") else collected))
    if collected.startswith("still"):
        os._exit(0)
    engine.do_not_fail_in_init()
    say("a second start: " + outcome(lambda: engine.make().collective_rpc("echo", args=("ok",))))


@scene(11)
def remote_exceptions(engine: Any) -> None:
    executor = engine.make()
    say("KeyError('boom'):  " + outcome(lambda: executor.collective_rpc("fail_on", args=(0, ""))))
    executor = engine.make()
    try:
        executor.collective_rpc("fail_empty")
    except Exception as error:
        text = str(error).split("\n--- traceback")[0].split(", please check")[0]
        say(f"AssertionError():  {type(error).__name__}: {text}")
        say(
            f"the remote traceback is in the error: {'fail_empty' in str(error) and 'Traceback' in str(error)}"
        )


@scene(12)
def two_threads_wait(engine: Any) -> None:
    executor = engine.make()
    one = executor.collective_rpc("sleep", args=(0.5, "F1"), non_block=True)
    callers = [Caller(one.result), Caller(one.result)]
    say("one future, two threads: " + "; ".join(caller.after(5) for caller in callers))
    first = executor.collective_rpc("sleep", args=(0.5, "F1"), non_block=True)
    second = executor.collective_rpc("echo", args=("F2",), non_block=True)
    callers = [Caller(first.result)]
    time.sleep(0.1)
    callers.append(Caller(second.result))
    results = [caller.after(5) for caller in callers]
    say("two futures, two threads: first: " + results[0])
    say("                          second: " + results[1])
    os._exit(0)


@scene(13)
def result_that_cannot_be_pickled(engine: Any) -> None:
    executor = engine.make(async_scheduling=True)
    say("returns a lambda: " + outcome(lambda: executor.collective_rpc("return_lambda", timeout=3)))
    say("next call:        " + outcome(lambda: executor.collective_rpc("echo", args=("after",), timeout=3)))
    say(f"is_failed: {executor.is_failed}")
    os._exit(0)


@scene(14)
def messages_that_cannot_be_unpickled(engine: Any) -> None:
    def call(method: str, *args: Any) -> str:
        return Caller(lambda: executor.collective_rpc(method, timeout=5, args=args)).after(10)

    executor = engine.make()
    say("such a result:    " + call("return_poison"))
    for i in (1, 2):
        say(f"next call {i}:      " + call("echo", "x"))
    executor = engine.make()
    workers = pids(executor)
    say("such an argument: " + call("ignore", Poison()))
    time.sleep(0.5)
    say(f"workers alive:    {sum(map(is_alive, workers))}")
    say("next call:        " + call("echo", "x"))
    os._exit(0)


@scene(15)
def arrays_that_change(engine: Any) -> None:
    import numpy as np

    executor = engine.make()
    size = 2 << 20
    executor.collective_rpc("keep", args=(np.full(size, 7, np.uint8),))
    for i in range(12):
        executor.collective_rpc("ignore", args=(np.full(size, 100 + i, np.uint8),))
    say(f"an array of sevens, kept by the workers, 12 calls later: {executor.collective_rpc('look')}")
    array = np.full(20 << 20, 1, np.uint8)
    future = executor.collective_rpc("keep", args=(array,), non_block=True)
    array[:] = 9
    say(f"20 MiB of ones, overwritten with nines after the call was sent: {future.result()}")


@scene(16)
def concurrent_starts(engine: Any) -> None:
    import multiprocessing

    os.environ["VLLM_PORT"] = "41234"
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(8), context.Queue()

    def pick() -> None:
        barrier.wait()
        if engine.name == "vllm":
            from vllm.utils.network_utils import get_distributed_init_method, get_open_port

            queue.put(get_distributed_init_method("127.0.0.1", get_open_port()))
        else:
            from minivllm.utils.network_utils import Rendezvous

            rendezvous = Rendezvous()
            queue.put(rendezvous.distributed_init_method.replace(str(engine.directory), "$TMPDIR"))
            rendezvous.remove()

    processes = [context.Process(target=pick) for _ in range(8)]
    for process in processes:
        process.start()
    found = [queue.get() for _ in processes]
    say(f"8 starts at once: {len(set(found))} different meeting points, such as {found[0]}")


@scene(17)
def what_stays(engine: Any) -> None:
    shared, files = engine.segments(), engine.files()
    executor = engine.make()
    executor.collective_rpc("echo", args=(1,))
    executor.shutdown()
    del executor
    gc.collect()
    left = len(engine.segments() - shared), len(engine.files() - files)
    say(f"clean shutdown: {left[0]} segments and {left[1]} files stay")
    shared, files = engine.segments(), engine.files()
    executor = engine.make()
    caller = Caller(lambda: executor.collective_rpc("sleep", args=(60, "x")))
    time.sleep(0.5)
    workers = pids(executor)
    os.kill(workers[1], signal.SIGKILL)
    caller.after(15)
    executor.shutdown()
    time.sleep(0.3)
    left = len(engine.segments() - shared), len(engine.files() - files)
    zombies = [state(pid) for pid in workers].count("Z")
    say(f"rank 1 killed, executor shut down: {left[0]} segments and {left[1]} files stay, {zombies} zombies")


@scene(18)
def processor_time(engine: Any) -> None:
    executor = engine.make()
    workers = pids(executor)
    executor.collective_rpc("echo", args=(1,))
    for what, seconds, pause in (
        ("the first second after a call", 1.0, 0.3),
        ("four idle seconds", 4.0, 0.0),
    ):
        before = [cpu_s(pid) for pid in workers]
        time.sleep(seconds)
        used = [100 * (cpu_s(pid) - cpu) / seconds for pid, cpu in zip(workers, before, strict=True)]
        say(f"{what}: {', '.join(f'{percent:.0f} %' for percent in used)} of a core per worker")
        time.sleep(pause)
    before, started = [cpu_s(pid) for pid in workers], time.monotonic()
    for _ in range(10):
        executor.collective_rpc("echo", args=(1,))
        time.sleep(0.5)
    seconds = time.monotonic() - started
    used = [100 * (cpu_s(pid) - cpu) / seconds for pid, cpu in zip(workers, before, strict=True)]
    say(
        f"one call every half second: {', '.join(f'{percent:.0f} %' for percent in used)} of a core per worker"
    )


@scene(19)
def small_dev_shm(engine: Any) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    # A mount namespace of its own with what Docker gives a container, or less.
    size = "64m" if engine.name == "vllm" else "8m"
    if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
        raise SystemExit("no mount namespace here")
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()):
        raise SystemExit("cannot mount a tmpfs here")
    executor: Any = None

    def start() -> str:
        nonlocal executor
        executor = engine.make()
        return "starts"

    say(f"/dev/shm of {size}: " + outcome(start).strip("'"))
    if executor is not None:
        pid = os.fork()
        if pid == 0:
            payload = bytes(12 << 20)
            for _ in range(10):
                executor.rpc_broadcast_mq.enqueue(payload)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        ended = (
            signal.Signals(-os.waitstatus_to_exitcode(status)).name if os.WIFSIGNALED(status) else "nothing"
        )
        say(f"ten messages of 12 MiB: the writer ends by {ended}")
    os._exit(0)


@scene(20)
def spans_of_workers(engine: Any) -> None:
    if engine.name == "vllm":
        _spans_of_vllm(engine)
        return
    import json
    from pathlib import Path

    from minivllm import tracing

    trace = engine.directory / "trace"
    tracing.configure("engine_core", trace_dir=str(trace), level="rpc")
    with tracing.span("engine_core.init"):
        executor = engine.make()
    workers = pids(executor)
    with tracing.span("engine_core.step"):
        executor.collective_rpc("echo", args=(1,))
    executor.shutdown()
    tracing.shutdown()
    for rank, pid in enumerate(workers):
        names: list[str] = []
        for path in Path(trace).glob(f"worker-{pid}.jsonl"):
            for line in path.read_text().splitlines():
                for resource in json.loads(line)["resourceSpans"]:
                    names += [span["name"] for scope in resource["scopeSpans"] for span in scope["spans"]]
        say(
            f"rank {rank}: {len(names)} spans under its own pid, rpc.execute among them: {'rpc.execute' in names}"
        )


def _spans_of_vllm(engine: Any) -> None:
    import vllm.tracing.otel as otel
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class ToFile(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            with open(engine.sockets / "spans", "a") as file:
                for span in spans:
                    print(
                        span.name, os.getpid(), span.resource.attributes.get("vllm.process_name"), file=file
                    )
            return SpanExportResult.SUCCESS

    otel.get_span_exporter = lambda endpoint: ToFile()
    otel.init_otel_tracer("vllm.llm_engine", "http://127.0.0.1:9", {"vllm.process_name": "Parent"})
    executor = engine.make()
    say(f"each worker ends a span; the process that it carries: {executor.collective_rpc('traced')}")
    executor.shutdown()
    time.sleep(0.5)
    exported = (engine.sockets / "spans").read_text() if (engine.sockets / "spans").exists() else ""
    say(f"of two spans that ended just before the shutdown, exported: {exported.count('worker-rpc')}")


@scene(21)
def killed_engine_core(engine: str) -> None:
    """The whole engine, with a model: nothing of it is replaced."""
    import importlib

    import psutil

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    module = importlib.import_module(engine)
    checkpoint = Path(__file__).resolve().parents[2] / "minivllm" / "assets" / "tiny-qwen3"
    llm = module.LLM(
        str(checkpoint),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=8,
    )
    params = module.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    caller = Caller(lambda: len(llm.generate(["The for statement"] * 200, params, use_tqdm=False)))
    time.sleep(1)
    core = max(
        psutil.Process().children(), key=lambda child: len(child.children())
    )  # the workers are its own
    killed_at = time.monotonic()
    core.send_signal(signal.SIGKILL)
    told = caller.after(15)
    if not caller.thread.is_alive():
        told = f"{caller.ended_at - killed_at:.2f} s after it: {told.split('  [after')[0]}"
    say(f"LLM.generate, EngineCore killed by SIGKILL: {told}")
    sys.stdout.flush()
    os._exit(0)


# Those that need more than an executor, and get the name of the engine only.
WHOLE = {21}


def main() -> None:
    name, number = sys.argv[1], int(sys.argv[2])
    SCENES[number](name if number in WHOLE else engine(name))


if __name__ == "__main__":
    main()
