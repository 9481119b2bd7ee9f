"""Walkthrough 1: one run from start to end, and which processes and channels it needs.

python walkthroughs/01_first_run.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import os

import common
from common import closing, console, measured, progress, say, step, table


def report_process(worker: object) -> tuple[int, int]:
    """Runs on every rank: its process id and its parent's."""
    return os.getpid(), os.getppid()


def main() -> None:
    args = common.options(__doc__ or "")
    from minivllm import LLM, SamplingParams
    from minivllm.trace_store import TraceStore

    step("Start the engine")
    say(
        f"This process is {measured(os.getpid())}. It imports no torch, and starts one child: EngineCore, which starts the workers."
    )
    with LLM(
        tensor_parallel_size=args.tp,
        distributed_executor_backend="mp",
        device=args.device,
        trace=args.trace,
        trace_level="message",
        on_progress=progress,
    ) as llm:
        step("Ask each worker who it is")
        say(
            "collective_rpc runs a function on every rank: sent once through the broadcast ring, answered through one ring per rank."
        )
        answers = llm.collective_rpc(report_process)
        ranks = table("rank", "process", "its parent")
        for rank, (pid, parent) in enumerate(answers):
            ranks.add_row(str(rank), measured(pid), measured(parent))
        console.print(ranks)
        say(
            "Their parent is EngineCore, not this process: if this process is killed, EngineCore must notice, and then they."
        )

        step("Generate")
        for output in llm.generate(
            ["A generator function is", "The import statement"], SamplingParams(temperature=0, max_tokens=16)
        ):
            console.print(f"  {output.prompt}[bold]{output.outputs[0].text}[/bold]", markup=True)

    step("Look at what each process did")
    store = TraceStore.open(args.trace)
    processes = table("process", "pid", "spans", "messages", "first step", "last step")
    for process in store.processes():
        spans = [span for span in store.spans() if span.process is process]
        messages = [span for span in spans if span.name.startswith("mq.")]
        processes.add_row(
            process.label,
            measured(process.pid),
            measured(len(spans)),
            measured(len(messages)),
            spans[0].name,
            spans[-1].name,
        )
    console.print(processes)

    step("Follow one step of the engine through the channels")
    sent = [span for span in store.spans(name="mq.enqueue") if span.process.role == "engine_core"]
    sizes = sorted(span.get("bytes") for span in sent)
    say(
        f"EngineCore wrote {measured(len(sent))} messages into the broadcast ring, {measured(sizes[0])} to {measured(sizes[-1])} bytes each: "
        "descriptions of batches. The tensors stayed with the workers."
    )
    closing(
        args.trace,
        "minivllm timeline {trace} --view spawn     who started whom",
        "minivllm timeline {trace} --view rpc       one call as broadcast and response",
        "minivllm timeline {trace} --view shutdown  who was asked to end, and how long each took",
    )


if __name__ == "__main__":
    main()
