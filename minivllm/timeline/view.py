"""A timeline as data: rows of segments on one time axis, and the sentences that go with them.

vLLM 0.25.1: no counterpart
Articles: –

Views build it, renderers draw it; nothing here knows about terminals. Times are nanoseconds on the run's
own clock, which starts with the first span of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a stretch of time was spent on."""

    WORK = "work"
    WAIT = "wait"
    ERROR = "error"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Actor:
    """A process as the reader meets it: one colour, one legend entry.

    Attributes:
        name: `client`, `EngineCore`, `Worker_TP0` …
        slot: position in the palette; stays the same in every view of every run.
    """

    name: str
    slot: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one row: `[start_ns, end_ns)`. `label` says in a few words what it is."""

    start_ns: int
    end_ns: int
    kind: Kind = Kind.WORK
    label: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on a row: `symbol` is "ready", "start", "died" or "ended"."""

    at_ns: int
    symbol: str
    label: str


@dataclass(slots=True)
class Row:
    """One line of a view.

    Attributes:
        depth: indentation; a row belongs to the nearest row above with a smaller depth.
        note: what stands at the right edge; empty means the length of the segments.
        heading: the row introduces a process.
        span_id: hexadecimal id of the span behind the row, empty for derived rows.
    """

    label: str
    actor: Actor
    depth: int = 0
    segments: list[Segment] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    note: str = ""
    heading: bool = False
    span_id: str = ""

    @property
    def start_ns(self) -> int | None:
        return min(
            [s.start_ns for s in self.segments] + [m.at_ns for m in self.marks],
            default=None,
        )

    @property
    def end_ns(self) -> int | None:
        return max(
            [s.end_ns for s in self.segments] + [m.at_ns for m in self.marks],
            default=None,
        )


@dataclass(slots=True)
class View:
    """One picture.

    Attributes:
        start_ns, end_ns: what the axis covers.
        zero_ns: the point the axis calls 0; views of one step count from the step's own start.
        explanation: sentences that are true for this run, computed from its spans.
        missing: what the trace does not hold, and how to record it.
        waiting: what the legend says about segments of waiting.
        shorten: long stretches may be cut short in which no row has anything ("idle"), or in which nothing begins
            or ends ("steady"); "" keeps the axis linear.
    """

    name: str
    title: str
    start_ns: int = 0
    end_ns: int = 0
    zero_ns: int = 0
    rows: list[Row] = field(default_factory=list)
    explanation: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    waiting: str = "waiting"
    shorten: str = ""

    def fit(self) -> View:
        """Let the axis cover exactly what the rows show."""
        starts = [r.start_ns for r in self.rows if r.start_ns is not None]
        ends = [r.end_ns for r in self.rows if r.end_ns is not None]
        if starts:
            self.start_ns, self.end_ns = min(starts), max(ends)
        return self

    def actors(self) -> list[Actor]:
        """The processes of the rows, in the order of their first row."""
        return list({row.actor.name: row.actor for row in self.rows}.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in nanoseconds since the start of the run."""
        return {
            "name": self.name,
            "title": self.title,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "zero_ns": self.zero_ns,
            "rows": [
                {
                    "label": row.label,
                    "process": row.actor.name,
                    "pid": row.actor.pid,
                    "depth": row.depth,
                    "heading": row.heading,
                    "span_id": row.span_id,
                    "note": row.note,
                    "segments": [
                        {"start_ns": s.start_ns, "end_ns": s.end_ns, "kind": s.kind.value, "label": s.label}
                        for s in row.segments
                    ],
                    "marks": [{"at_ns": m.at_ns, "symbol": m.symbol, "label": m.label} for m in row.marks],
                }
                for row in self.rows
            ],
            "explanation": self.explanation,
            "missing": self.missing,
        }
