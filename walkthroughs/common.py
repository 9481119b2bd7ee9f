"""What the walkthroughs share: their options, numbered steps on the terminal, and the closing lines."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console(highlight=False)
_steps = 0


def options(description: str) -> argparse.Namespace:
    """Parse the options that every walkthrough has. `trace` becomes a directory that exists and is empty."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model runs"
    )
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="tensor parallel size (default: 2)")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="directory for the trace; new or empty")
    args = parser.parse_args()
    if args.trace is None:
        args.trace = Path(tempfile.mkdtemp(prefix="minivllm-walkthrough-"))
    elif args.trace.exists() and any(args.trace.iterdir()):
        parser.error(f"--trace {args.trace}: the directory is not empty")
    return args


def step(text: str) -> None:
    """Announce the next step."""
    global _steps
    _steps += 1
    console.print(f"\n[bold]{_steps}. {text}[/bold]")


def say(text: str) -> None:
    """One paragraph of explanation; what is measured in it goes through `measured`."""
    console.print(text)


def measured(value: object) -> str:
    """A value that is not the same in the next run, in the colour that says so (as markup, for `say` and table cells)."""
    return f"[cyan]{escape(str(value))}[/cyan]"


def progress(text: str) -> None:
    """A line of `on_progress`: which lines there are is a matter of time."""
    console.print(f"  [dim]{measured(text)}[/dim]")


def table(*columns: str) -> Table:
    """An empty table in the walkthroughs' style; print it with `console.print`."""
    made = Table(*columns, box=None, pad_edge=False, header_style="dim")
    made.columns[0].no_wrap = True
    return made


def closing(trace: Path, *commands: str) -> None:
    """Where the trace is, and how to look further."""
    console.print("\n[bold]To look further[/bold]")
    console.print(f"The trace is in {trace}", soft_wrap=True)
    for command in commands:
        console.print("  " + command.format(trace=trace), soft_wrap=True)
