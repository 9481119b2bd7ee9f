"""Every step of the catalogue: a set of small runs that together show all that a machine without a GPU can show.

python walkthroughs/every_step.py [--trace DIR] [NAME ...]

Each run is a trace directory of its own, and the walkthrough named beside it shows the same subject slowly. At the end the
runs are compared with the catalogue, as `minivllm spans --coverage DIR ...` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from minivllm import tracing
from minivllm.exceptions import ExecutorFailedError, RemoteError
from minivllm.outputs import ModelRunnerOutput
from minivllm.worker.worker_base import WorkerBase

# Most of a run is waiting.
AT_ONCE = 2
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class LightWorker(WorkerBase):
    """No device and no model, so no torch: what is shown is the executor's."""

    @tracing.instrument("worker.init_device")
    def init_device(self) -> None:
        pass

    @tracing.instrument("worker.load_model")
    def load_model(self) -> None:
        pass

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput:
        return ModelRunnerOutput()

    def execute_dummy_batch(self) -> None:
        pass

    def wait(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def ignore_sigterm(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Sum:
    """A KV output aggregator: it makes one answer of all."""

    def aggregate(self, outputs: list[int], output_rank: int) -> int:
        return sum(outputs)


def worker_pid(worker: WorkerBase) -> int:
    """Runs on every rank, sent by value."""
    return os.getpid()


# --- the runs -----------------------------------------------------------------------------------------


def engine(trace: Path) -> None:
    """Tensor parallel, with speculation, a grammar, and calls that a script makes."""
    from minivllm import LLM, SamplingParams
    from minivllm.sampling_params import StructuredOutputsParams

    # Without the extra `structured` there is no grammar to be applied, and the report says so.
    has_grammars = importlib.util.find_spec("llguidance") is not None
    grammar = StructuredOutputsParams(json=SCHEMA) if has_grammars else None
    with LLM(
        tensor_parallel_size=2,
        device="cpu",
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        trace=trace,
        trace_level="message",
    ) as llm:
        llm.collective_rpc(worker_pid)
        llm.generate(
            ["a b a b a b a", "A generator is"],
            [
                SamplingParams(temperature=0, max_tokens=8),
                SamplingParams(temperature=0, max_tokens=12, structured_outputs=grammar),
            ],
        )


def pipeline(trace: Path) -> None:
    """Two pipeline stages with asynchronous scheduling."""
    from minivllm import LLM, SamplingParams

    with LLM(
        pipeline_parallel_size=2, async_scheduling=True, device="cpu", trace=trace, trace_level="message"
    ) as llm:
        llm.generate(["A class is", "A name is"], SamplingParams(temperature=0, max_tokens=4))


def calls(trace: Path) -> None:
    """Every way to call the executor."""
    with light_executor() as executor:
        executor.collective_rpc(worker_pid)
        executor.collective_rpc("wait", args=(0,), kv_output_aggregator=Sum())
        executor.collective_rpc("wait", args=(0,), non_block=True).result()
        executor.check_health()
        executor.execute_dummy_batch()


def raises(trace: Path) -> None:
    """A method raises on one rank; the executor goes on."""
    with light_executor() as executor:
        try:
            executor.collective_rpc("wait", args=(0,))
        except RemoteError:
            executor.collective_rpc("wait", args=(0,))


def killed(trace: Path) -> None:
    """A worker is killed in a call; the executor has failed, and says so at once."""
    with light_executor() as executor:
        executor.register_failure_callback(lambda: None)
        try:
            executor.collective_rpc("wait", args=(0,))
        except ExecutorFailedError:
            pass


def hangs(trace: Path) -> None:
    """A worker hangs in a call when it is to end: SIGTERM ends it."""
    with light_executor() as executor:
        executor.collective_rpc("wait", args=(0,), non_block=True)
        until_in_call(trace, ranks={0, 1})


def stubborn(trace: Path) -> None:
    """A worker that ignores SIGTERM: SIGKILL ends it."""
    with light_executor() as executor:
        executor.collective_rpc("ignore_sigterm")
        executor.collective_rpc("wait", args=(60.0,), non_block=True)
        until_in_call(trace, ranks={0, 1}, number=2)


def starts(trace: Path) -> None:
    """Nothing but start and end, for the start methods."""
    with light_executor() as executor:
        executor.collective_rpc("wait", args=(0,))


def until_in_call(trace: Path, ranks: set[int], number: int = 1) -> None:
    """Return when ranks have begun so many calls; a run can be read while it goes on."""
    from minivllm.trace_store import TraceStore

    begun: Counter[int | None] = Counter()
    while any(begun[rank] < number for rank in ranks):
        time.sleep(0.02)
        begun = Counter(call.process.rank for call in TraceStore.open(trace).spans("rpc.execute"))


def light_executor() -> Any:
    from minivllm.config import ParallelConfig, VllmConfig
    from minivllm.executor.multiproc_executor import MultiprocExecutor

    tracing.configure("engine_core")
    return MultiprocExecutor(
        VllmConfig(
            parallel_config=ParallelConfig(tensor_parallel_size=2, worker_cls="every_step.LightWorker")
        )
    )


@dataclass(frozen=True)
class Run:
    """One run of the set.

    Attributes:
        chapter: the walkthrough that shows the same subject.
        environment: variables of minivllm that make the run what it is.
    """

    body: Callable[[Path], None]
    chapter: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def what(self) -> str:
        return (self.body.__doc__ or "").strip()


# The one place that says which runs there are, and which walkthrough each of them begins.
_NO_PATIENCE = {"MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S": "0.3"}
RUNS = {
    "spawn": Run(engine, "01_first_run"),
    "async-pipeline": Run(pipeline, "12_async_and_pipeline"),
    "fork": Run(starts, "03_spawn", {"MINIVLLM_WORKER_MULTIPROC_METHOD": "fork"}),
    "forkserver": Run(starts, "03_spawn", {"MINIVLLM_WORKER_MULTIPROC_METHOD": "forkserver"}),
    "calls": Run(calls, "10_collective_rpc"),
    "raise": Run(raises, "10_collective_rpc", {"MINIVLLM_FAILPOINTS": "rpc.execute@rank1=raise"}),
    "kill": Run(killed, "13_failure", {"MINIVLLM_FAILPOINTS": "rpc.execute@rank1=kill"}),
    "hang": Run(hangs, "14_shutdown", {"MINIVLLM_FAILPOINTS": "rpc.execute@rank1=hang", **_NO_PATIENCE}),
    "stubborn": Run(stubborn, "14_shutdown", {"MINIVLLM_WORKER_SIGTERM_TIMEOUT_S": "0.3", **_NO_PATIENCE}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which runs (default: all): {', '.join(RUNS)}"
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help="where the traces go; new or empty")
    parser.add_argument("--body", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.names) - set(RUNS)
    if unknown:
        parser.error(f"no run {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    if args.body:
        RUNS[args.names[0]].body(args.trace)
        return 0
    traces = args.trace or Path(tempfile.mkdtemp(prefix="minivllm-every-step-"))
    if traces.exists() and any(traces.iterdir()):
        parser.error(f"--trace {traces}: the directory is not empty")
    console = Console(highlight=False)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        recorded = {name: pool.submit(record, name, traces / name) for name in args.names or RUNS}
        for name, done in recorded.items():
            run = RUNS[name]
            console.print(f"[bold]{name:<15}[/bold] {run.what}", soft_wrap=True)
            console.print(f"{'':<15} [dim]more of it: walkthroughs/{run.chapter}.py[/dim]", soft_wrap=True)
            done.result()
    return report(console, [traces / name for name in args.names or RUNS])


def record(name: str, trace: Path) -> None:
    """Run one of them in a process of its own, since each has an environment of its own."""
    trace.mkdir(parents=True)
    own = {"MINIVLLM_TRACE_DIR": str(trace), "MINIVLLM_TRACE": "message", **RUNS[name].environment}
    foreign = {key: value for key, value in os.environ.items() if not key.startswith("MINIVLLM_")}
    subprocess.run(
        [sys.executable, __file__, "--body", "--trace", str(trace), name],
        env={**foreign, **own, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )


def report(console: Console, traces: list[Path]) -> int:
    """What the runs show of the catalogue; 0 when nothing is missing."""
    from minivllm.trace_store import TraceStore
    from minivllm.trace_store.coverage import EXCUSED, MISSING, SHOWN, cover

    found = cover([TraceStore.open(trace) for trace in traces], [trace.name for trace in traces])
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("step", "shown", "why not"):
        table.add_column(column, overflow="fold")
    for row in (row for row in found.rows if row.status != SHOWN):
        table.add_row(row.spec.name, row.status, "; ".join(row.reasons))
    if table.row_count:
        console.print(table)
    counts = {status: len(found.with_status(status)) for status in (SHOWN, EXCUSED, MISSING)}
    console.print(
        f"\n{counts[SHOWN]} of {len(found.rows)} steps are shown by {len(traces)} runs, {counts[EXCUSED]} could not be "
        f"shown, {counts[MISSING]} are missing"
    )
    console.print("\n[bold]To look further[/bold]")
    console.print(f"  minivllm spans --coverage {traces[0].parent}/*", soft_wrap=True)
    console.print(f"  minivllm step {traces[0]}", soft_wrap=True)
    return 0 if found.complete else 1


if __name__ == "__main__":
    sys.exit(main())
