"""Walkthrough 11: one step of the engine by hand, from the scheduler's decision to the tokens and back.

python walkthroughs/11_one_step.py [--device cpu|cuda] [--tp N] [--trace DIR]

EngineCore runs in this process here, so that its parts can be called one by one.
"""

from __future__ import annotations

import itertools
import os
import pickle
import statistics
from typing import Any

import common
from common import closing, console, measured, say, step, table

PROMPTS = {"a": "A generator function is", "b": "The import statement combines two operations"}


def look_at_batch(worker: Any) -> dict[str, Any]:
    """Runs on every rank, between the two halves of a step: the batch as the runner has laid it out."""
    batch = worker.model_runner.execute_model_state.input_batch
    bounds = batch.query_start_loc_np.tolist()
    return {
        "order": batch.req_ids,
        "slots": batch.idx_mapping.tolist(),
        "tokens": batch.num_scheduled_tokens.tolist(),
        "positions": [batch.positions[a:b].tolist() for a, b in itertools.pairwise(bounds)],
        "gets a token": batch.is_sampled_np.tolist(),
    }


def look_at_states(worker: Any) -> dict[str, tuple[int, int | None]]:
    """Runs on every rank: for each request, tokens computed and the token sampled last, as the device has them."""
    states = worker.model_runner.req_states
    known = {}
    for req_id, slot in states.req_id_to_index.items():
        computed = states.num_computed_tokens.gpu[slot].item()
        has_token = computed >= states.prefill_len.np[slot]
        known[req_id] = (computed, states.last_sampled_tokens[slot].item() if has_token else None)
    return known


def show_scheduled(output: Any) -> None:
    rows = table("request", "tokens now", "what is sent of it", "computed before", "new blocks")
    for request in output.scheduled_new_reqs:
        tokens = output.num_scheduled_tokens[request.req_id]
        of = f"{tokens} of {len(request.prompt_token_ids)}"
        rows.add_row(request.req_id, of, "all: it is new", "0", str(request.block_ids))
    cached = output.scheduled_cached_reqs
    for req_id, computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        tokens = str(output.num_scheduled_tokens[req_id])
        rows.add_row(req_id, tokens, "what has changed", str(computed), str(blocks or "none"))
    console.print(rows)


def add(llm: Any, name: str) -> None:
    from minivllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.llm_engine.add_request(*llm.llm_engine.process_input(name, PROMPTS[name], params))


def one_step(llm: Any, explain: bool) -> None:
    """What EngineCore.step does, one line at a time."""
    # --8<-- [start:by-hand]
    core = llm.llm_engine.engine_core.engine_core
    scheduler, executor = core.scheduler, core.model_executor

    scheduled = scheduler.schedule()
    executed = executor.execute_model(scheduled, non_block=True).result()
    batches = executor.collective_rpc(look_at_batch)
    output = executor.sample_tokens(None, non_block=True).result()
    outputs = scheduler.update_from_output(scheduled, output)
    # --8<-- [end:by-hand]
    llm.llm_engine.output_processor.process_outputs(outputs)
    if not explain:
        return
    say("[bold]schedule[/bold]: who gets how many of the six tokens that a step has room for.")
    show_scheduled(scheduled)
    size = measured(f"{len(pickle.dumps(scheduled))} bytes")
    say(
        f"[bold]execute_model[/bold]: this travels to every rank, pickled in {size}; the answer is {executed}, which means: hidden states are "
        "there, ask for tokens."
    )
    slots = [batch.pop("slots") for batch in batches]
    assert all(batch == batches[0] for batch in batches)
    rows = table(
        "row",
        "request",
        "positions",
        "gets a token",
        *(f"slot, rank {rank}" for rank in range(len(slots))),
    )
    for row, (req_id, tokens, positions, sampled) in enumerate(zip(*batches[0].values(), strict=True)):
        shown = f"{positions[0]}" if tokens == 1 else f"{positions[0]} to {positions[-1]}"
        has_token = "yes" if sampled else "no: its prompt is not done"
        rows.add_row(str(row), req_id, shown, has_token, *(measured(of_rank[row]) for of_rank in slots))
    console.print(rows)
    say(
        "Every rank has laid out the same batch, those with one token first. The slots are each rank's own affair; nobody else ever "
        "hears of them."
    )
    say(
        f"[bold]sample_tokens[/bold]: {dict(zip(output.req_ids, output.sampled_token_ids, strict=True))}, from rank 0 alone."
    )
    told = {item.request_id: item.new_token_ids for item in outputs}
    say(
        f"[bold]update_from_output[/bold]: the scheduler adds them to their requests; the client gets {told}."
    )


def main() -> None:
    args = common.options(__doc__ or "")
    os.environ["MINIVLLM_ENABLE_MULTIPROCESSING"] = "0"
    from minivllm import LLM
    from minivllm.trace_store import TraceStore

    with LLM(
        tensor_parallel_size=args.tp,
        distributed_executor_backend="mp",
        device=args.device,
        max_num_batched_tokens=6,
        max_num_seqs=4,
        max_model_len=128,
        trace=args.trace,
        trace_level="message",
    ) as llm:
        step("A first step: one request, its whole prompt")
        add(llm, "a")
        one_step(llm, explain=True)

        step("A second request joins")
        add(llm, "b")
        one_step(llm, explain=True)

        step("What each rank knows now, of which only rank 0 has answered")
        states = llm.collective_rpc(look_at_states)
        rows = table("rank", *(f"of request {req_id}" for req_id in states[0]))
        for rank, state in enumerate(states):
            cells = (
                f"{computed} computed, " + ("no token yet" if last is None else f"last token {last}")
                for computed, last in state.values()
            )
            rows.add_row(str(rank), *cells)
        console.print(rows)
        say(
            "The same on all: each has sampled for itself, from the same logits. So the next step needs no token from anyone; it needs to "
            "be told how many to compute."
        )

        step("Until both have ended")
        finished = []
        while llm.llm_engine.has_unfinished_requests():
            finished += llm.llm_engine.step()
        for output in sorted(finished, key=lambda output: output.request_id):
            console.print(f"  {PROMPTS[output.request_id]}[bold]{output.outputs[0].text}[/bold]")

    step("Where the time of such a step goes")
    store = TraceStore.open(args.trace)
    rows = table("step of the catalogue", "where", "median")
    for name, where in (
        ("scheduler.schedule", "EngineCore"),
        ("executor.execute_model", "EngineCore"),
        ("executor.sample_tokens", "EngineCore"),
        ("runner.update_states", "each rank"),
        ("runner.prepare_inputs", "each rank"),
        ("model.forward", "each rank"),
        ("dist.all_reduce", "each rank, nine times in a forward pass"),
        ("runner.sample_tokens", "each rank"),
        ("dist.all_gather", "each rank, the logits"),
        ("runner.postprocess", "each rank"),
        ("scheduler.update_from_output", "EngineCore"),
    ):
        durations = [span.duration_ns for span in store.spans(name)]
        if durations:
            rows.add_row(name, where, measured(f"{statistics.median(durations) / 1e3:.0f} µs"))
    console.print(rows)
    closing(
        args.trace,
        "minivllm timeline {trace} --view step            one of the later steps",
        "minivllm step {trace} --from engine_core.step    every event of it",
    )


if __name__ == "__main__":
    main()
