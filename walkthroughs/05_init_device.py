"""Walkthrough 5: what init_device does in which order, what a first collective costs, and who waits for a late rank.

python walkthroughs/05_init_device.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import common
from common import closing, console, measured, say, step, table

from minivllm.trace_store import Span, TraceStore

ORDER = (
    ("device.bind", ("device", "threads")),
    ("dist.rendezvous", ("store", "pids")),
    ("dist.init_process_group", ("backend", "world_size")),
    ("dist.new_group", ("group", "ranks")),
    ("dist.init_communicator", ("group", "transport")),
    ("device.memory_snapshot", ("free_bytes",)),
    ("runner.select", ("runner",)),
    ("runner.init", ("input_buffers",)),
)

# What is not the same in the next run, or on the next machine.
VARYING = frozenset({"threads", "pids", "free_bytes"})


# --8<-- [start:time-collectives]
def time_collectives(worker: Any) -> dict[str, float]:
    """Runs on every rank: seconds of making a group, and of the first, second and a later all_reduce in it."""
    import statistics
    import time

    import torch
    import torch.distributed as dist

    from minivllm.distributed.parallel_state import get_tp_group
    from minivllm.platforms import get_platform

    tp = get_tp_group()
    synchronize = get_platform(tp.device.type).synchronize
    ones = torch.ones(1, device=tp.device)

    def timed(what: Any) -> float:
        start = time.perf_counter()
        what()
        synchronize()
        return time.perf_counter() - start

    # All ranks come together first, so that nobody's time is the lateness of somebody else.
    tp.barrier()
    made: list[Any] = []
    seconds = {"new_group": timed(lambda: made.append(dist.new_group(tp.ranks, backend=tp.backend)))}
    group = made[0]
    tp.barrier()
    seconds["first all_reduce"] = timed(lambda: dist.all_reduce(ones, group=group))
    seconds["second"] = timed(lambda: dist.all_reduce(ones, group=group))
    seconds["a later one"] = statistics.median(
        timed(lambda: dist.all_reduce(ones, group=group)) for _ in range(200)
    )
    seconds["the same in the tp group"] = statistics.median(
        timed(lambda: tp.all_reduce(ones)) for _ in range(200)
    )
    dist.destroy_process_group(group)
    return seconds


# --8<-- [end:time-collectives]


def start(args: Any, trace: Path) -> Any:
    from minivllm import LLM

    return LLM(
        tensor_parallel_size=args.tp,
        distributed_executor_backend="mp",
        device=args.device,
        trace=trace,
        trace_level="lifecycle",
    )


def show_order(store: TraceStore) -> None:
    attributes = dict(ORDER)
    rows = table("step of rank 0", "took", "what came of it")
    for span in store.spans(process=store.spans("worker.init_device", rank=0)[0].process):
        if span.name in attributes:
            values = ", ".join(
                f"{name} {(measured if name in VARYING else str)(span.get(name))}"
                for name in attributes[span.name]
            )
            rows.add_row(span.name, milliseconds(span), values)
    console.print(rows)


def milliseconds(span: Span) -> str:
    return measured(f"{span.duration_ns / 1e6:.2f} ms")


def main() -> None:
    args = common.options(__doc__ or "")

    step("From an empty process to one that can compute together with others")
    with start(args, args.trace) as llm:
        timings = llm.collective_rpc(time_collectives, timeout=60)
    show_order(TraceStore.open(args.trace))
    say(
        "The device comes before the groups, the groups before the look at the free memory. Each group is made, and then used once."
    )

    step("The first all_reduce of a new group, and the two hundred after it")
    backend = TraceStore.open(args.trace).spans("dist.init_process_group")[0].get("backend")
    rows = table("", *(f"rank {rank}" for rank in range(args.tp)))
    for what in timings[0]:
        rows.add_row(what, *(measured(f"{timing[what] * 1e6:,.0f} µs") for timing in timings))
    console.print(rows)
    if args.tp == 1:
        say("One rank has nobody to meet, and little to show here: try --tp 2.")
    elif backend == "nccl":
        say(
            "NCCL has done nothing in new_group. It finds paths between the GPUs, opens them and reserves buffers in the first collective."
        )
    else:
        say(
            "gloo connects the ranks, each with each, while the group is made; what is left for the first collective is small. NCCL does the "
            "connecting in the first collective. Whichever it is, init_device pays for it, and no request."
        )

    step("One rank comes late")
    if args.tp == 1:
        say("With one rank nobody waits.")
    else:
        os.environ["MINIVLLM_FAILPOINTS"] = "device.bind@rank1=sleep:1"
        start(args, args.trace / "late").shutdown()
        del os.environ["MINIVLLM_FAILPOINTS"]
        store = TraceStore.open(args.trace / "late")
        rows = table("step", *(f"rank {rank}" for rank in range(args.tp)))
        for name in ("device.bind", "dist.rendezvous", "dist.init_process_group"):
            spans = sorted(store.spans(name), key=lambda span: span.rank or 0)
            rows.add_row(name, *(milliseconds(span) for span in spans))
        console.print(rows)
        say(
            "Rank 1 slept for a second before it had a device. Its step is long because of itself, dist.rendezvous of the others because "
            "of rank 1. On a timeline the second kind is drawn as waiting."
        )
    closing(
        args.trace,
        "minivllm timeline {trace} --view init           every rank, every step",
        "minivllm timeline {trace}/late --view init      the late rank, and who waited",
    )


if __name__ == "__main__":
    main()
