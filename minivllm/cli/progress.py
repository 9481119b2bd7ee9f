"""What each process is doing while the engine starts, live on stderr.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.4.4

A traced run needs no extra channel for it: every process maps a table of its open spans into the trace
directory, and reading those tables disturbs nobody. Without a trace there is EngineCore's own report.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.cli import common

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_REFRESH_PER_SECOND = 12


@contextmanager
def starting(trace_dir: Path | None, what: str) -> Iterator[Callable[[str], None]]:
    """Show start-up until the block ends; yields the engine's `on_progress` callback.

    Into a pipe it is one line when it begins and one when it has succeeded.
    """
    begun = time.monotonic()
    if not sys.stderr.isatty():
        print(f"starting {what} …" if _unicode() else f"starting {what} ...", file=sys.stderr, flush=True)
        yield lambda line: None
        print(f"ready after {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
        return
    from rich.live import Live

    display = _Display(trace_dir, what, begun)
    console = common.console(stderr=True)
    with Live(
        console=console,
        transient=True,
        refresh_per_second=_REFRESH_PER_SECOND,
        get_renderable=display.render,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield display.report
    console.print(f"ready after {time.monotonic() - begun:.1f} s", style="dim")


def _unicode() -> bool:
    from minivllm.timeline import theme

    return theme.glyphs_for(sys.stderr.encoding) is theme.UNICODE


class _Display:
    def __init__(self, trace_dir: Path | None, what: str, begun: float) -> None:
        self.tables = OpenSteps(trace_dir) if trace_dir is not None else None
        self.what, self.begun = what, begun
        self.reports: dict[str, str] = {}

    def report(self, line: str) -> None:
        """The engine's own report, `who: step`; the last one of each counts."""
        who, _, step = line.partition(": ")
        self.reports[who] = step

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from minivllm.timeline import theme

        glyphs = theme.glyphs_for(sys.stderr.encoding)
        lines = [Text(glyphs.spell(f"starting {self.what} … {time.monotonic() - self.begun:.1f} s"))]
        for name, slot, step in self.tables.now() if self.tables else []:
            lines.append(_line(name, theme.color(slot), step))
        if len(lines) == 1:
            lines += [_line(who, theme.color(_slot(who)), step) for who, step in self.reports.items()]
        return Group(*lines)


def _slot(who: str) -> int:
    from minivllm.timeline import theme

    rank = who.rpartition(" ")[2]
    return theme.FIRST_WORKER_SLOT + int(rank) if rank.isdigit() else theme.ENGINE_CORE_SLOT


def _line(name: str, color: str, step: str) -> Text:
    from rich.text import Text

    return Text.assemble("  ", (f"{name:<15}", f"bold {color}"), step, no_wrap=True, overflow="ellipsis")


class OpenSteps:
    """The innermost open step of each process of a run that is being recorded into a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._who: dict[str, tuple[str, int]] = {}

    def now(self) -> list[tuple[str, int, str]]:
        """(name, colour slot, step) of EngineCore and of each worker, by rank."""
        found = []
        for path in self.directory.glob("*.open"):
            who = self._identify(path)
            if who is not None and (step := _innermost(path)):
                found.append((who[0], who[1], step))
        return sorted(found, key=lambda entry: entry[1])

    def _identify(self, path: Path) -> tuple[str, int] | None:
        from minivllm.timeline import theme

        stem = path.name.removesuffix(".open")
        if stem in self._who:
            return self._who[stem]
        if stem.startswith("engine_core-"):
            self._who[stem] = ("EngineCore", theme.ENGINE_CORE_SLOT)
        elif stem.startswith("worker-"):
            rank = _rank(self.directory / f"{stem}.journal.jsonl")
            if rank is None:
                return None
            self._who[stem] = (f"worker rank {rank}", theme.FIRST_WORKER_SLOT + rank)
        return self._who.get(stem)


def _rank(journal: Path) -> int | None:
    """The rank that a worker's resource names; None before the worker has written it."""
    try:
        with open(journal, encoding="utf-8") as file:
            resource = json.loads(file.readline())["resource"]
        return next(
            int(a["value"]["intValue"]) for a in resource["attributes"] if a["key"] == "minivllm.rank"
        )
    except (OSError, ValueError, KeyError, StopIteration):
        return None


def _innermost(path: Path) -> str:
    """Name of the open lifecycle span that began last."""
    from minivllm.tracing.catalogue import BY_INDEX
    from minivllm.tracing.open_table import HEADER, MAGIC, SLOT, SLOT_BYTES
    from minivllm.tracing.spec import LIFECYCLE

    try:
        data = path.read_bytes()
    except OSError:
        return ""
    if len(data) < HEADER.size or HEADER.unpack_from(data)[0] != MAGIC:
        return ""
    latest, name = -1, ""
    # Slots are handed out from the start of the table, so that the first free run of them ends the search.
    free_run = 0
    for offset in range(SLOT_BYTES, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        index, _, _, _, _, start, end, _ = SLOT.unpack_from(data, offset)
        free_run = 0 if index else free_run + 1
        if free_run > 64:
            break
        if not 0 < index <= len(BY_INDEX) or end or start <= latest:
            continue
        # Messages and collectives come and go too fast to be read.
        if BY_INDEX[index - 1].level == LIFECYCLE:
            latest, name = start, BY_INDEX[index - 1].name
    return name
