"""`minivllm step DIR`: walk a recorded run one event at a time, back and forth.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from minivllm.cli import common

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from minivllm.stepper.screen import Screen

_DEFAULT_COUNT = 20
# Steps as text wrap at any width, but words have to fit; a picture has parts side by side.
_MIN_TEXT_COLUMNS = 40
_EXAMPLES = """\
examples:
  minivllm step traces/run                        in the terminal; ? lists the keys
  minivllm step traces/run --at failure           begin where something went wrong first
  minivllm step traces/run --at 1.5s --print      one step as plain text
  minivllm step traces/run --print --from rpc.call#7 --count 5
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "step",
        parents=[common.options()],
        help="walk a recorded run one event at a time, back and forth",
        description="Walk a recorded run one event at a time: what each process, pipe and queue is in, the source line "
        "that emitted the step, and why it is there.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common.add_directory(parser)
    parser.add_argument(
        "--at",
        metavar="WHERE",
        help="begin at a step number, a time (1.5s, 300ms), a step by name (worker.load_model@rank1, rpc.call#7), "
        "or the first `failure`",
    )
    parser.add_argument(
        "--level",
        choices=("lifecycle", "rpc", "message"),
        default="message",
        help="show only steps up to this level (default: all)",
    )
    parser.add_argument(
        "--print", action="store_true", help="print plain text instead: steps, or with --at one picture"
    )
    parser.add_argument(
        "--from", dest="start", metavar="WHERE", help="with --print: the first step (default: 1)"
    )
    parser.add_argument(
        "--count",
        type=_positive,
        metavar="K",
        help=f"with --print: how many steps (default: {_DEFAULT_COUNT})",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minivllm.cli.timeline import open_store
    from minivllm.exceptions import ConfigError

    if not args.print:
        if args.start is not None or args.count is not None:
            raise ConfigError("--from and --count go with --print; --at says where the screen begins")
        from minivllm.stepper.terminal import check_terminal

        check_terminal()
    elif args.at is not None and (args.start is not None or args.count is not None):
        raise ConfigError("--at prints the picture of one step; --from and --count print a sequence of them")
    from minivllm.stepper.positions import find_position, names_a_span, remark
    from minivllm.stepper.screen import Screen
    from minivllm.stepper.steps import Walk
    from minivllm.tracing.catalogue import SPANS
    from minivllm.tracing.spec import LEVEL_NAMES

    walk = Walk(open_store(args.directory, args.number))
    walk.details = LEVEL_NAMES.index(args.level)
    screen = Screen(walk, sys.stdout.encoding)
    where = args.start or args.at
    index = find_position(walk, where) if where else 0
    if where and args.print and (said := remark(walk, where)):
        print(said, file=sys.stderr)
    by_name = args.start is not None and (names_a_span(args.start) or args.start == "failure")
    if by_name and not walk.is_shown(walk[index]):
        name = walk[index].span.name
        level = LEVEL_NAMES[SPANS[name].level]
        raise ConfigError(
            f"--from {args.start}: {name} is of level {level}, which --level {args.level} hides; use --level {level}"
        )
    if args.print:
        _print(screen, index, args)
    else:
        from minivllm.stepper.app import App, make_console
        from minivllm.stepper.terminal import Terminal

        App(screen, Terminal(), make_console(), index).run()
    return common.OK


def _print(screen: Screen, index: int, args: argparse.Namespace) -> None:
    from minivllm.stepper import plain
    from minivllm.stepper.screen import MIN_COLUMNS

    console = common.console()
    # Nothing has to fit a screen here; lines that a very narrow terminal wraps are better than none.
    console.width = max(console.width, _MIN_TEXT_COLUMNS if args.at is None else MIN_COLUMNS)
    columns = console.width
    if args.at is not None:
        _show(console, plain.picture(screen, index, columns, 30))
    else:
        for line in plain.sequence(screen, index, args.count or _DEFAULT_COUNT, columns):
            _show(console, [line])


def _show(console: Console, lines: list[Text]) -> None:
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="crop")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)
