"""Walkthrough 4: which class a worker process becomes, what the wrapper around it is for, and what is built in which order.

python walkthroughs/04_worker_class.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

import common
from common import closing, console, measured, say, step, table

from minivllm.config import ParallelConfig, VllmConfig
from minivllm.exceptions import ConfigError, WorkerStartupError
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.worker.worker_base import WorkerBase, WorkerWrapperBase, resolve_worker_class

# What a worker process goes through until it says READY, without its parts.
STEPS = (
    "worker.init_worker",
    "worker.set_process_title",
    "worker.init_device",
    "worker.load_model",
    "worker.init_message_queues",
    "worker.enable_envs_cache",
    "worker.send_ready",
)


# --8<-- [start:clerk]
class Clerk(WorkerBase):
    """A worker with neither device nor model: the least that an executor can start."""

    def init_device(self) -> None:
        pass

    def load_model(self) -> None:
        pass

    def introduce(self) -> tuple[int, int, str]:
        """Nothing in the executor knows this method."""
        import setproctitle

        return self.rank, os.getpid(), setproctitle.getproctitle()


# --8<-- [end:clerk]


# --8<-- [start:inspector]
class Inspector:
    """Methods for a worker class that is not ours, mixed in by worker_extension_cls."""

    def parameters_here(self) -> tuple[int, int]:
        parameters = list(self.model_runner.model.parameters())  # type: ignore[attr-defined]
        return self.rank, sum(p.numel() for p in parameters)  # type: ignore[attr-defined]


# --8<-- [end:inspector]


class Clash:
    def load_model(self) -> None:
        pass


def config(tp: int, worker_cls: str, extension: str = "") -> VllmConfig:
    return VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp, worker_cls=worker_cls, worker_extension_cls=extension
        )
    )


def own_worker(tp: int) -> None:
    step("A class of our own, by its name")
    say(
        f'worker_cls="{__name__}.Clerk": a name and not a class, since each child imports it for itself. (In a child, the main '
        "module of its parent is importable under the same name.)"
    )
    before = time.perf_counter()
    with MultiprocExecutor(config(tp, f"{__name__}.Clerk")) as executor:
        seconds = measured(f"{time.perf_counter() - before:.2f} s")
        ranks = table("rank", "process", "its title")
        for rank, pid, title in executor.collective_rpc("introduce"):
            ranks.add_row(str(rank), measured(pid), title)
        console.print(ranks)
    say(
        f"{tp} workers were READY after {seconds}. The executor knows no method `introduce`; it sent the name, and the wrapper "
        "passed it on."
    )

    step("A name that means nothing")
    try:
        MultiprocExecutor(config(1, f"{__name__}.Clark")).shutdown()
    except WorkerStartupError as error:
        text = re.sub(r"(?<=pid )\d+", lambda pid: measured(pid[0]), str(error).splitlines()[0])
        console.print(f"  {type(error).__name__}: {text}")
    say("The child found out and said so through its ready pipe: rank, step, reason.")


def wrapper() -> None:
    step("The wrapper, before and after there is a worker")
    wrapped = WorkerWrapperBase(rpc_rank=1)
    try:
        wrapped.introduce  # noqa: B018
    except AttributeError as error:
        console.print(f"  before init_worker: {error}")
    kwargs: dict[str, Any] = {
        "vllm_config": config(2, f"{__name__}.Clerk"),
        "local_rank": 1,
        "rank": 1,
        "distributed_init_method": "",
    }
    wrapped.init_worker([{}, kwargs])
    console.print(f"  after it: rank {wrapped.introduce()[0]}")
    own = sorted(name for name in vars(WorkerWrapperBase) if not name.startswith("_"))
    say(f"What it answers itself: {', '.join(own)}. Every other name is looked up on the worker.")


def extension(tp: int, device: str, trace: Any) -> None:
    from minivllm import LLM

    step("A method for a class that is not ours")
    try:
        resolve_worker_class(config(tp, f"{__name__}.Clerk", f"{__name__}.Clash"))
    except ConfigError as error:
        console.print(f"  ConfigError: {error}")
    say("An extension must not redefine what the worker has. One that only adds is mixed into the class:")
    with LLM(
        tensor_parallel_size=tp,
        distributed_executor_backend="mp",
        device=device,
        worker_extension_cls=f"{__name__}.Inspector",
        trace=trace,
        trace_level="lifecycle",
    ) as llm:
        for rank, number in llm.collective_rpc("parameters_here"):
            console.print(f"  rank {rank} has {number:,} parameters")


def order(trace: Any) -> None:
    from minivllm.trace_store import TraceStore

    step("What WorkerProc built, in which order")
    store = TraceStore.open(trace)
    workers = sorted(store.spans("worker.init"), key=lambda span: span.rank or 0)
    built = table("step", "what came of it", *(f"rank {span.rank}" for span in workers))
    found = [
        [span for span in store.spans(process=worker.process) if span.name in STEPS] for worker in workers
    ]
    for spans in zip(*found, strict=True):
        first = spans[0]
        outcome = first.get("worker_cls", "").rpartition(".")[2] or first.get("title") or first.get("status")
        built.add_row(
            first.name, outcome or "", *(measured(f"{span.duration_ns / 1e6:.1f} ms") for span in spans)
        )
    console.print(built)
    say(
        "Nearly all of worker.init_worker is the import of the class's module, and with it torch; Clerk's module has no torch. The "
        "title changes when the groups exist, and the queues come last."
    )


def main() -> None:
    args = common.options(__doc__ or "")
    own_worker(args.tp)
    wrapper()
    extension(args.tp, args.device, args.trace)
    order(args.trace)
    closing(
        args.trace,
        "minivllm timeline {trace} --view init             each rank until it could serve",
        "minivllm step {trace}                             the same, one step at a time",
        "minivllm spans --coverage {trace}                 which steps of the catalogue this run shows",
    )


if __name__ == "__main__":
    main()
