"""The `minivllm` command: subcommands, exit codes and signals.

vLLM 0.25.1: vllm/entrypoints/cli/main.py (main)
Articles: –

Exit codes: 0 done, 1 the engine failed or something needed is missing, 2 bad input, 130 interrupted
(Ctrl-C), 141 the reader of a pipe went away, 143 terminated (SIGTERM). Each subcommand lives in a file of its
own and imports what is heavy only when it runs, so that `minivllm --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from minivllm.cli import common, demo, doctor, export, generate, spans, timeline

_SUBCOMMANDS = (demo, generate, timeline, doctor, export, spans)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="minivllm",
        description="How vLLM V1 runs one model over several processes: run it, see it, read it.",
        epilog="Start with `minivllm demo`. Each subcommand explains itself with --help.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    subparsers = parser.add_subparsers(title="subcommands", metavar="COMMAND", dest="command")
    for module in _SUBCOMMANDS:
        module.add_parser(subparsers)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import minivllm

        print(f"minivllm {minivllm.__version__}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code of the process."""
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return common.BAD_INPUT
        with common.signals():
            code: int = args.run(args)
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        common.complain("interrupted")
        return common.INTERRUPTED
    except common.Terminated as e:
        common.complain(f"ended by {e.signal_name}")
        return e.exit_code
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return common.CLOSED_PIPE
    except Exception as e:
        return common.report(e, traceback=getattr(args, "traceback", False))


if __name__ == "__main__":
    sys.exit(main())
