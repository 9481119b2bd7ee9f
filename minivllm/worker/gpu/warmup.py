"""Run the first real shapes before the first request does.

vLLM 0.25.1: vllm/v1/worker/gpu/warmup.py (warmup_kernels)
Articles: part 1 §8.3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu.block_table import NULL_BLOCK
from minivllm.worker.gpu.model_runner import GPUModelRunner

_PREFIX = "_warm_up_"


def warm_up(
    runner: GPUModelRunner,
    execute_model: Callable[[SchedulerOutput], Any],
    sample_tokens: Callable[[None], Any],
) -> list[str]:
    """Take requests through the runner as the scheduler would: prefill, chunked prefill, mixed and decode steps, with
    the sampler's operations.

    They compute on the null block, and nothing of them is left afterwards.

    Args:
        execute_model, sample_tokens: the worker's, which exchanges hidden states with other pipeline stages.

    Returns:
        What was run, in words.
    """
    prompt_len = max(1, min(32, runner.max_num_tokens // 2, runner.max_model_len - 3))
    first_len = max(1, prompt_len // 2)
    blocks = [NULL_BLOCK] * -(-(prompt_len + 3) // runner.block_tables.block_size)
    random = SamplingParams(
        temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, logprobs=1, repetition_penalty=1.1, max_tokens=None
    )
    params = [SamplingParams(temperature=0, max_tokens=None), random]
    num_reqs = min(2, runner.max_num_reqs)
    new = [
        NewRequestData(f"{_PREFIX}{i}", [0] * prompt_len, [0] * prompt_len, params[i], blocks, 0)
        for i in range(num_reqs)
    ]
    ids = [request.req_id for request in new]
    steps: list[tuple[str, list[NewRequestData], dict[str, int]]] = [
        ("prefill", [new[0]], {ids[0]: prompt_len})
    ]
    if runner.max_model_len > prompt_len:
        steps.append(("decode", [], {ids[0]: 1}))
    if num_reqs == 2 and prompt_len > 2:
        steps += [
            ("mixed", [new[1]], {ids[0]: 1, ids[1]: first_len}),
            ("chunked prefill", [], {ids[1]: prompt_len - first_len}),
            ("batched decode", [], {ids[0]: 1, ids[1]: 1}),
        ]
    computed = dict.fromkeys(ids, 0)
    for _, new_reqs, scheduled in steps:
        cached = [req_id for req_id in scheduled if computed[req_id]]
        output = SchedulerOutput(
            new_reqs,
            CachedRequestData(cached, [None] * len(cached), [computed[r] for r in cached]),
            scheduled,
            sum(scheduled.values()),
        )
        _run(execute_model, sample_tokens, output)
        for req_id, num_tokens in scheduled.items():
            computed[req_id] += num_tokens
    execute_model(SchedulerOutput(finished_req_ids=set(ids)))
    return [name for name, _, _ in steps]


def _run(
    execute_model: Callable[[SchedulerOutput], Any],
    sample_tokens: Callable[[None], Any],
    scheduler_output: SchedulerOutput,
) -> None:
    execute_model(scheduler_output)
    output = sample_tokens(None)
    # Only the last pipeline stage has any.
    if output is not None:
        output.get_output()
