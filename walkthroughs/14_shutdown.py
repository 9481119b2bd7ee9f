"""Walkthrough 14: three levels of asking a worker to end, two safety nets that cancel each other, and a killer that is killed.

    python walkthroughs/14_shutdown.py [--tp N] [--trace DIR]

The workers here have no device and no model; pipes, signals and processes are the executor's own.
"""

from __future__ import annotations

import collections
import gc
import itertools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
from common import LightWorker, closing, console, light_config, ms, runs, say, step, table

from minivllm import tracing
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.trace_store import TraceStore
from minivllm.utils.system_utils import explain_exit

LIMIT_S = 0.4


class Busy(LightWorker):
    """Is in a call that does not come back, on the last rank."""

    def sleep_for_ever(self) -> None:
        while self._is_last():
            time.sleep(60)

    def hold_the_lock(self) -> None:
        """One call into C that never gives up the interpreter lock."""
        if self._is_last():
            collections.deque(itertools.repeat(0), maxlen=0)

    def _is_last(self) -> bool:
        return self.rank == self.parallel_config.world_size - 1


def levels(tp: int, trace: Path) -> None:
    step("Three levels")
    os.environ["MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S"] = os.environ["MINIVLLM_WORKER_SIGTERM_TIMEOUT_S"] = str(
        LIMIT_S
    )
    say(
        f"A polite request; after {LIMIT_S} s SIGTERM (5 s by default), and after another {LIMIT_S} s SIGKILL (4 s)."
    )
    shown = table("the last rank", "asked", "SIGTERM", "SIGKILL", "exit codes", "took")
    for label, method in (
        ("is idle", ""),
        ("sleeps in a call", "sleep_for_ever"),
        ("holds the interpreter lock", "hold_the_lock"),
    ):
        directory = trace if method == "hold_the_lock" else trace / (method or "idle")
        tracing.configure("engine_core", trace_dir=str(directory), level=tracing.LIFECYCLE)
        with tracing.span("engine_core.init"):
            executor = MultiprocExecutor(light_config(tp, Busy))
            handles = executor.workers
            if method:
                executor.collective_rpc(method, non_block=True)
                time.sleep(0.1)
            began = time.perf_counter_ns()
            executor.shutdown()
            took = time.perf_counter_ns() - began
        tracing.shutdown()
        store = TraceStore.open(directory)
        asked = [
            ", ".join(map(str, span.get("ranks"))) if (span := _first(store, name)) else "–"
            for name in (
                "executor.close_death_writers",
                "executor.terminate_sigterm",
                "executor.terminate_sigkill",
            )
        ]
        codes = ", ".join(str(handle.exitcode) for handle in handles)
        shown.add_row(label, *asked, codes, ms(took))
    console.print(shown)
    say("By rank. Every level asks only those who are left; 143 is a clean end after SIGTERM, −9 a SIGKILL.")


def _first(store: TraceStore, name: str) -> Any:
    return next(iter(store.spans(name)), None)


# --8<-- [start:two-nets]
def with_two_nets(pipe: Connection, flags: int) -> None:
    """Net one: end of file sets a flag. Net two: SIGTERM raises SystemExit, but only once."""
    requested, terminated = threading.Event(), threading.Event()
    if flags == 1:
        terminated = requested

    def watch() -> None:
        try:
            pipe.recv_bytes()
        except EOFError:
            requested.set()  # an idle loop would look at it; this one is busy

    def on_sigterm(*_: object) -> None:
        if not terminated.is_set():
            terminated.set()
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    threading.Thread(target=watch, daemon=True).start()
    pipe.send_bytes(b"r")
    while True:
        time.sleep(0.01)


# --8<-- [end:two-nets]


