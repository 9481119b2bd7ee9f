"""Narrowing a view to a stretch of time or to rows that last long enough.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from collections.abc import Callable

from minivllm.timeline import text as words
from minivllm.timeline.run import Options
from minivllm.timeline.view import Row, View


def apply(view: View, options: Options) -> View:
    """Cut `view` as the reader asked, and say what is left out."""
    if not view.rows:
        return view
    if options.from_ns is not None or options.to_ns is not None:
        start = view.start_ns if options.from_ns is None else options.from_ns
        end = max(view.end_ns, start) if options.to_ns is None else options.to_ns
        before = _count(view.rows)
        view.rows = _keep(view.rows, lambda row: _touches(row, start, end))
        view.start_ns, view.end_ns = start, max(end, start + 1)
        if options.to_ns is None:
            where = f"before {words.instant(start, 3)}"
        elif options.from_ns is None:
            where = f"after {words.instant(end, 3)}"
        else:
            where = f"outside {words.instant(start, 3)} to {words.instant(end, 3)}"
        _say(view, before - _count(view.rows), where)
    if options.min_duration_ns:
        before = _count(view.rows)
        view.rows = _keep(view.rows, lambda row: _length(row) >= options.min_duration_ns)
        _say(view, before - _count(view.rows), f"shorter than {words.duration(options.min_duration_ns)}")
    return view


def _count(rows: list[Row]) -> int:
    return sum(not row.heading for row in rows)


def _say(view: View, dropped: int, why: str) -> None:
    if dropped:
        verb = "is" if dropped == 1 else "are"
        view.explanation.append(f"{words.count(dropped, 'row')} {why} {verb} left out")


def _touches(row: Row, start_ns: int, end_ns: int) -> bool:
    first, last = row.start_ns, row.end_ns
    return first is not None and last is not None and first < end_ns and last >= start_ns


def _length(row: Row) -> int:
    return max((s.end_ns - s.start_ns for s in row.segments), default=0)


def _keep(rows: list[Row], wanted: Callable[[Row], bool]) -> list[Row]:
    """Rows that are wanted, and those above them in the tree; a heading stays while it heads something."""
    kept: list[Row] = []
    needed = -1
    for row in reversed(rows):
        own = not row.heading and wanted(row)
        if own or 0 <= row.depth < needed:
            kept.append(row)
            needed = row.depth
        elif row.heading:
            needed = -1
    kept.reverse()
    return kept
