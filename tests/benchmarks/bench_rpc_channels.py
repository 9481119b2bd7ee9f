"""collective_rpc against other ways to have worker processes do something: one call to every worker, and the answers.

python tests/benchmarks/bench_rpc_channels.py [--workers 1,2,4] [--rounds 3] [--vllm-python PATH] [--out docs/benchmarks]

Channels: minivllm's MultiprocExecutor, vLLM's (where it can be imported: by this interpreter, or by the one of
--vllm-python), one Pipe per worker, multiprocessing.Pool and concurrent.futures.ProcessPoolExecutor. Workers have no model.
Channels take turns, round by round; the figure is the median of a round, and of all rounds the best. Prints a table, and with
--out also writes rpc.json, rpc.md and rpc.svg there. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_mq import duration, has_vllm  # noqa: E402

CHANNELS = ("minivllm", "vllm", "Pipe", "Pool", "ProcessPoolExecutor")
COLOURS = ("#0b7a75", "#d1495b", "#edae49", "#8d6a9f", "#5c7aea")
MEGABYTE = 1_000_000
CALLS = {
    "all": "nothing to do, all reply",
    "one": "nothing to do, rank 0 replies",
    "callable": "a function sent along, all reply",
    "argument": "1 MB as argument",
    "reply": "1 MB as reply from each",
}
Call = Callable[[], Any]


class Stub:
    """What the workers of all channels can do."""

    def echo(self, value: Any = None) -> Any:
        return value

    def swallow(self, value: Any) -> None:
        return None

    def produce(self, size: int) -> bytes:
        return b"x" * size


STUB = Stub()


def do(method: str | bytes, *args: Any) -> Any:
    """What a worker that is not an executor's does with a request: a method by name, or a function by value."""
    if isinstance(method, bytes):
        import cloudpickle

        return cloudpickle.loads(method)(STUB)
    return getattr(STUB, method)(*args)


def by_value() -> bytes:
    """A function as its caller sends it: pickled for each call."""
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(lambda worker: None)
    return pickled


# One channel: for n workers, what to call for each of CALLS, and how to end it. A call that a channel does not have is left out.


def executor_calls(executor: Any) -> dict[str, Call]:
    rpc, large = executor.collective_rpc, b"x" * MEGABYTE
    return {
        "all": lambda: rpc("echo", args=(None,)),
        "one": lambda: rpc("echo", args=(None,), unique_reply_rank=0),
        "callable": lambda: rpc(lambda worker: None),
        "argument": lambda: rpc("swallow", args=(large,)),
        "reply": lambda: rpc("produce", args=(MEGABYTE,)),
    }


def minivllm_channel(n: int) -> tuple[dict[str, Call], Call]:
    from minivllm.config import ParallelConfig, VllmConfig
    from minivllm.executor.multiproc_executor import MultiprocExecutor

    parallel = ParallelConfig(tensor_parallel_size=n, worker_cls="rpc_stub_worker.StubWorker")
    executor = MultiprocExecutor(VllmConfig(parallel_config=parallel))
    return executor_calls(executor), executor.shutdown


def vllm_channel(n: int) -> tuple[dict[str, Call], Call]:
    """The real MultiprocExecutor and WorkerProc; what would need a model or a device is replaced before the fork."""
    from types import SimpleNamespace

    os.environ.update(
        VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_LOGGING_LEVEL="ERROR", CUDA_VISIBLE_DEVICES=""
    )
    import vllm.v1.executor.multiproc_executor as module  # type: ignore[import-not-found]

    class Wrapper(Stub):
        def __init__(self, rpc_rank: int = 0, global_rank: int = 0) -> None:
            self.rank = global_rank

        def init_worker(self, all_kwargs: Any) -> None: ...
        def init_device(self) -> None: ...
        def load_model(self) -> None: ...
        def shutdown(self) -> None: ...
        def check_health(self) -> None: ...

    class NoOpenMP:
        def __init__(self, config: Any) -> None: ...

        @contextlib.contextmanager
        def configure_omp_envs(self, rank: int, local_rank: int) -> Any:
            yield

    module.WorkerWrapperBase = Wrapper
    module.OMPProcessManager = NoOpenMP
    module.set_worker_net_device = module.enable_envs_cache = lambda *args, **kwargs: None
    module.current_platform.update_block_size_for_backend = lambda *args, **kwargs: None
    parallel = SimpleNamespace(
        world_size=n,
        local_world_size=n,
        tensor_parallel_size=n,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        nnodes_within_dp=1,
        node_rank_within_dp=0,
        node_rank=0,
        master_addr="127.0.0.1",
        numa_bind=False,
        enable_expert_parallel=False,
        assigned_physical_gpu_ids=None,
        data_parallel_size_local=1,
    )
    rooms = ("model", "cache", "lora", "load", "device", "speculative", "observability")
    config = SimpleNamespace(
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        **{f"{room}_config": None for room in rooms},
    )
    executor = module.MultiprocExecutor(config)
    return executor_calls(executor), executor.shutdown