def two_nets() -> None:
    step("Two nets that cancel each other")
    say(
        "A busy process with a thread at its death pipe, and a handler that turns the first SIGTERM into SystemExit."
    )
    context = multiprocessing.get_context("spawn")
    shown = table("whether it has been asked is kept in", "death pipe", "then SIGTERM")
    for flags, close in ((1, False), (1, True), (2, True)):
        ours, theirs = context.Pipe()
        process = context.Process(target=with_two_nets, args=(theirs, flags))
        process.start()
        theirs.close()
        ours.recv_bytes()
        if close:
            ours.close()
            time.sleep(0.1)
        process.terminate()
        process.join(1.0)
        outcome = explain_exit(process.exitcode)
        process.kill()
        process.join()
        ours.close()
        kept = "one flag for both" if flags == 1 else "a flag for each"
        shown.add_row(kept, "closed" if close else "left open", outcome)
    console.print(shown)
    say(
        "In the second case the first net has set the flag, and the second takes the signal for one too many. vLLM 0.25.1 has one "
        "flag, and needs SIGKILL; here are two."
    )


# --8<-- [start:finalizer]
class Kept:
    """Finalized by a method of its own: the registration holds the method, and the method the object."""

    def __init__(self, closed: list[str]) -> None:
        self.closed = closed
        weakref.finalize(self, self.close).atexit = False

    def close(self) -> None:
        self.closed.append("closed")


class Released(Kept):
    """Finalized by a function of what must be closed."""

    def __init__(self, closed: list[str]) -> None:
        weakref.finalize(self, closed.append, "closed")


# --8<-- [end:finalizer]


def finalizers(tp: int) -> None:
    step("An executor that is forgotten")
    for kind in (Kept, Released):
        closed: list[str] = []
        thing = kind(closed)
        del thing
        gc.collect()
        console.print(
            f"  finalize with {'its method' if kind is Kept else 'a function'}, then del: {closed or 'nothing'}"
        )
    executor = MultiprocExecutor(light_config(tp, LightWorker))
    pids = [handle.pid for handle in executor.workers]
    del executor
    gc.collect()
    alive = sum(runs(pid) for pid in pids)
    console.print(f"  an executor of {tp} workers, then del: {alive} of them run")


def owner(pipe: Connection, tp: int) -> None:
    """A process that has an executor, and a call in it that does not return."""
    executor = MultiprocExecutor(light_config(tp, Busy))
    executor.collective_rpc("hold_the_lock", non_block=True)
    time.sleep(0.1)
    pipe.send([handle.pid for handle in executor.workers])
    signal.pause()


def killer_is_killed(tp: int) -> None:
    step("The one who should do it is killed")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=owner, args=(theirs, tp))
    process.start()
    pids = ours.recv()
    process.kill()
    began = time.perf_counter_ns()
    process.join()
    gone: dict[int, int] = {}
    while len(gone) < len(pids) and time.perf_counter_ns() - began < 10e9:
        gone |= {pid: time.perf_counter_ns() - began for pid in pids if pid not in gone and not runs(pid)}
        time.sleep(0.005)
    for rank, pid in enumerate(pids):
        what = "idle" if rank < len(pids) - 1 else "in a call that holds the interpreter lock"
        console.print(f"  rank {rank}, {what}: gone after {ms(gone[pid])}")
    say(
        "Nobody was left to count seconds for them. An idle worker wakes by the end of file; a busy one is ended by its own pipe "
        "thread, and if that cannot run, by an alarm that the C library has set for it."
    )


def many_at_once(tp: int, trace: Path) -> None:
    step("Eight threads shut down at once")
    tracing.configure("engine_core", trace_dir=str(trace / "eight"), level=tracing.LIFECYCLE)
    with tracing.span("engine_core.init"):
        executor = MultiprocExecutor(light_config(tp, LightWorker))
        threads = [threading.Thread(target=executor.shutdown) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tracing.shutdown()
    times = len(TraceStore.open(trace / "eight").spans("executor.shutdown"))
    alive = sum(handle.exitcode is None for handle in executor.workers)
    say(f"All eight calls are back, {alive} workers run, and the trace has executor.shutdown {times} time.")


def main() -> None:
    args = common.options(__doc__ or "")
    levels(args.tp, args.trace)
    two_nets()
    finalizers(args.tp)
    many_at_once(args.tp, args.trace)
    killer_is_killed(args.tp)
    closing(
        args.trace,
        "minivllm timeline {trace} --view shutdown          all three levels",
        "minivllm timeline {trace}/idle --view shutdown     the polite request alone",
        "minivllm step {trace} --at executor.shutdown       the same, one step at a time",
    )


if __name__ == "__main__":
    main()
