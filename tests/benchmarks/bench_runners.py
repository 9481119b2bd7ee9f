"""A decode step of V1 and of V2 on one rank, without engine and tracing: `python tests/benchmarks/bench_runners.py`.

Wall time, least and median of many steps, the two runners taking turns so that a busy machine is not one's bad luck.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runner_harness import local_worker

from minivllm.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.outputs import AsyncModelRunnerOutput
from minivllm.sampling_params import SamplingParams

PROMPT_LEN, STEPS, ROUNDS = 64, 110, 3
GREEDY = SamplingParams(temperature=0, max_tokens=None)
CASES = {
    "1 request, greedy": (1, GREEDY, False),
    "8 requests, greedy": (8, GREEDY, False),
    "32 requests, greedy": (32, GREEDY, False),
    "32 requests, top-p": (32, SamplingParams(temperature=0.8, top_p=0.9, max_tokens=None), False),
    "32 requests, penalties": (32, SamplingParams(repetition_penalty=1.2, max_tokens=None), False),
    "32 requests, one leaves and one comes in each step": (32, GREEDY, True),
}


def run(runner: str, batch: int, params: SamplingParams, churn: bool) -> list[float]:
    """Milliseconds of each step."""
    os.environ["MINIVLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    rng, times = random.Random(0), []
    with local_worker(None, max_num_seqs=batch, max_model_len=512, max_num_batched_tokens=4096) as local:
        worker = local.worker
        num_blocks = worker.model_runner.kv_caches[0].shape[0] - 1

        def request(number: int, length: int) -> NewRequestData:
            tokens = [rng.randrange(2000) for _ in range(length)]
            # Blocks may be shared: what is computed does not matter.
            blocks = [1 + (12 * number + i) % num_blocks for i in range(12)]
            return NewRequestData(f"r{number}", tokens, tokens, params, blocks, 0)

        def step(new: list[NewRequestData], finished: set[str]) -> None:
            cached = CachedRequestData(list(computed), [None] * len(computed), list(computed.values()))
            counts = {**dict.fromkeys(computed, 1), **{r.req_id: len(r.prompt_token_ids) for r in new}}
            output = SchedulerOutput(new, cached, counts, sum(counts.values()), finished_req_ids=finished)
            begun = time.perf_counter()
            worker.execute_model(output)
            result = worker.sample_tokens(None)
            if isinstance(result, AsyncModelRunnerOutput):
                result.get_output()
            times.append((time.perf_counter() - begun) * 1e3)
            for req_id, count in counts.items():
                computed[req_id] = computed.get(req_id, 0) + count

        computed: dict[str, int] = {}
        step([request(i, PROMPT_LEN) for i in range(batch)], set())
        gc.disable()
        for number in range(batch, batch + STEPS):
            if churn:
                leaving = rng.choice(list(computed))
                del computed[leaving]
                step([request(number, 2)], {leaving})
            else:
                step([], set())
        gc.enable()
    return times[11:]


def main() -> None:
    print(f"{'':52}{'V1 least':>9}{'median':>9}{'V2 least':>10}{'median':>9}")
    for name, (batch, params, churn) in CASES.items():
        times: dict[str, list[float]] = {"V1": [], "V2": []}
        for _ in range(ROUNDS):
            for runner, found in times.items():
                found += run(runner, batch, params, churn)
        cells = [f"{f(times[r]):9.2f}" for r in times for f in (min, statistics.median)]
        print(f"{name:52}{cells[0]}{cells[1]} {cells[2]}{cells[3]}  ms", flush=True)


if __name__ == "__main__":
    main()
