"""Walkthrough 10: one call through both kinds of ring, futures in order, and answers that could be taken for another call's.

    python walkthroughs/10_collective_rpc.py [--tp N] [--trace DIR]

The workers here have no device and no model; every call, ring and process is the executor's own.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import common
from common import LightWorker, closing, console, light_config, measured, say, step, table

from minivllm import tracing
from minivllm.exceptions import RemoteError
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.trace_store import TraceStore

# Of one call, in the order of a call: the process ("engine" or a rank) and the span.
CALL = (
    ("engine", "rpc.call"),
    ("engine", "mq.enqueue"),
    ("rank", "rpc.execute"),
    ("rank", "rpc.handle_output"),
    ("rank", "rpc.enqueue_output"),
    ("engine", "rpc.await_responses"),
)


class Clerk(LightWorker):
    """Answers, is slow, and raises on request."""

    def echo(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    def slow_on(self, rank: int, seconds: float, value: Any) -> tuple[int, Any]:
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank, value

    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise ZeroDivisionError("no tokens left to divide by")
        return self.rank


def one_call(executor: MultiprocExecutor) -> None:
    step("One call")
    say('collective_rpc("echo", args=("hello",)) on all ranks:')
    for answer in executor.collective_rpc("echo", args=("hello",)):
        console.print(f"  {answer}")

    step("A callable that the workers do not have")

    def parent_and_child(worker: Any) -> str:
        return "my parent is the executor's process" if os.getppid() == here else "I have another parent"

    here = os.getpid()
    for rank, answer in enumerate(executor.collective_rpc(parent_and_child)):
        console.print(f"  rank {rank}: {answer}")
    say("It was pickled by value, with the number it refers to, and gets the worker as its first argument.")


def anatomy(trace: Path, tp: int) -> None:
    step("The first call in the trace")
    store = TraceStore.open(trace)
    call = next(span for span in store.spans("rpc.call") if span.attributes["rpc.method"] == "echo")
    number = call.get("seq")
    rows = table("step", "EngineCore", *(f"rank {rank}" for rank in range(tp)))
    for where, name in CALL:
        cells = []
        for process in ("engine", *range(tp)):
            found = [
                span
                for span in store.spans(name)
                if (span.rank if where == "rank" else "engine") == process
                and (span.get("seq") == number or span is call or store.parent(span) is call)
            ]
            cells.append(measured(f"{(found[0].start_ns - call.start_ns) / 1e3:.0f} µs") if found else "")
        rows.add_row(name, *cells)
    console.print(rows)
    say(
        "When each step began, from the start of the call. One message went out, whatever the number of ranks; each rank answered "
        "through a ring of its own."
    )


def who_replies(executor: MultiprocExecutor) -> None:
    step("Who runs a call, who replies, who is heard")
    answer = executor.collective_rpc("echo", args=("hello",), unique_reply_rank=0)
    console.print(f"  unique_reply_rank=0: {answer}. All ranks ran it, and one answered.")
    try:
        executor.collective_rpc("fail_on", args=(1,), unique_reply_rank=0)
    except RemoteError as error:
        console.print(f"  and when rank 1, which is not asked, raises: {str(error).splitlines()[0]}")
    console.print(f"  the next call: {executor.collective_rpc('echo', args=('fine',))}")


def futures(executor: MultiprocExecutor, trace: Path) -> None:
    step("Three calls in flight, and the third result is wanted first")
    calls = [
        executor.collective_rpc("echo", args=(n,), non_block=True, unique_reply_rank=0) for n in (1, 2, 3)
    ]
    console.print(f"  third:  {calls[2].result()}")
    console.print(f"  first:  {calls[0].result()}, done before anybody asked for it")
    console.print(f"  second: {calls[1].result()}, the same")
    tracing.flush()
    drained = [span.get("drained") for span in TraceStore.open(trace).spans("future.result")]
    say(
        f"The trace has {len(drained)} wait, by the third; on its way it took the answers of {drained[0]} older calls."
    )


def timeouts(executor: MultiprocExecutor) -> None:
    step("A call that takes too long, and the call after it")
    try:
        executor.collective_rpc("slow_on", args=(1, 0.9, "old"), timeout=0.4)
    except TimeoutError as error:
        console.print(f"  TimeoutError: {error}")
    console.print(f"  the next call: {executor.collective_rpc('echo', args=('new',), timeout=5)}")
    say(
        'Rank 1 came to it late, and its answer "old" was in the ring in front of its answer "new". It was dropped by its number.'
    )


# --8<-- [start:no-numbers]
def without_numbers() -> list[tuple[int, str]]:
    """The same with two workers whose answers carry no number."""
    requests: list[queue.SimpleQueue[tuple[float, str]]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    answers: list[queue.SimpleQueue[tuple[int, str]]] = [queue.SimpleQueue(), queue.SimpleQueue()]

    def worker(rank: int) -> None:
        for _ in range(2):
            pause, value = requests[rank].get()
            time.sleep(pause * rank)
            answers[rank].put((rank, value))

    def call(pause: float, value: str, timeout: float) -> list[tuple[int, str]]:
        for ring in requests:
            ring.put((pause, value))
        return [ring.get(timeout=timeout) for ring in answers]

    for rank in range(2):
        threading.Thread(target=worker, args=(rank,), daemon=True).start()
    try:
        call(0.3, "old", timeout=0.1)
    except queue.Empty:
        pass
    return call(0, "new", timeout=5)


# --8<-- [end:no-numbers]


def main() -> None:
    args = common.options(__doc__ or "")
    tracing.configure("engine_core", trace_dir=str(args.trace), level=tracing.MESSAGE)
    with tracing.span("engine_core.init"), MultiprocExecutor(light_config(args.tp, Clerk)) as executor:
        one_call(executor)
        who_replies(executor)
        futures(executor, args.trace)
        timeouts(executor)
    tracing.shutdown()

    step("The same without numbers")
    console.print(f"  the next call: {without_numbers()}")
    say(
        'Two threads and two queues each, and the same two calls. Rank 1 answers "new" with "old", without any error, and is one call behind for ever.'
    )
    anatomy(args.trace, args.tp)
    closing(
        args.trace,
        "minivllm timeline {trace} --view rpc       a call as broadcast and response",
        "minivllm timeline {trace} --view future    the three futures",
        "minivllm step {trace} --at worker.exception     the exception on the rank that was not asked",
    )


if __name__ == "__main__":
    main()
