"""The executor alone, with workers that have no model: start, calls, a death, the end.

Usage: bench_rpc.py [--ranks N] [--calls N] [--level off|lifecycle|rpc|message]
A line per figure. Compare levels, or two versions, in one sitting and in turn: other load on the machine shows.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from executor_helpers import make_executor

from minivllm import tracing
from minivllm.exceptions import ExecutorFailedError
from minivllm.executor.multiproc_executor import MultiprocExecutor


def measure_calls(executor: MultiprocExecutor, calls: int, name: str, **kwargs: object) -> None:
    """p50 and p99 of an empty call, in microseconds."""
    for _ in range(calls // 10):
        executor.collective_rpc("echo", **kwargs)  # type: ignore[arg-type]
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        executor.collective_rpc("echo", **kwargs)  # type: ignore[arg-type]
        times.append(time.perf_counter() - started)
    times.sort()
    print(f"RPC {name}: p50_us={times[calls // 2] * 1e6:.1f} p99_us={times[calls * 99 // 100] * 1e6:.1f}")


def measure_futures(executor: MultiprocExecutor, calls: int) -> None:
    """Two calls in flight, as a step sends them."""
    started = time.perf_counter()
    for _ in range(calls):
        first = executor.collective_rpc("echo", non_block=True, unique_reply_rank=0)
        second = executor.collective_rpc("echo", non_block=True, unique_reply_rank=0)
        first.result()
        second.result()
    print(f"RPC two futures: mean_us={(time.perf_counter() - started) / calls * 1e6:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--level", default="off", choices=["off", "lifecycle", "rpc", "message"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tracing.configure("engine_core", trace_dir=directory, level=options.level)
        started = time.perf_counter()
        executor = make_executor(tp=options.ranks)
        print(f"START ranks={options.ranks} level={options.level}: s={time.perf_counter() - started:.3f}")
        measure_calls(executor, options.calls, "reply from all")
        measure_calls(executor, options.calls, "reply from rank 0", unique_reply_rank=0)
        measure_futures(executor, options.calls)
        started = time.perf_counter()
        executor.shutdown()
        print(f"SHUTDOWN idle: ms={(time.perf_counter() - started) * 1e3:.0f}")
        executor = make_executor(tp=options.ranks)
        waiting = executor.collective_rpc("sleep", args=(60,), non_block=True)
        time.sleep(0.2)
        started = time.perf_counter()
        os.kill(executor.workers[-1].pid, signal.SIGKILL)
        try:
            waiting.result()
        except ExecutorFailedError as error:
            print(f"KILL to error: ms={(time.perf_counter() - started) * 1e3:.1f} ({error})")
        executor.shutdown()
        tracing.shutdown()


if __name__ == "__main__":
    main()
