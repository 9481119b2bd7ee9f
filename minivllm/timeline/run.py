"""One recorded run as the views need it: its own clock, its processes, spans by name, segments of a span.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm.timeline import theme
from minivllm.timeline.view import Actor, Kind, Mark, Row, Segment

if TYPE_CHECKING:
    from minivllm.trace_store import Process, Span, TraceStore

# Spans in which a process does nothing but wait for another one.
WAITING = frozenset(
    {
        "engine_core.ready",
        "executor.wait_for_ready",
        "rpc.await_responses",
        "future.result",
        "executor.terminate_graceful",
    }
)


@dataclass(frozen=True, slots=True)
class Options:
    """What a reader asked to see.

    Attributes:
        focus: a step or call number, or a (part of a) hexadecimal span id.
        ranks: only these workers (None: all).
        from_ns, to_ns: only this stretch of the run's clock.
        min_duration_ns: leave out rows shorter than this.
    """

    focus: str | None = None
    ranks: frozenset[int] | None = None
    from_ns: int | None = None
    to_ns: int | None = None
    min_duration_ns: int = 0


@dataclass(slots=True)
class Run:
    """A trace store with the look-ups that several views share."""

    store: TraceStore
    options: Options = field(default_factory=Options)
    zero_ns: int = 0
    _actors: dict[Process, Actor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        root = self.store.root
        self.zero_ns = root.start_ns if root else min((s.start_ns for s in self.store.spans()), default=0)

    # --- processes

    def actor(self, process: Process) -> Actor:
        actor = self._actors.get(process)
        if actor is None:
            if process.role == "client":
                actor = Actor("client", theme.CLIENT_SLOT, process.pid)
            elif process.role == "engine_core":
                actor = Actor("EngineCore", theme.ENGINE_CORE_SLOT, process.pid)
            else:
                rank = process.rank or 0
                actor = Actor(_worker_name(process), theme.FIRST_WORKER_SLOT + rank, process.pid)
            self._actors[process] = actor
        return actor

    @property
    def workers(self) -> list[Process]:
        """The worker processes to show, by rank."""
        wanted = self.options.ranks
        found = [p for p in self.store.processes() if p.role == "worker"]
        found.sort(key=lambda p: p.rank or 0)
        return [p for p in found if wanted is None or p.rank in wanted]

    def process(self, role: str) -> Process | None:
        return next((p for p in self.store.processes() if p.role == role), None)

    @property
    def level(self) -> str:
        """The trace level of the run: what its root says, else the highest level of which it has a span."""
        from minivllm.tracing.catalogue import SPANS
        from minivllm.tracing.spec import LEVEL_NAMES

        root = self.store.root
        said = root.get("trace_level") if root else None
        if said:
            return str(said)
        return LEVEL_NAMES[
            max((spec.level for spec in SPANS.values() if self.store.spans(spec.name)), default=0)
        ]

    # --- spans

    def at(self, absolute_ns: int) -> int:
        """A time stamp on the run's clock."""
        return absolute_ns - self.zero_ns

    def all(self, name: str, process: Process | None = None) -> list[Span]:
        """Spans of one name by start, of one process if given."""
        return self.store.spans(name, process=process)

    def first(self, name: str, process: Process | None = None) -> Span | None:
        return next(iter(self.all(name, process)), None)

    def below(self, span: Span) -> Iterator[Span]:
        """All descendants of a span, in any process."""
        return (item for depth, item in self.store.tree(span) if depth)

    def missing(self, level: str, what: str) -> str:
        """The sentence for spans that are not there.

        Args:
            level: the lowest trace level that has them.
        """
        from minivllm.tracing.spec import LEVEL_NAMES

        if LEVEL_NAMES.index(self.level) < LEVEL_NAMES.index(level):
            return f"recorded at level {self.level}: no {what}; record with --trace-level {level}"
        if self.store.damaged_lines or self.store.orphans():
            return f"no {what}: level {self.level} has them, but a part of this trace is missing or cut off"
        return f"no {what}: level {self.level} has them, so either there were none or this trace is cut off"

    # --- rows

    def heading(self, process: Process, note: str | None = None) -> Row:
        actor = self.actor(process)
        return Row(actor.name, actor, heading=True, note=f"pid {actor.pid}" if note is None else note)

    def row(
        self,
        spans: Span | Sequence[Span],
        depth: int = 1,
        label: str | None = None,
        wait_until_ns: int | None = None,
    ) -> Row:
        """A row of one span, or of several of the same name.

        Args:
            wait_until_ns: the (absolute) moment up to which the span only waited for other processes.
        """
        many = [spans] if not isinstance(spans, Sequence) else list(spans)
        first = many[0]
        name = label or first.name
        if len(many) > 1 and label is None:
            name += f" ×{len(many)}"
        row = Row(name, self.actor(first.process), depth, span_id=first.span_id)
        for span in many:
            row.segments += self.segments(span, wait_until_ns)
        return row

    def segments(self, span: Span, wait_until_ns: int | None = None) -> list[Segment]:
        kind = kind_of(span)
        start, end = self.at(span.start_ns), self.at(span.end_ns)
        if kind is Kind.WORK and wait_until_ns is not None:
            turn = max(start, min(self.at(wait_until_ns), end))
            parts = [Segment(start, turn, Kind.WAIT), Segment(turn, end)]
            return [p for p in parts if p.end_ns > p.start_ns] or [Segment(start, end)]
        return [Segment(start, end, kind)]

    def mark(self, absolute_ns: int, symbol: str, label: str) -> Mark:
        return Mark(self.at(absolute_ns), symbol, label)

    def tree(
        self, span: Span, depth: int, waits: dict[str, int], process: Process | None = None
    ) -> list[Row]:
        """A span and what is below it, as rows; siblings of one name without children share a row.

        Args:
            waits: span id -> absolute time up to which that span only waited.
            process: leave out children that ran in another process than this one.
        """
        rows = [self.row(span, depth, step_label(span), waits.get(span.span_id))]
        if kind_of(span) is not Kind.WORK:
            rows[0].note = rows[0].note or failure_note(span)
        children = self.store.children(span)
        if process is not None:
            children = [c for c in children if c.process is process]
        leaves: dict[str, Row] = {}
        counts: dict[str, int] = {}
        for child in children:
            if child.name in leaves:
                shared = leaves[child.name]
                shared.segments += self.segments(child, waits.get(child.span_id))
                counts[child.name] += 1
                shared.label = f"{step_label(child)} ×{counts[child.name]}"
                shared.note = sum_note(shared)
                continue
            below = self.tree(child, depth + 1, waits, process)
            if len(below) == 1 and not below[0].note:
                leaves[child.name], counts[child.name] = below[0], 1
            rows += below
        return rows


