"""Walkthrough 6: which model runner an engine gets, question by question, and that the answer is given once.

python walkthroughs/06_which_runner.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import common
from common import closing, console, say, step, table

from minivllm import tracing
from minivllm.config import BUNDLED_CHECKPOINT
from minivllm.config.model_runner_decision import NOT_ASKED, RunnerConfigError, RunnerDecision
from minivllm.engine.arg_utils import EngineArgs
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.trace_store import TraceStore

VARIABLE = "MINIVLLM_USE_V2_MODEL_RUNNER"
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing special": {},
    "a draft model": {
        "speculative_config": {"model": str(BUNDLED_CHECKPOINT), "num_speculative_tokens": 2},
    },
    "a logits processor": {"logits_processors": ["my_module:MyProcessor"]},
    "raw logits": {"logprobs_mode": "raw_logits"},
}


@contextlib.contextmanager
def variable(value: str) -> Iterator[None]:
    """With the variable set; "" is unset."""
    if value:
        os.environ[VARIABLE] = value
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


# --8<-- [start:decide]
def decide(value: str, **settings: Any) -> RunnerDecision:
    """What an engine with these settings would get; nothing is started."""
    with variable(value):
        try:
            return EngineArgs.from_kwargs(**settings).create_engine_config().model_runner_decision
        except RunnerConfigError as error:
            return error.decision


# --8<-- [end:decide]


def questions() -> None:
    step("The questions, and the answers for the bundled model")
    answers = table("question", "answer", "why")
    for stage in decide("").stages:
        answers.add_row(stage.name, stage.answer, stage.why)
    console.print(answers)


def cases() -> None:
    step("Other settings")
    outcomes = table("setting", VARIABLE.removeprefix("MINIVLLM_"), "gets", "decided by")
    told = []
    for label, setting in SETTINGS.items():
        for value in ("", "1", "0"):
            decision = decide(value, **setting)
            runner = "no engine" if decision.error else "V2" if decision.use_v2 else "V1"
            by = "validation" if decision.error else decision.decided_by.name
            outcomes.add_row(label, value or "not set", runner, by)
            if label == "raw logits":
                told.append(decision.error or decision.warning)
    console.print(outcomes)
    say("What the user reads in the last three cases:")
    for text in told:
        console.print(f"  {text or '(nothing: it is what was asked for)'}")


# --8<-- [start:once]
def runner_of(worker: Any) -> tuple[str, str | None]:
    """Runs on every rank: where its runner's class is, and what its environment says."""
    import os

    return type(worker.model_runner).__module__, os.environ.get("MINIVLLM_USE_V2_MODEL_RUNNER")


# --8<-- [end:once]


def once(tp: int, device: str, trace: Any) -> None:
    step("The decision is made once, and travels with the configuration")
    config = EngineArgs.from_kwargs(
        tensor_parallel_size=tp, distributed_executor_backend="mp", device=device
    ).create_engine_config()
    tracing.configure("engine_core", trace_dir=str(trace), level=tracing.LIFECYCLE)
    with variable("0"), tracing.span("engine_core.init"):
        say(
            f"The configuration is made with the variable unset. Then {VARIABLE}=0, and the workers are started."
        )
        with MultiprocExecutor(config) as executor:
            ranks = table("rank", "its environment says", "its runner")
            for rank, (module, value) in enumerate(executor.collective_rpc(runner_of)):
                ranks.add_row(str(rank), value or "nothing", module)
            console.print(ranks)
    tracing.shutdown()

    step("The same in the trace: the span runner.select of each rank")
    spans = sorted(TraceStore.open(trace).spans("runner.select"), key=lambda span: span.rank or 0)
    selected = table("attribute", *(f"rank {span.rank}" for span in spans))
    for name in (
        "runner",
        "decided_by",
        *(f"stage.{stage.name}" for stage in config.model_runner_decision.stages),
    ):
        values = [str(span.get(name) or NOT_ASKED) for span in spans]
        selected.add_row(name, *(value.partition(":")[0] for value in values))
    console.print(selected)
    say("In vLLM each process asks its own environment, each time. There these workers would have got V1.")


def main() -> None:
    args = common.options(__doc__ or "")
    logging.disable(logging.WARNING)
    questions()
    cases()
    once(args.tp, args.device, args.trace)
    closing(
        args.trace,
        "minivllm doctor --explain-runner     the questions for any settings (--set NAME=VALUE)",
        "minivllm timeline {trace} --view init     where the choice stands in the initialisation",
    )


if __name__ == "__main__":
    main()