def serve(conn: Any) -> None:
    """A worker behind a pipe."""
    while (request := conn.recv()) is not None:
        replies, method, args = request
        value = do(method, *args)
        if replies:
            conn.send(value)


def pipe_channel(n: int) -> tuple[dict[str, Call], Call]:
    context = multiprocessing.get_context("spawn")
    conns, processes = [], []
    for _ in range(n):
        mine, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        conns.append(mine)
        processes.append(process)
    large = b"x" * MEGABYTE

    def call(method: Any, *args: Any, replying: int = n) -> list[Any]:
        for rank, conn in enumerate(conns):
            conn.send((rank < replying, method, args))
        return [conn.recv() for conn in conns[:replying]]

    def end() -> None:
        for conn in conns:
            conn.send(None)
        for process in processes:
            process.join(10)

    return {
        "all": lambda: call("echo", None),
        "one": lambda: call("echo", None, replying=1),
        "callable": lambda: call(by_value()),
        "argument": lambda: call("swallow", large),
        "reply": lambda: call("produce", MEGABYTE),
    }, end


def pool_calls(submit: Callable[..., Any], result: Callable[[Any], Any], n: int) -> dict[str, Call]:
    """n tasks, to whichever workers take them: a pool has no ranks."""
    large = b"x" * MEGABYTE

    def call(method: Any, *args: Any) -> list[Any]:
        return [result(task) for task in [submit(do, method, *args) for _ in range(n)]]

    return {
        "all": lambda: call("echo", None),
        "callable": lambda: call(by_value()),
        "argument": lambda: call("swallow", large),
        "reply": lambda: call("produce", MEGABYTE),
    }


def pool_channel(n: int) -> tuple[dict[str, Call], Call]:
    pool = multiprocessing.get_context("spawn").Pool(n)
    calls = pool_calls(lambda f, *args: pool.apply_async(f, args), lambda task: task.get(), n)
    return calls, pool.terminate


def futures_channel(n: int) -> tuple[dict[str, Call], Call]:
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn"))
    return pool_calls(pool.submit, lambda task: task.result(), n), pool.shutdown


OPEN = dict(
    zip(CHANNELS, (minivllm_channel, vllm_channel, pipe_channel, pool_channel, futures_channel), strict=True)
)


