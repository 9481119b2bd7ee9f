"""`minivllm spans`: the catalogue of lifecycle steps, as a table or as data, and what recorded runs show of it.

vLLM 0.25.1: no counterpart
Articles: part 1, part 2
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from minivllm.cli import common

if TYPE_CHECKING:
    from minivllm.tracing.spec import SpanSpec


_LETTERS = {"client": "C", "engine_core": "E", "worker": "W"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "spans",
        parents=[common.options()],
        help="list every lifecycle step that a trace can show",
        description="The catalogue of lifecycle steps: name, trace level, process, what it shows, where the articles "
        "and vLLM 0.25.1 have it.",
    )
    parser.add_argument(
        "--name", metavar="TEXT", help="only the steps whose name contains TEXT; shows every field"
    )
    parser.add_argument(
        "--coverage",
        nargs="+",
        metavar="DIR",
        help="which steps these runs show, which they could not show and why, and which are missing (then exit code 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minivllm.tracing.catalogue import SPANS

    if args.coverage:
        if args.name is not None:
            from minivllm.exceptions import ConfigError

            raise ConfigError("--coverage is about the whole catalogue; leave --name out")
        from minivllm.cli import coverage

        return coverage.run(args.coverage, args.json)
    specs = [spec for spec in SPANS.values() if args.name is None or args.name in spec.name]
    if not specs:
        from minivllm.exceptions import ConfigError

        raise ConfigError(f"no step has {args.name!r} in its name; `minivllm spans` lists them all")
    if args.json:
        import json

        print(json.dumps([_as_data(spec) for spec in specs], indent=1, ensure_ascii=False))
    elif args.name is None:
        _print_table(specs)
    else:
        _print_details(specs)
    return common.OK


def _as_data(spec: SpanSpec) -> dict[str, Any]:
    import dataclasses

    from minivllm.tracing.spec import LEVEL_NAMES

    return {**dataclasses.asdict(spec), "level": LEVEL_NAMES[spec.level]}


def _print_table(specs: list[SpanSpec]) -> None:
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from minivllm.timeline import theme
    from minivllm.tracing.spec import LEVEL_NAMES

    console = common.console()
    glyphs = theme.glyphs_for(console.encoding)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("span", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("where", no_wrap=True)
    table.add_column("what it shows", overflow="fold", ratio=1)
    faint = Style(color=theme.FAINT)
    for spec in specs:
        where = "".join(letter for role, letter in _LETTERS.items() if role in spec.process)
        level, what = LEVEL_NAMES[spec.level], glyphs.spell(spec.what)
        if console.width < common.NARROW:
            common.print_entry(console, Text.assemble(spec.name, (f"  {level}  ", faint), where), what)
        else:
            table.add_row(Text(spec.name), Text(level, faint), where, Text(what))
    if table.row_count:
        console.print(table)
    console.print(
        Text(
            f"{len(specs)} steps. where: C client, E EngineCore, W worker. level: what --trace-level must be at least. "
            "`minivllm spans --name TEXT` shows everything about a step.",
            faint,
        )
    )


def _print_details(specs: list[SpanSpec]) -> None:
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from minivllm.timeline import theme
    from minivllm.tracing.spec import LEVEL_NAMES

    console = common.console()
    glyphs = theme.glyphs_for(console.encoding)
    for i, spec in enumerate(specs):
        if i:
            console.print()
        console.print(Text(spec.name, Style(bold=True)))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style=Style(color=theme.FAINT), no_wrap=True)
        table.add_column(overflow="fold")
        for field, value in (
            ("shows", spec.what),
            ("level", LEVEL_NAMES[spec.level]),
            ("process", f"{', '.join(spec.process)}; once per {spec.per}"),
            ("only when", spec.when),
            ("emitted by", spec.method),
            ("articles", ", ".join(spec.articles)),
            ("vLLM 0.25.1", spec.vllm),
            ("vLLM's span", spec.vllm_span),
        ):
            if value:
                table.add_row(field, Text(glyphs.spell(value)))
        console.print(table)
