"""Walkthrough 3: a worker is started: its two pipes, who holds which end, what an end of file means, three start methods.

    python walkthroughs/03_spawn.py [--tp N] [--trace DIR]

The workers here have no device and no model; everything around them is the executor's own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import common
from common import LightWorker, closing, console, light_config, ms, say, step, table

from minivllm import tracing
from minivllm.exceptions import WorkerStartupError
from minivllm.executor import multiproc_executor
from minivllm.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from minivllm.trace_store import TraceStore

METHODS = ("fork", "spawn", "forkserver", "forkserver, once more")


# --8<-- [start:eof]
def grandchild(read_end: int, write_end: int, report: int, close_it: bool) -> None:
    """Wait at a pipe whose only other holder is the parent, until it ends or a second has passed."""
    if close_it:
        os.close(write_end)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    os.write(report, b"r")
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    os.read(read_end, 1)
    os.write(report, b"e")
    os._exit(0)


def parent_dies(close_it: bool) -> bool:
    """Whether a child notices by end of file that its parent was killed."""
    told, report = os.pipe()
    parent = os.fork()
    if parent == 0:
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            grandchild(read_end, write_end, report, close_it)
        os.close(report)
        signal.pause()
    os.close(report)
    os.read(told, 1)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    noticed = os.read(told, 1) == b"e"
    os.close(told)
    return noticed


# --8<-- [end:eof]


def end_of_file() -> None:
    step("When a pipe reports end of file")
    say("A parent, its child, a pipe between them. The child reads; the parent is killed with SIGKILL.")
    for close_it in (False, True):
        kept = (
            "has closed its copy of the writing end" if close_it else "has kept its copy of the writing end"
        )
        noticed = parent_dies(close_it)
        console.print(
            f"  a child that {kept}: {'end of file' if noticed else 'waits on, for the second it is given'}"
        )
    say("A fork copies every descriptor. A child with a copy of the writing end keeps itself waiting.")


class Shown(WorkerProc):
    """Shows the ends of both pipes while the first worker comes up."""

    seen: dict[str, str]

    @staticmethod
    def make_worker_process(**kwargs: Any) -> Any:
        handle = WorkerProc.make_worker_process(**kwargs)
        if kwargs["rank"] == 0:
            while kwargs["page"].status(0).step == "worker.bootstrap":
                time.sleep(0.005)
            Shown.seen = holders(
                {"ready": handle.ready_pipe.fileno(), "death": handle.death_writer.fileno()}, [handle.pid]
            )
        return handle


def holders(pipes: dict[str, int], workers: list[int]) -> dict[str, str]:
    """Who has which end of these pipes open, from /proc (Linux)."""
    found = {}
    processes = [("parent", os.getpid()), *((f"rank {rank}", pid) for rank, pid in enumerate(workers))]
    for name, descriptor in pipes.items():
        pipe = os.readlink(f"/proc/self/fd/{descriptor}")
        for end, flag in (("reading", os.O_RDONLY), ("writing", os.O_WRONLY)):
            found[f"{name} pipe, {end} end"] = (
                ", ".join(who for who, pid in processes if (pipe, flag) in ends_of(pid)) or "nobody"
            )
    return found


def ends_of(pid: int) -> set[tuple[str, int]]:
    ends = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            flags = (
                Path(f"/proc/{pid}/fdinfo/{link.name}")
                .read_text(encoding="ascii")
                .split("flags:")[1]
                .split()[0]
            )
            ends.add((os.readlink(link), int(flags, 8) & os.O_ACCMODE))
        except OSError:  # closed meanwhile
            continue
    return ends


def both_pipes(tp: int) -> None:
    step("Two pipes for each worker")
    if not Path("/proc/self/fdinfo").is_dir():
        say("Which process holds which descriptor is read from /proc, which this system does not have.")
        return
    multiproc_executor.WorkerProc = Shown  # type: ignore[misc]
    with MultiprocExecutor(light_config(tp, LightWorker)) as executor:
        multiproc_executor.WorkerProc = WorkerProc  # type: ignore[misc]
        workers = executor.workers
        assert all(handle.ready_pipe.closed for handle in workers)
        after = {"ready pipe, reading end": "nobody", "ready pipe, writing end": "nobody"}
        assert workers[0].death_writer is not None
        after |= holders({"death": workers[0].death_writer.fileno()}, [handle.pid for handle in workers])
    ends = table("of rank 0", "while it comes up", "after READY")
    for end, who in Shown.seen.items():
        ends.add_row(end, who, after[end])
    console.print(ends)
    say(
        "Each end is open in one process. So the parent reads an end of file from the ready pipe when the worker dies, and the "
        "worker reads one from the death pipe when the parent does. After READY the ready pipe has done its duty."
    )


def start_methods(tp: int, trace: Path) -> None:
    step("Three start methods")
    times = table("method", "until READY", "worker.bootstrap", "closed in the fork")
    for method in METHODS:
        os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = method.partition(",")[0]
        if method == "forkserver":
            multiprocessing.set_forkserver_preload(["minivllm.executor.worker_proc"])
        directory = trace if method == "spawn" else trace / method.replace(", ", "-").replace(" ", "-")
        tracing.configure("engine_core", trace_dir=str(directory), level=tracing.LIFECYCLE)
        began = time.perf_counter()
        with tracing.span("engine_core.init"):
            executor = MultiprocExecutor(light_config(tp, LightWorker))
        took = time.perf_counter() - began
        executor.shutdown()
        tracing.shutdown()
        store = TraceStore.open(directory)
        bootstrap = max(span.duration_ns for span in store.spans("worker.bootstrap"))
        closing_spans = sorted(store.spans("worker.close_inherited_fds"), key=lambda span: span.rank or 0)
        closed = [str(len(span.get("descriptors"))) for span in closing_spans]
        times.add_row(method, ms(took * 1e9), ms(bootstrap), " and ".join(closed) or "nothing")
    console.print(times)
    say(
        "fork copies this process, with the parent's ends of the pipes of this worker and of those before it, and closes them. spawn "
        "starts an interpreter for each worker. forkserver copies a small process that has imported what a worker needs; the first "
        "time, that process has to be started."
    )


# --8<-- [start:why]
class Refuses(LightWorker):
    """Raises on the last rank."""

    def load_model(self) -> None:
        if self.rank == self.parallel_config.world_size - 1:
            raise FileNotFoundError("model.safetensors is not there")
        super().load_model()


# --8<-- [end:why]


def failures(tp: int) -> None:
    step("What the parent learns when a worker does not become READY")
    os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for worker, failpoints in ((Refuses, ""), (LightWorker, f"worker.load_model@rank{tp - 1}=kill")):
        os.environ["MINIVLLM_FAILPOINTS"] = failpoints
        console.print(f"  {f'a failpoint, {failpoints}' if failpoints else 'load_model raises'}:")
        try:
            MultiprocExecutor(light_config(tp, worker)).shutdown()
        except WorkerStartupError as error:
            console.print(f"    {str(error).splitlines()[0]}")
    del os.environ["MINIVLLM_FAILPOINTS"]
    say(
        "The first could say it: FAILED, with its traceback. The second could not. The parent has an end of file, the signal from "
        "the kernel, and the open step from a line of shared memory."
    )


def main() -> None:
    args = common.options(__doc__ or "")
    end_of_file()
    both_pipes(args.tp)
    start_methods(args.tp, args.trace)
    failures(args.tp)
    closing(
        args.trace,
        "minivllm timeline {trace} --view spawn          the start with spawn",
        "minivllm timeline {trace}/fork --view spawn     and with fork",
        "minivllm doctor                                which start method is in force, and what speaks against fork",
    )


if __name__ == "__main__":
    main()
