"""What the walkthroughs share: their options, numbered steps on the terminal, a light worker, and the closing lines."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minivllm import tracing
from minivllm.config import ParallelConfig, VllmConfig
from minivllm.worker.worker_base import WorkerBase

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


class LightWorker(WorkerBase):
    """A worker without device and model, so without torch: it starts in a fraction of a second."""

    @tracing.instrument("worker.init_device")
    def init_device(self) -> None:
        pass

    @tracing.instrument("worker.load_model")
    def load_model(self) -> None:
        pass


def light_config(tp: int, worker: type[LightWorker]) -> VllmConfig:
    """Configuration for an executor of such workers; a child finds the class by its name, also in the main module."""
    name = f"{worker.__module__}.{worker.__qualname__}"
    return VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=tp, worker_cls=name))


def runs(pid: int) -> bool:
    """Whether a process runs; an orphan that has ended may stay in the table until somebody reaps it."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


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


def ms(nanoseconds: float) -> str:
    """A measured time in milliseconds, as `measured` shows it."""
    return measured(f"{nanoseconds / 1e6:.1f} ms")


def progress(text: str) -> None:
    """A line of `on_progress`: which lines there are is a matter of time."""
    console.print(f"  [dim]{measured(text)}[/dim]")


def table(*columns: str) -> Table:
    """An empty table in the walkthroughs' style; print it with `console.print`."""
    made = Table(*columns, box=None, pad_edge=False, header_style="dim")
    made.columns[0].no_wrap = True
    return made


def closing(trace: Path, *commands: str) -> None:
    """Where the trace is, and how to look further: commands, each with what it shows after some spaces."""
    console.print("\n[bold]To look further[/bold]")
    console.print(f"The trace is in {trace}", soft_wrap=True)
    parts = [re.split(r" {2,}", command.format(trace=trace), maxsplit=1) for command in commands]
    width = max(len(part[0]) for part in parts)
    for command, *what in parts:
        console.print(f"  {command:{width}}  {''.join(what)}".rstrip(), soft_wrap=True)
