"""`minivllm timeline DIR`: the views of a recorded run, in the terminal or as a file.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3, §2.4
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.cli import common

if TYPE_CHECKING:
    from minivllm.timeline.run import Options
    from minivllm.timeline.view import View
    from minivllm.trace_store import TraceStore

# The keys of minivllm.timeline.VIEWS; --help must not import it, and a test compares the two.
VIEW_NAMES = ("spawn", "init", "rpc", "step", "pipeline", "async", "future", "shutdown", "failure")
MIN_WIDTH, MAX_WIDTH = 40, 400
_EXAMPLES = """\
examples:
  minivllm timeline traces/run                          every view that the run has something for
  minivllm timeline traces/run --view rpc --focus 42    the RPC with sequence number 42
  minivllm timeline traces/run --view init --rank 1 --min-duration 5ms
  minivllm timeline traces/run --view spawn --svg spawn.svg
  minivllm timeline traces/pp2 --view pipeline --compare traces/pp2-without-queue
  minivllm timeline traces/run --run 1 --compare traces/run    the oldest run in a directory beside the latest
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "timeline",
        parents=[common.options()],
        help="show a recorded run: who started whom, who waited for whom",
        description="Show a recorded run as timelines.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common.add_directory(parser)
    parser.add_argument(
        "--view",
        action="append",
        metavar="NAME",
        help=f"{', '.join(VIEW_NAMES)} or all (default); several may be given, also separated by commas",
    )
    parser.add_argument(
        "--focus", metavar="N|ID", help="which RPC or step: its number, or the beginning of a span id"
    )
    parser.add_argument(
        "--rank", action="append", type=_ranks, metavar="R", help="only these workers: 0 or 0,2"
    )
    parser.add_argument(
        "--from", dest="from_ns", type=_time, metavar="T", help="begin at T since the start: 0.5s, 300ms"
    )
    parser.add_argument("--to", dest="to_ns", type=_time, metavar="T", help="end at T since the start")
    parser.add_argument(
        "--min-duration", type=_time, default=0, metavar="T", help="leave out what is shorter: 5ms, 20us"
    )
    parser.add_argument(
        "--width", type=_width, metavar="N", help=f"columns to use ({MIN_WIDTH} to {MAX_WIDTH})"
    )
    parser.add_argument(
        "--compare",
        metavar="DIR",
        help="lay this second run beside the first: figures, then each view of both",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--svg", metavar="FILE", help="write a picture instead (- for standard output)")
    output.add_argument(
        "--html", metavar="FILE", help="write one self-contained page instead (- for standard output)"
    )
    output.add_argument("--json", action="store_true", help="print the data behind the views instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minivllm.exceptions import ConfigError
    from minivllm.timeline.run import Options

    names = [name for text in args.view or ["all"] for name in text.split(",")]
    for name in names:
        if name not in (*VIEW_NAMES, "all"):
            raise ConfigError(f"--view {name}: no such view; there are {', '.join(VIEW_NAMES)} and all")
    if args.from_ns is not None and args.to_ns is not None and args.from_ns >= args.to_ns:
        raise ConfigError("--from must be earlier than --to")
    options = Options(
        focus=args.focus,
        ranks=frozenset(r for ranks in args.rank for r in ranks) if args.rank else None,
        from_ns=args.from_ns,
        to_ns=args.to_ns,
        min_duration_ns=args.min_duration,
    )
    store = open_store(args.directory, args.number)
    _check_options(store, options)
    if args.compare:
        from minivllm.timeline.compare import compare

        other = open_store(args.compare)
        _check_options(other, options)
        labels = _labels(args.directory, args.compare, (store.number, other.number))
        _show_views(compare((store, other), labels, names, options), len(store.spans()), args)
    else:
        show(store, names, options, args)
    return common.OK


def _labels(first: str, second: str, numbers: tuple[int, int]) -> tuple[str, str]:
    """Names for two runs: the last parts of their paths that differ, or their numbers in one directory."""
    a, b = Path(first).resolve(), Path(second).resolve()
    if a == b:
        return ("A", "B") if numbers[0] == numbers[1] else (f"run {numbers[0]}", f"run {numbers[1]}")
    for count in range(1, max(len(a.parts), len(b.parts)) + 1):
        names = "/".join(a.parts[-count:]), "/".join(b.parts[-count:])
        if names[0] != names[1]:
            return names
    raise AssertionError("unreachable")


def show(store: TraceStore, names: list[str], options: Options, args: argparse.Namespace) -> None:
    from minivllm.timeline import build_views

    _show_views(build_views(store, names, options), len(store.spans()), args)


def _show_views(views: list[View], num_spans: int, args: argparse.Namespace) -> None:
    from minivllm.timeline import export

    width = args.width or export.DEFAULT_PICTURE_WIDTH
    if args.svg:
        _write(args.svg, export.views_to_svg(views, width))
    elif args.html:
        title = f"minivllm run {Path(args.directory).resolve().name}"
        _write(args.html, export.views_to_html(views, title, width))
    elif args.json:
        print(export.views_to_json(views, {"directory": args.directory, "spans": num_spans}))
    else:
        console = common.console(width=args.width)
        # Lines that a very narrow terminal wraps are better than values without their units.
        console.width = max(console.width, MIN_WIDTH)
        export.print_views(console, views)


def open_store(directory: str, number: int | None = None) -> TraceStore:
    """Open a trace directory, and say on standard error if something of it is missing.

    Args:
        number: which run of several, 1 is the oldest; None: the latest.

    Raises:
        ConfigError: it does not exist or holds no trace, or no such run.
    """
    from minivllm.trace_store import TraceStore

    # A large trace is many small objects that all live until the end: collecting in between is most of the time.
    gc.disable()
    store = TraceStore.open(directory, number=number)
    if store.warnings:
        print(f"minivllm: warning: {'; '.join(store.warnings)}", file=sys.stderr)
    return store


def _check_options(store: TraceStore, options: Options) -> None:
    """Raises ConfigError: a rank that the run does not have, or a stretch of time behind its end."""
    from minivllm.exceptions import ConfigError
    from minivllm.timeline import text as words
    from minivllm.timeline.run import Run

    run = Run(store)
    end_ns = run.at(max(span.end_ns for span in store.spans()))
    if options.from_ns is not None and options.from_ns > end_ns:
        raise ConfigError(
            f"--from {words.instant(options.from_ns, 3)}: the run ends at {words.instant(end_ns, 3)}"
        )
    known = sorted({p.rank for p in store.processes() if p.role == "worker" and p.rank is not None})
    wrong = sorted(set(options.ranks or ()) - set(known))
    if wrong:
        have = f"the run has {words.ranks(known)}" if known else "the run has no worker processes"
        raise ConfigError(f"--rank {wrong[0]}: {have}")


def _write(target: str, content: str) -> None:
    if target == "-":
        sys.stdout.buffer.write(content.encode("utf-8"))
        return
    common.write_file(target, content.encode("utf-8"))
    print(f"wrote {target}", file=sys.stderr)


def _ranks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank or a list such as 0,2")
    return [int(part) for part in parts]


def _time(text: str) -> int:
    """Nanoseconds of `1.5s`, `300ms`, `20us`, `20µs`, `5ns`; a bare number counts seconds."""
    units = {
        "ns": 1,
        "us": 1_000,
        "\u00b5s": 1_000,
        "\u03bcs": 1_000,
        "ms": 1_000_000,
        "s": 1_000_000_000,
        "": 1_000_000_000,
    }
    number = text.rstrip("num\u00b5\u03bcs ")
    unit = text[len(number) :].strip()
    try:
        value = float(number)
        if not 0 <= value < 1e9:
            raise ValueError
        return round(value * units[unit])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 0.5s, 300ms or 20us") from None


def _width(text: str) -> int:
    if not text.isdigit() or not MIN_WIDTH <= int(text) <= MAX_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {MIN_WIDTH} to {MAX_WIDTH}")
    return int(text)
