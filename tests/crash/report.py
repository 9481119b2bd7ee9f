"""The table of the crash matrix: docs/crash_matrix.md, written by a run of all cells."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.crash.harness import Cell, Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "crash_matrix.md"
WHO = ("client", "engine", "rank0", "rank1")
TITLES = {"client": "client", "engine": "EngineCore", "rank0": "rank 0", "rank1": "rank 1"}


@dataclass(frozen=True)
class Result:
    cell: Cell
    shown: str
    seconds: float


_results: list[Result] = []


def add(cell: Cell, outcome: Outcome, seconds: float) -> None:
    """Note what one cell showed."""
    if cell.who == "client":
        shown = "all others end by themselves"
    else:
        error = outcome.event("error")
        shown = _first_line(error) if error else "shutdown goes on to its end"
    _results.append(Result(cell, shown, seconds))


def _first_line(error: dict[str, str]) -> str:
    line = error["text"].splitlines()[0] if error["text"] else ""
    return f"{error['type']}: {re.sub(r'pid [0-9]+', 'pid N', line)}"


def machine() -> str:
    from minivllm import __version__

    return (
        f"minivllm {__version__}, Python {platform.python_version()}, {sys.platform} {platform.machine()}, "
        f"{os.cpu_count()} cores"
    )


def write() -> None:
    """Write the page; an incomplete run (a cell that failed) leaves the page as it is."""
    from tests.crash import cells

    if {result.cell for result in _results} != set(cells.CELLS):
        return
    by_place = {(result.cell.span, result.cell.who): result for result in _results}
    slowest = max(_results, key=lambda result: result.seconds)
    lines = [
        "# Crash matrix",
        "",
        f"{len(_results)} runs of a TP=2 engine. In each, one process is killed with SIGKILL at the moment when it enters one step:",
        "for every lifecycle and rpc step that such a run has, and every process that has it. In every one of them the",
        "caller was told within a second, nothing was left in the process table or /dev/shm, and the merged trace shows the step as unfinished.",
        "",
        "Steps that are part of every engine step (`model.forward` and its like) die in the warm-up on rank 0, where they come first, and in",
        "the middle of decoding on rank 1.",
        "",
        "The number is the time from the death to the news: to the caller's error; to the end of the caller's shutdown when that was under",
        "way; or, when the client itself was killed, from its end to the end of the last of the others. A dash: the process does not",
        "have this step.",
        "",
        f"Made by `make test-crash` on: {machine()}. Slowest: {slowest.seconds:.2f} s ({slowest.cell.id}).",
        "",
        "| step | " + " | ".join(TITLES[who] for who in WHO) + " |",
        "|---|" + "---|" * len(WHO),
    ]
    for span in dict.fromkeys(cell.span for cell in cells.CELLS):
        row = [by_place.get((span, who)) for who in WHO]
        lines.append(f"| `{span}` | " + " | ".join(f"{r.seconds:.2f} s" if r else "–" for r in row) + " |")
    lines += ["", "## What the caller was told", "", "| killed in | error |", "|---|---|"]
    for result in _results:
        if result.cell.who != "client":
            text = result.shown.replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| `{result.cell.id}` | {text} |")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
