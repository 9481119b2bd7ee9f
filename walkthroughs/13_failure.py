"""Walkthrough 13: one SIGKILL from the worker's last instruction to the caller's error, and what is no death at all.

python walkthroughs/13_failure.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from common import LightWorker, closing, console, light_config, measured, ms, runs, say, step, table

from minivllm.exceptions import EngineDeadError, ExecutorFailedError, RemoteError
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.trace_store import TraceStore

# Who does what about a death, besides those whose calls fail.
REACTIONS = (
    "monitor.worker_died",
    "executor.failure_callback",
    "executor.shutdown",
    "executor.terminate_graceful",
    "executor.terminate_sigterm",
    "executor.close_message_queues",
)


@contextlib.contextmanager
def failpoints(text: str) -> Iterator[None]:
    os.environ["MINIVLLM_FAILPOINTS"] = text
    try:
        yield
    finally:
        del os.environ["MINIVLLM_FAILPOINTS"]


def killed_in_a_step(tp: int, device: str, trace: Path) -> None:
    from minivllm import LLM, SamplingParams

    where = f"model.forward@rank{tp - 1}#6=kill"
    step("Kill a rank in the middle of a step")
    say(f'MINIVLLM_FAILPOINTS="{where}": the last rank, on its way into its sixth forward pass.')
    with (
        failpoints(where),
        LLM(
            tensor_parallel_size=tp,
            distributed_executor_backend="mp",
            device=device,
            trace=trace,
            trace_level="rpc",
        ) as llm,
    ):
        for what in (
            lambda: llm.generate(
                "A generator is", SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
            ),
            lambda: llm.collective_rpc("check_health"),
        ):
            try:
                what()
            except EngineDeadError as error:
                console.print(f"  EngineDeadError: {str(error).splitlines()[0]}")
    say("The second line is the next call. The first cause stays the cause.")


def reactions(tp: int, trace: Path) -> None:
    step("Who noticed, and when")
    store = TraceStore.open(trace)
    (life,) = (span for span in store.spans("worker.process") if span.rank == tp - 1)
    victim = next(process for process in store.processes() if process.pid == life.attributes["process.pid"])
    death = victim.end_ns
    shown = table("after the death", "where", "what")
    request = store.spans("request")[-1]
    found: list[tuple[int, str, str]] = [(request.end_ns, "client", "the caller has its error")]
    found += [(span.start_ns, "EngineCore", span.name) for name in REACTIONS for span in store.spans(name)]
    found += [
        (span.start_ns, f"rank {span.rank}", span.name)
        for span in store.spans("worker.parent_died")
        if span.start_ns > death
    ]
    found += [
        (span.end_ns, "EngineCore", f"rank {span.rank} has been ended")
        for span in store.spans("worker.process")
        if span.rank != tp - 1
    ]
    for moment, who, what in sorted(found):
        shown.add_row(ms(moment - death), measured(who), measured(what))
    console.print(shown)
    noticed = store.spans("monitor.worker_died")[0]
    say(f"monitor.worker_died says: {noticed.get('reason')}")
    open_steps = [span.name for span in store.spans() if span.process is victim and span.unfinished]
    say(f"Steps of rank {tp - 1} that never finished: {', '.join(open_steps)}.")
    say(
        "The caller is told before the other ranks are ended. They may take seconds; nobody has to wait for that."
    )


class Clerk(LightWorker):
    """Raises on one rank."""

    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise ZeroDivisionError("no tokens left to divide by")
        return self.rank

    def echo(self, value: Any) -> tuple[int, Any]:
        return self.rank, value


def no_death(executor: MultiprocExecutor) -> None:
    step("What is no death: an exception")
    try:
        executor.collective_rpc("fail_on", args=(1,))
    except RemoteError as error:
        console.print(f"  RemoteError: {str(error).splitlines()[0]}")
    console.print(
        f"  failed: {executor.is_failed}. The next call: {executor.collective_rpc('echo', args=('fine',))}"
    )

    step("What is no death either: silence")
    os.kill(executor.workers[1].pid, signal.SIGSTOP)
    try:
        executor.collective_rpc("check_health", timeout=0.5)
    except TimeoutError as error:
        console.print(f"  stopped with SIGSTOP: TimeoutError: {error}")
    console.print(f"  failed: {executor.is_failed}. No sentinel fires for a process that is there.")
    os.kill(executor.workers[1].pid, signal.SIGCONT)
    console.print(f"  after SIGCONT: {executor.collective_rpc('echo', args=('fine',), timeout=5)}")


def idle_death(executor: MultiprocExecutor) -> None:
    step("A death that no call would notice")
    told: list[str] = []
    noticed = threading.Event()

    def early() -> None:
        told.append("the callback that was there before")
        noticed.set()

    executor.register_failure_callback(early)
    began = time.perf_counter_ns()
    os.kill(executor.workers[1].pid, signal.SIGKILL)
    noticed.wait(5)
    console.print(
        f"  Nothing was running. The monitor thread told after {ms(time.perf_counter_ns() - began)}."
    )
    executor.register_failure_callback(lambda: told.append("the one that came too late"))
    console.print(f"  Told, each once: {', '.join(told)}.")
    for _ in range(2):
        try:
            executor.collective_rpc("echo", args=("?",))
        except ExecutorFailedError as error:
            console.print(f"  ExecutorFailedError: {error}")


def engine_dies(device: str) -> None:
    from minivllm import LLM

    step("EngineCore is killed")
    with LLM(distributed_executor_backend="mp", device=device) as llm:
        ((worker, engine),) = llm.collective_rpc(_pids)
        os.kill(engine, signal.SIGKILL)
        began = time.perf_counter_ns()
        try:
            llm.collective_rpc("check_health")
        except EngineDeadError as error:
            console.print(f"  the client: EngineDeadError: {str(error).splitlines()[0]}")
        while runs(worker):
            time.sleep(0.005)
        console.print(
            f"  the worker, which nobody has asked to: gone after {ms(time.perf_counter_ns() - began)}"
        )


def _pids(worker: Any) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def main() -> None:
    args = common.options(__doc__ or "")
    killed_in_a_step(args.tp, args.device, args.trace)
    reactions(args.tp, args.trace)
    with MultiprocExecutor(light_config(2, Clerk)) as executor:
        no_death(executor)
        idle_death(executor)
    engine_dies(args.device)
    closing(
        args.trace,
        "minivllm timeline {trace} --view failure    what broke first, and who noticed",
        "minivllm step {trace} --at failure          the moment itself, one step at a time",
    )


if __name__ == "__main__":
    main()