def step_label(span: Span) -> str:
    """The name of a span, for calls and futures with the method they are about."""
    if span.name in ("rpc.call", "rpc.execute", "future.result"):
        method = span.attributes.get("rpc.method") or span.get("method")
        return f"{span.name} {method}" if method else span.name
    return span.name


def sum_note(row: Row) -> str:
    """The time that a row of several spans took in all."""
    from minivllm.timeline.text import duration

    return duration(sum(s.end_ns - s.start_ns for s in row.segments))


def kind_of(span: Span) -> Kind:
    if span.unfinished:
        return Kind.UNFINISHED
    if found_nothing(span):
        return Kind.WAIT
    if span.is_error:
        return Kind.ERROR
    return Kind.WAIT if span.name in WAITING else Kind.WORK


def found_nothing(span: Span) -> bool:
    """A look into a queue that ended without a message, by its deadline or because the queue was closed.

    Whoever asked decides whether that is a failure, and its own span says so.
    """
    if span.name != "mq.dequeue":
        return False
    # Recordings of earlier versions have an error instead.
    ended_by = span.get("ended_by") or (span.attributes.get("error.type") if span.is_error else "")
    return str(ended_by).rpartition(".")[2] in ("TimeoutError", "MessageQueueClosed")


def failure_note(span: Span) -> str:
    if span.unfinished:
        return "never finished"
    return "error" if span.is_error else ""


def last_arrival(spans: Iterable[Span]) -> int:
    """When the last of several spans that meet each other began (absolute)."""
    return max(s.start_ns for s in spans)


def _worker_name(process: Process) -> str:
    label = process.service.rpartition(".worker.")[2]
    if label == process.service or label.startswith("rank"):
        return f"Worker rank {process.rank}"
    return "Worker_" + label.upper().replace(".", "_")
