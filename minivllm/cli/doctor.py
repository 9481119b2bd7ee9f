"""`minivllm doctor`: what this machine has, what is missing, and what to do about it.

vLLM 0.25.1: vllm/collect_env.py
Articles: part 2 §2.3.1, §2.7
"""

from __future__ import annotations

import argparse
import json

from minivllm.cli import common, explain_runner


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        parents=[common.options()],
        help="check this machine: Python, torch, devices, shared memory, tracing",
        description="Check what minivllm needs on this machine. Exit code 0: usable; 1: something needed is missing.",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove shared-memory segments of engines that are gone"
    )
    parser.add_argument("--env", action="store_true", help="list every MINIVLLM_* variable with its default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    explain_runner.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.explain_runner:
        return explain_runner.run(args)
    from minivllm.cli.doctor_checks import Status, all_checks

    asked = explain_runner.asked(args)
    if args.settings:
        from minivllm.engine.arg_utils import EngineArgs

        # A checkpoint that cannot be used is a finding; a setting that nobody can use is a mistyped question.
        EngineArgs.from_kwargs(**asked).create_engine_config()
    findings = all_checks(args.clean, asked)
    usable = all(f.status is not Status.MISSING for f in findings)
    if args.json:
        print(
            json.dumps(
                {
                    "usable": usable,
                    "findings": [
                        {"check": f.check, "status": f.status.value, "found": f.found, "to_do": f.to_do}
                        for f in findings
                    ],
                },
                indent=1,
            )
        )
        return common.OK if usable else common.FAILED

    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from minivllm.timeline import theme

    console = common.console()
    glyphs = theme.glyphs_for(console.encoding)
    colors = {
        Status.FINE: "#3fb068",
        Status.NOTE: "#e0a030",
        Status.SKIPPED: theme.FAINT,
        Status.MISSING: theme.ERROR,
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        found = Text(glyphs.spell(finding.found))
        if finding.to_do:
            found.append(glyphs.spell(f"\n→ {finding.to_do}"), Style(color=colors[finding.status]))
        table.add_row(
            Text(finding.check), Text(finding.status.value, Style(color=colors[finding.status])), found
        )
    console.print(table)
    if args.env:
        console.print(_variables())
    console.print()
    console.print(
        "minivllm is usable here." if usable else "Something that minivllm needs is missing; see above."
    )
    return common.OK if usable else common.FAILED


def _variables() -> object:
    import os

    from rich.table import Table

    from minivllm import envs

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", header_style="bold")
    table.add_column("variable", overflow="fold")
    table.add_column("value", overflow="fold")
    table.add_column("what it does", overflow="fold")
    for name, variable in envs.environment_variables.items():
        value = os.environ.get(name)
        table.add_row(name, f"{variable.default} (default)" if value is None else value, variable.help)
    return table
