"""`minivllm doctor --explain-runner`: V1 or V2, question by question.

vLLM 0.25.1: vllm/config/vllm.py (VllmConfig.use_v2_model_runner)
Articles: part 1 §6
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from minivllm.cli import common
from minivllm.exceptions import ConfigError

if TYPE_CHECKING:
    from minivllm.config.model_runner_decision import RunnerDecision

_QUESTIONS = {
    "environment": "Does the environment say it?",
    "v2_only": "Is something in use that only V2 has?",
    "default_model": "Is it a model that runs on V2 by default?",
    "kernels": "Are V2's kernels there?",
    "unsupported_features": "Is something in use that V2 lacks?",
    "validation": "Can the chosen runner do it all?",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--explain-runner",
        action="store_true",
        help="instead say which model runner an engine would get, and the answer at each step of the decision; nothing "
        "is started",
    )
    group = parser.add_argument_group(
        "which engine", "What is checked, or explained, is about an engine with these."
    )
    group.add_argument("--model", metavar="DIR", help="its checkpoint (default: the bundled one)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="another argument of it, such as tensor_parallel_size=4; VALUE is JSON or plain text",
    )


def run(args: argparse.Namespace) -> int:
    """Print the chain. Raises ConfigError, after printing it, when the configuration is refused."""
    from minivllm.config.model_runner_decision import RunnerConfigError
    from minivllm.engine.arg_utils import EngineArgs

    error: RunnerConfigError | None = None
    try:
        config = EngineArgs.from_kwargs(**asked(args)).create_engine_config()
        decision = config.model_runner_decision
    except RunnerConfigError as e:
        decision, error = e.decision, e
    _print(decision, args.json)
    if error is not None:
        raise error
    return common.OK


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the engine that is asked about. Raises ConfigError: a --set of another form."""
    return {"model": args.model, **dict(map(_setting, args.settings))}


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _print(decision: RunnerDecision, as_json: bool) -> None:
    runner = "V2" if decision.use_v2 else "V1"
    if as_json:
        report = {
            "runner": None if decision.error else runner,
            "decided_by": decision.decided_by.name,
            "stages": [stage._asdict() for stage in decision.stages],
            "warning": decision.warning,
            "error": decision.error,
        }
        print(json.dumps(report, indent=1))
        return

    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from minivllm.config.model_runner_decision import NOT_ASKED, REFUSED
    from minivllm.timeline import theme

    console = common.console()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    colors = {"V1": "#e0a030", "V2": "#3fb068", NOT_ASKED: theme.FAINT, REFUSED: theme.ERROR}
    faint = Style(color=theme.FAINT)
    for stage in decision.stages:
        asked = stage.answer != NOT_ASKED
        found = Text(_QUESTIONS[stage.name], Style(bold=asked) if asked else faint)
        found.append(f"\n{stage.why}", Style(bold=False) if asked else faint)
        found.append(f"\n{stage.vllm}", faint)
        table.add_row(Text(stage.answer, Style(color=colors.get(stage.answer))), found)
    console.print(table)
    console.print()
    if decision.error:
        console.print("No engine would start: the chosen runner cannot do what is asked for.")
    else:
        console.print(f"An engine gets Model Runner {runner}, decided by {decision.decided_by.name}.")
