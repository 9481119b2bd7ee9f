"""Walkthrough 2: the executor's initialisation step by step, and the two orders of which one deadlocks.

python walkthroughs/02_initialisation.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import common
from common import closing, console, measured, ms, say, step, table

from minivllm.config import ParallelConfig
from minivllm.distributed.shm_broadcast import MessageQueue
from minivllm.engine.arg_utils import EngineArgs
from minivllm.executor import multiproc_executor
from minivllm.executor.multiproc_executor import MultiprocExecutor, WorkerProc

LATE_S = 0.5
PATIENCE_S = 0.5
STEPS = (
    "executor.parallel_sizes",
    "executor.set_worker_envs",
    "executor.distributed_init_method",
    "executor.create_broadcast_mq",
    "executor.spawn_workers",
    "executor.wait_for_ready",
    "executor.start_worker_monitor",
    "executor.collect_response_mqs",
    "executor.mq_handshake",
    "executor.post_init",
)


def initialise(tp: int, device: str, trace: Any) -> None:
    from minivllm import LLM
    from minivllm.trace_store import TraceStore

    step("Start an engine, and make the last rank late on purpose")
    late = f"worker.init_device@rank{tp - 1}=sleep:{LATE_S}"
    say(f'MINIVLLM_FAILPOINTS="{late}"')
    os.environ["MINIVLLM_FAILPOINTS"] = late
    LLM(
        tensor_parallel_size=tp,
        distributed_executor_backend="mp",
        device=device,
        trace=trace,
        trace_level="lifecycle",
    ).shutdown()
    del os.environ["MINIVLLM_FAILPOINTS"]
    store = TraceStore.open(trace)

    step("What the executor did, in order")
    begin = store.spans("executor.init")[0].start_ns
    done = table("step", "began after", "took")
    for span in store.spans():
        if span.name in STEPS:
            done.add_row(span.name, ms(span.start_ns - begin), ms(span.duration_ns))
    console.print(done)
    spawned = [span.end_ns for span in store.spans("executor.make_worker_process")]
    waiting = store.spans("executor.wait_for_ready")[0]
    assert max(spawned) <= waiting.start_ns
    say(
        f"All {len(spawned)} workers were started before any was waited for. READY came in this order: "
        + measured(", ".join(f"rank {event.attributes['minivllm.rank']}" for event in waiting.events))
        + "; the rings are collected in the order of the ranks all the same."
    )

    step("Who waited for whom")
    waits = table("rank", "worker.init_device", "of which dist.rendezvous")
    for device_span in sorted(store.spans("worker.init_device"), key=lambda span: span.rank or 0):
        meeting = store.spans("dist.rendezvous", process=device_span.process)[0]
        waits.add_row(str(device_span.rank), ms(device_span.duration_ns), ms(meeting.duration_ns))
    console.print(waits)
    say(
        f"The late rank has slept for {LATE_S} s before it went to the meeting. The others have no such step: their time is "
        "in dist.rendezvous, where they waited for it."
    )


def ranks() -> None:
    step("Which rank is which")
    sizes = table("TP", "PP", "world size", "driver ranks", "output rank")
    for tp, pp in ((1, 1), (2, 1), (2, 2), (2, 4)):
        config = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
        executor: Any = SimpleNamespace(parallel_config=config, world_size=config.world_size)
        drivers = [r for r in range(config.world_size) if MultiprocExecutor._is_driver_worker(executor, r)]
        output_rank = MultiprocExecutor._get_output_rank(executor)
        sizes.add_row(
            str(tp), str(pp), str(config.world_size), ", ".join(map(str, drivers)), str(output_rank)
        )
    console.print(sizes)
    say(
        "Drivers are the first ranks of the tensor-parallel groups; the output rank is the first of the last stage."
    )


# --8<-- [start:impatient]
class Impatient(WorkerProc):
    """Waits for each worker's READY before the next one is started: the order that deadlocks."""

    @staticmethod
    def make_worker_process(**kwargs: Any) -> Any:
        handle = WorkerProc.make_worker_process(**kwargs)
        if kwargs["rank"] == 0:
            page = kwargs["page"]
            while page.status(0).step != "dist.rendezvous":
                time.sleep(0.01)
            ready = handle.ready_pipe.poll(PATIENCE_S)
            console.print(f"  rank 0 is {'READY' if ready else f'still in {page.status(0).step}'}")
        return handle


