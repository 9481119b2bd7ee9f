"""What the subcommands share: exit codes, signals, error lines and options that several have.

vLLM 0.25.1: vllm/entrypoints/cli/types.py (CLISubcommand)
Articles: –
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141

PIPE_WIDTH = 100
# Below this a table has no room for a column of sentences beside others.
NARROW = 72
_TRAILING_BLANKS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)(?=\n)")


class Parser(argparse.ArgumentParser):
    """A parser whose --help and --version fail where they cannot be printed; argparse's own says nothing then."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
        elif message:
            file.write(message)
            file.flush()


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. Like KeyboardInterrupt it passes `except Exception` and runs each `finally`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal_name = signal.Signals(number).name
        self.exit_code = 128 + number


class TracedFailure(Exception):
    """An engine failure of a run whose trace tells more.

    Attributes:
        cause: the failure itself.
        trace: the directory.
    """

    def __init__(self, cause: Exception, trace: Path) -> None:
        super().__init__(cause, trace)
        self.cause, self.trace = cause, trace


def run(parser: Parser, argv: Sequence[str] | None) -> int:
    """Parse the command line, run its subcommand, and turn whatever ends it into an exit code."""
    # Started with a closed stdout or stderr, Python has None there.
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    traceback = False
    try:
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return BAD_INPUT
        traceback = args.traceback
        with signals():
            code: int = args.run(args)
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        # The terminal echoes ^C, and drops what it had not shown yet, perhaps the end of a progress line.
        if sys.stderr.isatty():
            sys.stderr.write("\n")
        complain("interrupted")
        return INTERRUPTED
    except Terminated as e:
        complain(f"ended by {e.signal_name}")
        return e.exit_code
    except BrokenPipeError:
        _give_up_stdout()
        return CLOSED_PIPE
    except Exception as e:
        return report(e, traceback=traceback)


@contextmanager
def signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into an exception and ignore those that follow it.

    The exception unwinds through the engine's shutdown. A second Ctrl-C in the middle of that would leave
    processes behind, and the shutdown has deadlines of its own.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        for one in caught:
            signal.signal(one, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(number)

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # nohup and background jobs of a script start with the signal ignored; that is the caller's wish.
    caught = [n for n in wanted if signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, unwind) for n in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write(text: str) -> None:
    """Text to stdout; what its encoding lacks becomes `?`, since a model may generate any character."""
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def write_file(target: str, content: bytes) -> None:
    """Write an output that the command line names.

    Raises:
        ConfigError: there can be no such file.
        OSError: writing it failed, such as on a full disk.
    """
    from minivllm.exceptions import ConfigError

    folder = Path(target).parent
    try:
        file = open(target, "wb")  # noqa: SIM115
    except OSError as e:
        if not folder.exists():
            said = f"there is no folder {folder}; make it first, or name a file elsewhere"
        elif os.path.isdir(target):
            said = "it is a folder; name a file in it"
        elif isinstance(e, FileNotFoundError):
            said = f"no file can be made in {folder}; name one elsewhere"
        else:
            said = f"{e.strerror}; name a file elsewhere"
        raise ConfigError(f"cannot write {target}: {said}") from e
    try:
        with file:
            file.write(content)
    except OSError as e:
        raise OSError(e.errno, e.strerror, target) from e


def complain(message: str) -> None:
    """One line on stderr; a stderr that is gone too is not worth another error."""
    try:
        print(f"minivllm: {message}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


def report(error: Exception, traceback: bool) -> int:
    """Say what went wrong and return the exit code that belongs to it.

    Args:
        traceback: show Python's traceback as well (--traceback, or MINIVLLM_LOG_LEVEL=DEBUG).
    """
    from minivllm.cli.export import ExportError
    from minivllm.exceptions import (
        ConfigError,
        EngineDeadError,
        ExecutorFailedError,
        RemoteError,
        RequestError,
    )

    if traceback or os.environ.get("MINIVLLM_LOG_LEVEL", "").upper() == "DEBUG":
        import traceback as tracebacks

        tracebacks.print_exception(error.cause if isinstance(error, TracedFailure) else error)
    if isinstance(error, TracedFailure):
        code = report(error.cause, traceback=False)
        complain(f"what happened: minivllm timeline {error.trace} --view failure")
        return code
    # What a worker raised is appended below this line; the command line shows it with --traceback only.
    message = str(error).split("\n--- traceback", 1)[0].strip()
    if isinstance(error, (ConfigError, RequestError)):
        complain(f"error: {message}")
        return BAD_INPUT
    if isinstance(error, ExportError):
        complain(f"error: {message}")
        return FAILED
    if isinstance(error, (EngineDeadError, ExecutorFailedError, RemoteError)):
        complain(f"the engine failed: {message}")
        return FAILED
    if isinstance(error, OSError) and error.strerror:
        where = error.filename
        if not where and _was_printing(error):
            where = "standard output"
            _give_up_stdout()
        complain(f"error: {where}: {error.strerror}" if where else f"error: {error.strerror}")
        return FAILED
    complain(f"unexpected {type(error).__name__}: {message or 'no message'} (--traceback shows where)")
    return FAILED


def _give_up_stdout() -> None:
    """Python writes once more at exit what is still in the buffer; that must not complain either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _was_printing(error: BaseException) -> bool:
    """Whether an error comes from where the command line prints: an error of a stream does not say of which."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    return module.startswith(("minivllm.cli.", "rich."))


def options() -> argparse.ArgumentParser:
    """Options that every subcommand has."""
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument(
        "--traceback", action="store_true", help="on an error show Python's traceback as well"
    )
    return parent


def add_directory(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which recorded run a command is about."""
    parser.add_argument("directory", metavar="DIR", help="the trace directory of the run")
    parser.add_argument(
        "--run",
        dest="number",
        type=int,
        metavar="N",
        help="which run of a directory that was used for several: 1 is the oldest (default: the latest)",
    )


def console(stderr: bool = False, width: int | None = None) -> Console:
    """A Rich console; into a pipe it is COLUMNS or 100 columns wide."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            # Rich would leave with exit code 1 here, without running anybody's cleanup first.
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = PIPE_WIDTH
    return PipeConsole(
        file=stream if stream.isatty() else cast("IO[str]", _WithoutTrailingBlanks(stream)),
        width=width,
        highlight=False,
        soft_wrap=False,
        emoji=False,
        markup=False,
    )


def print_entry(console: Console, head: Text, text: str) -> None:
    """A row of a table for a console that is narrower than NARROW: the sentence stands below the rest."""
    from rich.padding import Padding

    console.print(head)
    console.print(Padding(text, (0, 0, 0, 4)))


class _WithoutTrailingBlanks:
    """A pipe or file, in which the blanks that fill the last column of a table are only in the way."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_TRAILING_BLANKS.sub(r"\1", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
