"""What a span costs: python tests/benchmarks/bench_spans.py [--spans N] [--rounds N]

The best of several rounds is shown, in microseconds per span, for the process that emits (enter, exit and
attributes, down to the record in the spool) and, behind the plus, for what is done when the process ends (OTLP/JSON).
Last comes what a run of 100,000 spans takes to open. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from minivllm import tracing
from minivllm.trace_store import TraceStore
from minivllm.tracing.recorder import recorder

COUNT = 2_000


def guard() -> None:
    for _ in range(COUNT):
        if tracing.active:
            pass


def bare() -> None:
    for _ in range(COUNT):
        with tracing.span("rpc.call"):
            pass


def five_attributes() -> None:
    for index in range(COUNT):
        with tracing.span(
            "rpc.call", method="execute_model", seq=index, reply=0, timeout_s=1.5, blocking=True
        ):
            pass


def nested() -> None:
    for index in range(COUNT // 2):
        with tracing.span("engine_core.step", step=index):
            with tracing.span("rpc.call", seq=index):
                pass


def lifecycle() -> None:
    for _ in range(COUNT):
        with tracing.span("worker.init_device", device="cpu"):
            pass


def pack() -> None:
    for _ in range(COUNT):
        tracing.pack_context()


def parent() -> None:
    packed = bytes(range(1, 26))
    for _ in range(COUNT):
        with tracing.span("rpc.execute", parent=packed):
            pass


def best_us(function: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Best time per span of emitting and of draining, in microseconds."""
    emit = drain = float("inf")
    for _ in range(rounds):
        gc.collect()
        begin = time.thread_time()
        function()
        middle = time.thread_time()
        recorder.drain()
        end = time.thread_time()
        emit, drain = min(emit, middle - begin), min(drain, end - middle)
    return emit / COUNT * 1e6, drain / COUNT * 1e6


def opened_s(directory: Path) -> float:
    """Seconds until a run of 100,000 spans is read, by a process that has not read one before."""
    with tracing.span("run"):
        for _ in range(50):
            five_attributes()
    tracing.shutdown()
    begin = time.perf_counter()
    store = TraceStore.open(directory)
    assert len(store.spans()) == 50 * COUNT + 1
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    cases = [guard, bare, five_attributes, nested, parent, pack, lifecycle]
    print(f"{'us per span':18}" + "".join(f"{case.__name__:>18}" for case in cases))
    for level in tracing.catalogue.LEVEL_NAMES:
        with tempfile.TemporaryDirectory() as directory:
            tracing.configure("client", trace_dir=directory, level=level)
            with tracing.span("run"):
                cells = [best_us(case, rounds) for case in cases]
            tracing.shutdown()
        print(f"{level:18}" + "".join(f"{emit:9.2f} +{drain:7.2f}" for emit, drain in cells))
    with tempfile.TemporaryDirectory() as directory:
        tracing.configure("client", trace_dir=directory, level="message")
        print(f"100,000 spans open in {opened_s(Path(directory)):.2f} s")


if __name__ == "__main__":
    main()
