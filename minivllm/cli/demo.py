"""`minivllm demo`: the main job, from text in to text out over several processes, and what the trace shows of it.

vLLM 0.25.1: no counterpart
Articles: part 1 intro, §1–§5, part 2 §2.3.1, §2.3.7
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.cli import common, engine

if TYPE_CHECKING:
    from rich.console import Console

    from minivllm.request_output import RequestOutput

PROMPTS = (
    "The for statement is used to iterate over",
    "A generator function is",
    "When an exception is raised,",
)
JAEGER = "docker run --rm -p 16686:16686 -p 4317:4317 -p 4318:4318 jaegertracing/jaeger:2.20.0"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        parents=[common.options()],
        help="the main job: three prompts on two worker processes, with timelines",
        description="Start EngineCore and its workers with tracing on, continue three prompts, and show how the "
        "processes came up and how one step went through them.",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=24, metavar="N", help="tokens per prompt (default: 24)"
    )
    parser.add_argument(
        "--trace-level",
        choices=engine.TRACE_LEVELS,
        default="message",
        help="how much is recorded (default: message)",
    )
    parser.add_argument(
        "--live-step",
        nargs="?",
        const=True,
        metavar="COMMANDS",
        help="stop every process before each lifecycle step until you let it go, by keys; or by COMMANDS such as "
        '"until dist.rendezvous@rank0; step rank0; show; run"',
    )
    engine.add_engine_options(parser, tp=2)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minivllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    if args.live_step is not None:
        from minivllm.live_step import check

        check(args.live_step)
    trace = engine.new_trace_directory(args.trace)
    what = f"EngineCore and {args.tp} worker{'s' if args.tp != 1 else ''}"
    console = common.console()
    # Rings and processes make the demo; one rank would otherwise run inside EngineCore.
    settings = {"distributed_executor_backend": "mp", "trace_level": args.trace_level}
    if args.live_step is not None:
        settings["live_step"] = args.live_step
    with engine.running(args, trace, what, **settings) as llm:
        outputs = llm.generate(list(PROMPTS), params)
    _print_outputs(console, outputs)
    _print_timelines(console, trace)
    _print_next(console, trace)
    return common.OK


def _print_outputs(console: Console, outputs: list[RequestOutput]) -> None:
    from rich.style import Style
    from rich.text import Text

    from minivllm.timeline import theme

    glyphs = theme.glyphs_for(console.encoding)
    faint = Style(color=theme.FAINT)
    for output in outputs:
        completion = output.outputs[0]
        text = _printable(completion.text, console.encoding)
        console.print(Text.assemble((str(output.prompt), Style(bold=True)), text))
        ids = " ".join(map(str, completion.token_ids))
        console.print(
            Text(
                glyphs.spell(f"{len(completion.token_ids)} tokens, {completion.finish_reason}: {ids}"), faint
            )
        )
        console.print()


def _printable(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def _print_timelines(console: Console, trace: Path) -> None:
    from minivllm.timeline import build_views, export
    from minivllm.trace_store import TraceStore

    export.print_views(console, build_views(TraceStore.open(trace), ["spawn", "init", "rpc"]))
    console.print()


def _print_next(console: Console, trace: Path) -> None:
    from rich.style import Style
    from rich.text import Text

    lines = (
        ("The trace is in", str(trace)),
        ("All views:", f"minivllm timeline {trace} --view all"),
        ("Step by step:", f"minivllm step {trace}"),
        ("As a picture:", f"minivllm timeline {trace} --view spawn --svg spawn.svg"),
        ("In Jaeger:", JAEGER),
        ("", f"minivllm export {trace} --otlp http://localhost:4318"),
        ("", "then open http://localhost:16686"),
    )
    width = max(len(label) for label, _ in lines)
    for label, line in lines:
        # Never broken: these lines are there to be copied.
        console.print(Text.assemble(f"{label:<{width}} ", (line, Style(bold=True))), soft_wrap=True)
