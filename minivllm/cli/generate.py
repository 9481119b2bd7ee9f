"""`minivllm generate PROMPT…`: continue prompts on an engine of its own.

vLLM 0.25.1: vllm/entrypoints/cli/openai.py (CompleteCommand)
Articles: –
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from minivllm.cli import common, engine

if TYPE_CHECKING:
    from minivllm.request_output import RequestOutput
    from minivllm.sampling_params import SamplingParams


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "generate",
        parents=[common.options()],
        help="continue prompts",
        description="Start an engine, continue the prompts, and end it. Text goes to standard output, progress to "
        "standard error.",
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="text to continue; - reads one prompt per line from standard input",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=32, metavar="N", help="tokens per prompt (default: 32)"
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens"
    )
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the tokens that make up P"
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="seed of the sampling")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="end at TEXT; may be given several times"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    engine.add_engine_options(parser, tp=1)
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline parallel size (default: 1)")
    parser.add_argument(
        "--async-scheduling", action="store_true", help="schedule the next step while the workers compute"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens computed in one step; few spread the prompts over several batches (default: 2048)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="prompt plus output, in tokens")
    parser.add_argument(
        "--trace-level",
        choices=engine.TRACE_LEVELS,
        help="how much --trace records (default: rpc)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON list with text, tokens and finish reason per prompt"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from minivllm.exceptions import ConfigError
    from minivllm.sampling_params import SamplingParams

    if args.trace_level is not None and args.trace is None:
        raise ConfigError("--trace-level says how much --trace records; give --trace DIR as well")
    prompts = _prompts(args.prompts)
    # Everything that can be refused is refused before a process is started.
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    _check(args, prompts, params)
    trace: Path | None = engine.new_trace_directory(args.trace) if args.trace is not None else None
    ranks = args.tp * args.pp
    what = "EngineCore and 1 worker" if ranks == 1 else f"EngineCore and {ranks} workers"
    with engine.running(
        args,
        trace,
        what,
        pipeline_parallel_size=args.pp,
        async_scheduling=args.async_scheduling,
        max_num_batched_tokens=args.max_num_batched_tokens,
        # At least 1, so that a bad number of tokens is refused under its own name.
        max_num_seqs=max(1, min(64, args.max_num_batched_tokens)),
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        **({"trace_level": args.trace_level or "rpc"} if trace is not None else {}),
    ) as llm:
        outputs = llm.generate(prompts, params)
    if args.json:
        print(json.dumps([_as_data(output) for output in outputs], indent=1))
    else:
        for i, output in enumerate(outputs):
            if i:
                common.write("\n\n")
            common.write(f"{output.prompt}{output.outputs[0].text}")
        common.write("\n")
    if trace is not None:
        print(f"trace: {trace} (minivllm timeline {trace})", file=sys.stderr)
    return common.OK


def _prompts(given: list[str]) -> list[str]:
    """The prompts of the command line, with the lines of standard input in the place of `-`."""
    from minivllm.exceptions import RequestError

    prompts: list[str] = []
    for text in given:
        if text == "-":
            lines = sys.stdin.read().splitlines() if sys.stdin is not None else []
            prompts += [line for line in lines if line.strip()]
        else:
            prompts.append(text)
    if not prompts:
        raise RequestError("no prompt: give at least one, or - to read one per line from standard input")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise RequestError(f"prompt {number} is empty: at least one token is needed to begin with")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise RequestError(f"prompt {number} is not text in this terminal's encoding") from None
    return prompts


def _check(args: argparse.Namespace, prompts: list[str], params: SamplingParams) -> None:
    """Refuse a checkpoint without a tokenizer, and prompts that are too long for the model or --max-model-len.

    Raises:
        ConfigError, RequestError: what LLM would say, too, but only when the engine is up.
    """
    from pathlib import Path

    from minivllm.config import ModelConfig
    from minivllm.engine import EngineCoreReadyResponse
    from minivllm.engine.input_processor import InputProcessor, load_tokenizer
    from minivllm.exceptions import ConfigError, RequestError

    config = ModelConfig(model=args.model, dtype=args.dtype, max_model_len=args.max_model_len)
    file = Path(str(config.model)) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist, and the prompts cannot be turned into tokens without it; put the model's own there "
            "(LLM.generate also takes prompts as token ids)"
        )
    assert config.max_model_len is not None
    # A token is a byte at least. So a tokenizer, which can take a second to read, is not read here for most prompts.
    if all(len(prompt.encode()) < config.max_model_len for prompt in prompts):
        return
    # Only the engine will know how many blocks there are.
    limits = EngineCoreReadyResponse(1 << 31, 16, config.max_model_len, config.vocab_size)
    processor = InputProcessor(load_tokenizer(config), limits)
    for number, prompt in enumerate(prompts, start=1):
        try:
            processor.process("", prompt, params)
        except RequestError as e:
            raise RequestError(f"prompt {number}: {e}" if len(prompts) > 1 else str(e)) from None


def _as_data(output: RequestOutput) -> dict[str, object]:
    completion = output.outputs[0]
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
