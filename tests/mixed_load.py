"""A load in which everything happens at once, and the check of what comes of it.

Greedy, seeded and stopping requests, some of which arrive or are aborted while others run, on an engine whose steps
are too small for the prompts and whose cache is too small for all requests: chunks, preemption, mixed batches.
"""

from __future__ import annotations

from typing import Any

from greedy_reference import NUM_PROMPTS, Reference, greedy_params, seeded_params

from minivllm import LLM, RequestOutput, SamplingParams

HARRIED: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 200,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 19,
    "block_size": 8,
}


def params_and_expected(reference: Reference) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """(prompt, params, tokens) of all requests."""
    requests = []
    for i, prompt in enumerate(reference.prompts):
        params = greedy_params()
        if i % 3 == 1:
            params.logprobs, params.prompt_logprobs = 2, 1
        requests.append((prompt, params, reference.greedy[i]))
        requests.append((prompt, seeded_params(i), reference.seeded[i]))
        if i % 3 == 0:
            token, tokens = reference.stop[i]
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[token])
            requests.append((prompt, params, tokens))
    return requests


def check_generate(llm: LLM, reference: Reference) -> None:
    """Through the public interface."""
    requests = params_and_expected(reference)
    outputs = llm.generate([r[0] for r in requests], [r[1] for r in requests], use_tqdm=False)
    for number, ((_, _, tokens), output) in enumerate(zip(requests, outputs, strict=True)):
        assert list(output.outputs[0].token_ids) == tokens, f"request {number}"
    check_logprobs(requests, outputs, reference)


def check_logprobs(
    requests: list[tuple[list[int], SamplingParams, list[int]]],
    outputs: list[RequestOutput],
    reference: Reference,
) -> None:
    """Those of the prompts and of the tokens are transformers', to 1e-4, whoever was preempted in between."""
    for (prompt, params, _), output in zip(requests, outputs, strict=True):
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        i = reference.prompts.index(prompt)
        assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
        assert output.prompt_logprobs[0] is None
        for rows, expected, k in (
            (output.prompt_logprobs[1:], reference.prompt_logprobs[i], params.prompt_logprobs),
            (output.outputs[0].logprobs, reference.logprobs[i], params.logprobs),
        ):
            assert len(rows) == len(expected)
            for row, of_all in zip(rows, expected, strict=True):
                assert row is not None and len(row) in (k, (k or 0) + 1)
                assert all(abs(entry.logprob - float(of_all[t])) < 1e-4 for t, entry in row.items())
                assert min(entry.logprob for entry in row.values()) <= float(of_all.topk(k).values[-1]) + 1e-4


def check_with_aborts(llm: LLM, reference: Reference) -> int:
    """Step by step, with EngineCore in this process: every fifth request is aborted when it has been running for a
    while, at a time at which batches are in flight. Returns how often a request was preempted.
    """
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    requests = params_and_expected(reference)
    victims = {str(i): 4 + 3 * (i // 5) for i in range(2, len(requests), 5)}
    waiting = list(range(len(requests)))
    done: dict[str, RequestOutput] = {}
    aborted: dict[str, list[int]] = {}
    alive: dict[str, Any] = {}
    for step in range(3000):
        # Half of them at once, then one every other step.
        while waiting and (len(waiting) > NUM_PROMPTS or step % 2 == 0):
            number = waiting.pop(0)
            prompt, params, _ = requests[number]
            engine.add_request(*engine.process_input(str(number), {"prompt_token_ids": prompt}, params))
            alive[str(number)] = core.scheduler.requests[str(number)]
            if len(waiting) <= NUM_PROMPTS:
                break
        for output in engine.step():
            done[output.request_id] = output
        core.scheduler.check_invariants()
        for name, when in list(victims.items()):
            if (
                step >= when
                and alive.get(name) is not None
                and alive[name].num_output_placeholders + len(alive[name].output_token_ids) > when % 4
            ):
                del victims[name]
                for output in engine.abort_requests([name]):
                    aborted[name] = list(output.outputs[0].token_ids)
        if not waiting and not engine.has_unfinished_requests():
            break
    for number, (_, _, tokens) in enumerate(requests):
        name = str(number)
        if name in aborted:
            assert aborted[name] == tokens[: len(aborted[name])], f"request {name}, aborted"
        else:
            assert list(done[name].outputs[0].token_ids) == tokens, f"request {name}"
    assert aborted
    check_logprobs([requests[int(name)] for name in done], list(done.values()), reference)
    # Slots and blocks of all are free again, and the engine goes on.
    output = llm.generate([{"prompt_token_ids": reference.prompts[0]}], greedy_params(), use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == reference.greedy[0]
    return sum(request.num_preemptions for request in alive.values())
