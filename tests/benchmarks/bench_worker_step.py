"""A decode step on the workers alone: `python tests/benchmarks/bench_worker_step.py [CHECKPOINT] [TP]`.

Each rank times execute_model plus sample_tokens. The fifth percentile tells what a step costs when nothing else runs
on the cores, the median what it costs on this machine now.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runner_harness import SpawnedWorkers, make_config

from minivllm.assets.make_checkpoint import PRESETS, make_random_checkpoint
from minivllm.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams

STEPS = 150
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=STEPS + 1),
    "random": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=STEPS + 1),
    "logprobs": SamplingParams(temperature=0, logprobs=5, max_tokens=STEPS + 1),
}


def run(rank: int, worker: Any, batch: int, kind: str) -> tuple[float, float]:
    """Microseconds of a step: fifth percentile and median."""
    ids = [f"{kind}{batch}-{i}" for i in range(batch)]
    lens = [20 + 3 * i for i in range(batch)]
    new = [
        NewRequestData(r, [7] * n, [7] * n, PARAMS[kind], [1 + 12 * i + j for j in range(12)], 0)
        for i, (r, n) in enumerate(zip(ids, lens, strict=True))
    ]
    output = SchedulerOutput(new, CachedRequestData(), dict(zip(ids, lens, strict=True)), sum(lens))
    times = []
    for step in range(STEPS):
        begun = time.perf_counter()
        assert worker.execute_model(output) is None
        worker.sample_tokens(None).get_output()
        times.append(time.perf_counter() - begun)
        cached = CachedRequestData(ids, [None] * batch, [n + step for n in lens])
        output = SchedulerOutput([], cached, dict.fromkeys(ids, 1), batch)
    worker.execute_model(SchedulerOutput(finished_req_ids=set(ids)))
    times = sorted(times[1:])
    return times[len(times) // 20] * 1e6, times[len(times) // 2] * 1e6


def pss_mib(rank: int, worker: Any) -> float:
    """Memory of this rank's process beyond its KV cache."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return kib / 1024 - sum(cache.nbytes for cache in worker.model_runner.kv_caches) / (1 << 20)


def main() -> None:
    tp = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    with tempfile.TemporaryDirectory() as home:
        checkpoint = (
            sys.argv[1] if len(sys.argv) > 1 else str(make_random_checkpoint(home, **PRESETS["qwen3-1m"]))
        )
        workers = SpawnedWorkers(tp)
        try:
            workers.call(import_everything)
            begun = time.perf_counter()
            workers.bring_up(make_config(checkpoint, tp=tp, max_model_len=512, max_num_batched_tokens=2048))
            print(f"start of the workers, torch imported: {time.perf_counter() - begun:.3f} s")
            print(f"memory beyond the KV cache: {workers.call(pss_mib)[0]:.0f} MiB (PSS)")
            for kind in PARAMS:
                for batch in (1, 8):
                    low, median = workers.call(run, batch, kind)[0]
                    print(f"tp {tp}, batch {batch}, {kind}: {low:.0f} µs, median {median:.0f} µs")
            workers.shut_down_workers()
        finally:
            workers.close()


def import_everything(rank: int, worker: Any) -> None:
    """Import what a worker needs."""
    import minivllm.worker.gpu_worker  # noqa: F401


if __name__ == "__main__":
    main()
