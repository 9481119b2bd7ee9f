"""The events of a recorded run in the order in which they happened, and ways to find one of them.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from minivllm.exceptions import ConfigError
from minivllm.timeline.messages import written_ns
from minivllm.timeline.run import Run, found_nothing, step_label
from minivllm.trace_store import Event, Process, Span, TraceStore
from minivllm.tracing.catalogue import MESSAGE, SPANS


class Kind(enum.IntEnum):
    """What happens in one step. The numbers order what has the same time stamp: a step ends before another begins."""

    END = 0
    BEGIN = 1
    NOTE = 2
    WRITTEN = 3
    # A span without duration ends after it has begun.
    END_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One event of the run.

    Attributes:
        index: its number in the walk, from 0.
        kind: a span begins or ends, notes something, or an enqueue sets the written flag of its slot.
        note: what is noted, with Kind.NOTE.
    """

    index: int
    time_ns: int
    kind: Kind
    span: Span
    note: Event | None = None

    @property
    def ends(self) -> bool:
        return self.kind in (Kind.END, Kind.END_AT_ONCE)

    @property
    def failed(self) -> bool:
        """Something goes wrong in this step, or a failpoint breaks it."""
        if self.note is not None:
            return self.note.name == "failpoint"
        return self.ends and has_failed(self.span)


def has_failed(span: Span) -> bool:
    """Whether a span is an error that somebody should look at; a poll of a queue that found nothing is none."""
    return span.is_error and not found_nothing(span)


class Walk:
    """All steps of a run.

    Attributes:
        run: the run with its clock and the names of its processes.
        details: steps of spans above this level of the catalogue are passed over when looking for another step.
    """

    def __init__(self, store: TraceStore) -> None:
        self.store = store
        self.run = Run(store)
        self.details = MESSAGE
        moments: list[tuple[int, int, int, int]] = []
        what: list[tuple[Kind, Span, Event | None]] = []

        def add(time_ns: int, kind: Kind, tie: int, span: Span, note: Event | None = None) -> None:
            moments.append((time_ns, kind, tie, len(what)))
            what.append((kind, span, note))

        for span in store.spans():
            # Of spans that begin together the longer one is the outer one; of those that end together it ends last.
            add(span.start_ns, Kind.BEGIN, -span.end_ns, span)
            if bytes(span.raw.events) != b"[]":
                for note in span.events:
                    if note.name != "exception":  # the end of the span says the same
                        add(note.time_ns, Kind.NOTE, 0, span, note)
            if span.name == "mq.enqueue" and span.get("slot", -1) >= 0:
                add(written_ns(span), Kind.WRITTEN, 0, span)
            if not (span.process.alive and span.get("open")):
                kind = Kind.END if span.end_ns > span.start_ns else Kind.END_AT_ONCE
                add(span.end_ns, kind, -span.start_ns, span)
        moments.sort()
        self._times = [moment[0] for moment in moments]
        self._what = [what[moment[3]] for moment in moments]
        if not self._what:
            raise ConfigError("the trace has no steps")

    def __len__(self) -> int:
        return len(self._what)

    def __getitem__(self, index: int) -> Step:
        kind, span, note = self._what[index]
        return Step(index, self._times[index], kind, span, note)

    def is_shown(self, step: Step) -> bool:
        spec = SPANS.get(step.span.name)
        return spec is None or spec.level <= self.details

    # --- finding a step; each answers None when there is no such step

    def find(
        self, start: int, wanted: Callable[[Step], bool], forward: bool = True, hidden: bool = False
    ) -> int | None:
        """The nearest step after (before) `start` that is wanted and shown; hidden: or not shown."""
        indices = range(start + 1, len(self)) if forward else range(start - 1, -1, -1)
        for index in indices:
            step = self[index]
            if (hidden or self.is_shown(step)) and wanted(step):
                return index
        return None

    def next_of(self, process: Process, start: int, forward: bool = True) -> int | None:
        return self.find(start, lambda step: step.span.process is process, forward)

    def next_failure(self, start: int, forward: bool = True) -> int | None:
        """Shown or not: what went wrong is what everybody looks for."""
        return self.find(start, lambda step: step.failed, forward, hidden=True)

    def search(
        self, text: str, start: int, forward: bool = True, also: Callable[[Step], str] | None = None
    ) -> int | None:
        """The next step whose name, process, attributes, note or error contains the text; case does not matter.

        Args:
            also: more words about a step, looked at where the others do not contain the text.
        """
        wanted = text.lower()

        def matches(step: Step) -> bool:
            return wanted in self._words(step) or (also is not None and wanted in also(step).lower())

        return self.find(start, matches, forward)

    def other_end(self, index: int) -> int | None:
        """From the beginning of a span (or anything between) to its end, and from its end to its beginning."""
        step = self[index]
        forward = not step.ends
        return self.find(
            index,
            lambda other: other.span is step.span and (other.ends if forward else other.kind is Kind.BEGIN),
            forward,
            hidden=True,
        )

    def parent(self, index: int) -> int | None:
        """The beginning of the span around this one, maybe in another process."""
        around = self.store.parent(self[index].span)
        if around is None:
            return None
        return self.find(
            min(self.at(around.start_ns) - 1, index),
            lambda step: step.span is around and step.kind is Kind.BEGIN,
            hidden=True,
        )

    def at(self, time_ns: int) -> int:
        """The first step at or after an absolute time; the last step for times after it."""
        return min(bisect_left(self._times, time_ns), len(self) - 1)

    @cached_property
    def first_failure(self) -> int | None:
        return self.next_failure(-1)

    def _words(self, step: Step) -> str:
        span = step.span
        parts = [
            step_label(span),
            span.process.label,
            self.run.actor(span.process).name,
            span.status_message,
            *(f"{key}={value}" for key, value in span.attributes.items()),
        ]
        if step.note is not None:
            parts += [step.note.name, *(f"{key}={value}" for key, value in step.note.attributes.items())]
        return "\n".join(parts).lower()