# --8<-- [end:impatient]


def one_by_one() -> None:
    step("The wrong order: wait for each worker before the next one is started")
    # Two ranks are enough, and one GPU is not enough for them.
    config = EngineArgs.from_kwargs(tensor_parallel_size=2, device="cpu").create_engine_config()
    multiproc_executor.WorkerProc = Impatient  # type: ignore[misc]
    say(
        f"Start rank 0, and wait for its READY; after {PATIENCE_S} s at the meeting, give up and start rank 1."
    )
    try:
        with MultiprocExecutor(config) as executor:
            console.print(f"  rank 1 is started: {len(executor.workers)} ranks are READY")
    finally:
        multiproc_executor.WorkerProc = WorkerProc  # type: ignore[misc]
    say("Whoever has no such limit waits for ever, for a rank that will be started afterwards.")


# --8<-- [start:handshake]
def shake(side: str, queues: list[MessageQueue], said: dict[str, str]) -> None:
    """Wait for one queue after the other, as executor and worker do."""
    for queue in queues:
        try:
            queue.wait_until_ready(PATIENCE_S)
        except TimeoutError:
            said[side] = f"still waits for the {queue.handle.name} ring"
            return
    said[side] = "done"


def handshake(*orders: tuple[str, str]) -> dict[str, str]:
    """Both sides of a handshake over two rings, each with the rings in its own order."""
    broadcast, response = MessageQueue(1, 1, name="broadcast"), MessageQueue(1, 1, name="response")
    ends = {
        "executor": {
            "broadcast": broadcast,
            "response": MessageQueue.create_from_handle(response.export_handle(), 0),
        },
        "worker": {
            "broadcast": MessageQueue.create_from_handle(broadcast.export_handle(), 0),
            "response": response,
        },
    }
    # --8<-- [end:handshake]
    said: dict[str, str] = {}
    threads = [
        threading.Thread(target=shake, args=(side, [ends[side][name] for name in order], said))
        for side, order in zip(ends, orders, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for side in ends.values():
        for queue in side.values():
            queue.shutdown()
    return said


def handshakes() -> None:
    step("The handshake: two rings, and an order on both sides")
    say(
        "The writer of a ring waits until its reader has attached, and says so; the reader waits until it is told. The executor "
        "writes the broadcast ring and reads the response ring, the worker the other way round."
    )
    outcomes = table("executor's order", "worker's order", "executor", "worker")
    right, wrong = ("broadcast", "response"), ("response", "broadcast")
    for orders in ((right, right), (wrong, wrong), (right, wrong), (wrong, right)):
        said = handshake(*orders)
        outcomes.add_row(*(", ".join(order) for order in orders), said["executor"], said["worker"])
    console.print(outcomes)
    say(
        f"In the last row each begins as a reader, and waits to be told by the other, who does not come to it. Here after "
        f"{PATIENCE_S} s; without a limit, never."
    )


def main() -> None:
    args = common.options(__doc__ or "")
    initialise(args.tp, args.device, args.trace)
    ranks()
    one_by_one()
    handshakes()
    closing(
        args.trace,
        "minivllm timeline {trace} --view init      what each rank did until it was READY",
        "minivllm timeline {trace} --view spawn     and the executor meanwhile",
        "minivllm spans --coverage {trace}          which steps of the catalogue this run shows",
    )


if __name__ == "__main__":
    main()