def measure(channel: str, n: int) -> dict[str, float]:
    """Median of a call in microseconds, by kind of call."""
    calls, end = OPEN[channel](n)
    found = {}
    for name, call in calls.items():
        times = []
        count = 1000 if name in ("all", "one") else 100
        for _ in range(count + count // 10):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        found[name] = statistics.median(times[count // 10 :]) * 1e6
    end()
    return found


def in_own_process(channel: str, n: int, python: str) -> dict[str, float]:
    """Each measurement in a fresh interpreter, which for vLLM may be another one; nothing where it cannot be done."""
    command = [python, str(Path(__file__).resolve()), "--measure", channel, "--workers", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    print(
        f"{channel} with {n} workers gave no figures: {done.stderr.strip().splitlines()[-1:]}",
        file=sys.stderr,
    )
    return {}


# What is written


def markdown(report: dict[str, Any]) -> str:
    channels = report["channels"]
    ratio = "vllm" in channels
    lines = [
        "# What a collective_rpc costs",
        "",
        "Median time of one call to every worker, until its answers are there. The workers have no model: what is measured is",
        "the way there and back. `Pool` and `ProcessPoolExecutor` get one task per worker; they have no ranks, so a task may go to any",
        "worker, and there is none whose answer alone could be asked for. 1 MB fits a slot of every ring, minivllm's (1 MiB) as well as",
        "vLLM's (16 and 24 MiB). Readers differ in how they wait: vLLM's poll for a second after each message, and so never sleep here,",
        "minivllm's sleep after 200 µs.",
        "",
        f"{report['machine']}. Best of {report['rounds']} rounds, the channels in turn. Written by "
        "`tests/benchmarks/bench_rpc_channels.py`.",
        "",
        "![A call by number of workers](rpc.svg)",
        "",
        "| workers | call | " + " | ".join(channels) + (" | minivllm / vllm |" if ratio else " |"),
        "|" + "---|" * (2 + len(channels) + ratio),
    ]
    for n, by_call in report["p50_us"].items():
        for name, figures in by_call.items():
            cells = [duration(figures[c]) if c in figures else "–" for c in channels]
            if ratio:
                both = "minivllm" in figures and "vllm" in figures
                cells.append(f"{figures['minivllm'] / figures['vllm']:.2f}" if both else "–")
            lines.append(f"| {n} | {CALLS[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def svg(report: dict[str, Any]) -> str:
    """A panel per number of workers, a group of bars per call, on a logarithmic axis."""
    panels = list(report["p50_us"].items())
    channels = report["channels"]
    colours = dict(zip(CHANNELS, COLOURS, strict=True))
    bar, space = 8, 16
    group = bar * len(channels)
    width, height, left, top, gap = len(CALLS) * (group + space) + space, 200, 56, 34, 20
    values = [v for _, calls in panels for figures in calls.values() for v in figures.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    total, bottom = left + len(panels) * (width + gap), top + height
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {bottom + 56}" font-family="sans-serif" '
        'font-size="11" fill="#444">',
        f'<rect width="{total}" height="{bottom + 56}" fill="white"/>',
    ]
    for number, (n, by_call) in enumerate(panels):
        x0 = left + number * (width + gap)
        title = f"{n} worker{'s' if int(n) > 1 else ''}"
        out.append(f'<text x="{x0}" y="{top - 12}" font-weight="bold">{title}</text>')
        for power in range(low, high + 1):
            line = bottom - (power - low) / (high - low) * height
            out.append(f'<path d="M{x0} {line:.1f}H{x0 + width}" stroke="#ddd"/>')
            if number == 0:
                label = f"{10**power} µs" if power < 3 else f"{10 ** (power - 3)} ms"
                out.append(f'<text x="{x0 - 6}" y="{line + 4:.1f}" text-anchor="end">{label}</text>')
        for place, (name, figures) in enumerate(by_call.items()):
            x = x0 + space + place * (group + space)
            for column, channel in enumerate(channels):
                if channel in figures:
                    tall = (math.log10(figures[channel]) - low) / (high - low) * height
                    out.append(
                        f'<rect x="{x + column * bar}" y="{bottom - tall:.1f}" width="{bar - 1}" height="{tall:.1f}" '
                        f'fill="{colours[channel]}"/>'
                    )
            out.append(
                f'<text x="{x + group / 2}" y="{bottom + 15}" text-anchor="middle">{SHORT[name]}</text>'
            )
    for number, channel in enumerate(channels):
        x = left + number * 110
        out.append(f'<path d="M{x} {bottom + 38}h18" stroke="{colours[channel]}" stroke-width="6"/>')
        out.append(f'<text x="{x + 24}" y="{bottom + 42}">{channel}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


SHORT = {"all": "all", "one": "rank 0", "callable": "function", "argument": "1 MB in", "reply": "1 MB out"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--channels", default=",".join(CHANNELS))
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--out", type=Path, help="directory for rpc.json, rpc.md and rpc.svg")
    parser.add_argument("--measure", choices=CHANNELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, int(options.workers))))
        return
    channels = options.channels.split(",")
    if "vllm" in channels and not has_vllm(options.vllm_python):
        print("vLLM is not installed here: its executor is left out")
        channels.remove("vllm")
    best: dict[str, dict[str, dict[str, float]]] = {}
    for n in options.workers.split(","):
        table = best.setdefault(n, {name: {} for name in CALLS})
        for _ in range(options.rounds):
            for channel in channels:
                python = options.vllm_python if channel == "vllm" else sys.executable
                for name, p50 in in_own_process(channel, int(n), python).items():
                    table[name][channel] = min(p50, table[name].get(channel, p50))
        for name, row in table.items():
            figures = ", ".join(f"{channel} {duration(value)}" for channel, value in row.items())
            print(f"{n} worker{'s' if n != '1' else ''}, {CALLS[name]}: {figures}", flush=True)
    report = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, "
        f"Python {platform.python_version()}",
        "rounds": options.rounds,
        "channels": channels,
        "p50_us": best,
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "rpc.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "rpc.md").write_text(markdown(report))
        (options.out / "rpc.svg").write_text(svg(report))
        print(f"written to {options.out}")


if __name__ == "__main__":
    main()
