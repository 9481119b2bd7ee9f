"""The `minivllm` command: subcommands, exit codes and signals.

vLLM 0.25.1: vllm/entrypoints/cli/main.py (main)
Articles: –

Exit codes: 0 done, 1 the engine failed or something needed is missing, 2 bad input, 130 interrupted
(Ctrl-C), 141 the reader of a pipe went away, 143 terminated (SIGTERM). Each subcommand lives in a file of its
own and imports what is heavy only when it runs, so that `minivllm --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minivllm.cli.common import Parser


def make_parser() -> Parser:
    """The parser of the whole command line."""
    import minivllm
    from minivllm.cli import demo, doctor, export, generate, learn, spans, step, timeline
    from minivllm.cli.common import Parser

    parser = Parser(
        prog="minivllm",
        description="How vLLM V1 runs one model over several processes: run it, see it, read it.",
        epilog="Start with `minivllm demo`. Each subcommand explains itself with --help.",
    )
    parser.add_argument("--version", action="version", version=f"minivllm {minivllm.__version__}")
    subparsers = parser.add_subparsers(title="subcommands", metavar="COMMAND", dest="command")
    for module in (demo, generate, timeline, step, doctor, export, spans, learn):
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code of the process."""
    try:
        # Imported here, so that Ctrl-C in the first hundred milliseconds is no traceback either.
        from minivllm.cli import common

        return common.run(make_parser(), argv)
    except KeyboardInterrupt:
        print("minivllm: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
