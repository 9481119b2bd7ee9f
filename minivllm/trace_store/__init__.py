"""Reading a recorded run: the files that its processes wrote, merged into one trace.

vLLM 0.25.1: none
Articles: none

    store = TraceStore.open("trace-directory")
    for span in store.spans(name="rpc.execute", rank=1): ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from minivllm.exceptions import ConfigError
from minivllm.timeline import text as words
from minivllm.trace_store.files import Directory
from minivllm.trace_store.merge import finish_open_spans, spans_of
from minivllm.trace_store.model import Event, Link, Process, Span
from minivllm.tracing.catalogue import MESSAGE, SPANS
from minivllm.tracing.spec import CLIENT, ENGINE_CORE, WORKER

__all__ = ["Event", "Link", "Process", "Span", "TraceStore"]


class TraceStore:
    """One trace. Spans are in order of their start.

    Attributes:
        trace_id: the trace that is shown, lower-case hex.
        trace_ids: all traces of the directory, the oldest first; more than one when it was used for several runs.
        damaged_lines: lines that could not be read, such as the torn last line of a killed process.
        damage: the same in words, a sentence for each file.
        chosen: this trace was asked for, so nothing is said of others.
    """

    def __init__(
        self,
        spans: list[Span],
        trace_id: str,
        trace_ids: list[str],
        damaged_lines: int = 0,
        damage: Sequence[str] = (),
        chosen: bool = False,
    ) -> None:
        self._spans = spans
        self.trace_id = trace_id
        self.trace_ids = trace_ids
        self.damaged_lines = damaged_lines
        self.damage = damage
        self.chosen = chosen

    @classmethod
    def open(
        cls, directory: str | Path, trace_id: str | None = None, number: int | None = None
    ) -> TraceStore:
        """Read a trace directory.

        Args:
            trace_id: which trace of several.
            number: the same by its place: 1 is the oldest. With neither it is the latest run.

        Raises:
            ConfigError: the directory does not exist, holds no trace, or not this one.
        """
        path = Path(directory)
        if not path.is_dir():
            raise ConfigError(
                f"{directory} is not a directory; record a run with `minivllm demo --trace DIR`"
            )
        content = Directory(path)
        spans = [span for record in content.records.values() for span in spans_of(record)]
        if not spans:
            if content.files:
                first = content.damage[0] if content.damage else f"{content.files[0]} is empty"
                rest = (
                    f", and nothing in {words.count(len(content.files) - 1, 'other file')}"
                    if len(content.files) > 1
                    else ""
                )
                raise ConfigError(f"{directory} holds no trace that can be read: {first}{rest}")
            raise ConfigError(f"{directory} holds no trace; record one with `minivllm demo --trace DIR`")
        spans.sort(key=lambda span: span.start_ns)
        trace_ids = list(dict.fromkeys(span.trace_id for span in spans))
        chosen = number is not None or trace_id is not None
        if number is not None:
            if not 0 < number <= len(trace_ids):
                raise ConfigError(
                    f"{directory} has no run {number}: it holds {words.count(len(trace_ids), 'run')}"
                )
            trace_id = trace_ids[number - 1]
        elif trace_id is None:
            trace_id = _latest(spans)
        elif trace_id not in trace_ids:
            raise ConfigError(f"{directory} holds no trace {trace_id}; it has {', '.join(trace_ids)}")
        if len(trace_ids) > 1:
            spans = [span for span in spans if span.trace_id == trace_id]
        finish_open_spans(spans)
        return cls(spans, trace_id, trace_ids, content.damaged_lines, content.damage, chosen)

    @property
    def number(self) -> int:
        """Which of the directory's runs this is, from 1, the oldest."""
        return self.trace_ids.index(self.trace_id) + 1

    # --- look-ups

    @cached_property
    def _by_id(self) -> dict[str, Span]:
        return {span.span_id: span for span in self._spans}

    @cached_property
    def _by_name(self) -> dict[str, list[Span]]:
        groups: dict[str, list[Span]] = defaultdict(list)
        for span in self._spans:
            groups[span.name].append(span)
        return groups

    @cached_property
    def _by_parent(self) -> dict[str, list[Span]]:
        groups: dict[str, list[Span]] = defaultdict(list)
        for span in self._spans:
            groups[span.parent_span_id].append(span)
        return groups

    @cached_property
    def _processes(self) -> list[Process]:
        seen = dict.fromkeys(span.process for span in self._spans)
        return sorted(seen, key=lambda process: process.start_ns)

    # --- queries

    def spans(
        self,
        name: str | None = None,
        *,
        rank: int | None = None,
        process: Process | str | None = None,
    ) -> list[Span]:
        """Spans in order of their start.

        Args:
            name: name in the catalogue.
            rank: of a worker's process, or of the worker that a span of the parent is about.
            process: a Process, or a role such as "engine_core".
        """
        found = self._spans if name is None else self._by_name.get(name, [])
        if rank is not None:
            found = [span for span in found if span.rank == rank]
        if isinstance(process, str):
            return [span for span in found if span.process.role == process]
        if process is not None:
            return [span for span in found if span.process is process]
        return list(found)

    def span(self, span_id: str) -> Span:
        """Raises KeyError: no such span."""
        return self._by_id[span_id]

    def parent(self, span: Span) -> Span | None:
        return self._by_id.get(span.parent_span_id)

    def children(self, span: Span) -> list[Span]:
        """Direct children, in any process, in order of their start."""
        return list(self._by_parent.get(span.span_id, ()))

    @property
    def root(self) -> Span | None:
        """The span `run`, else the earliest span without a parent in this trace."""
        runs = self._by_name.get("run")
        if runs:
            return runs[0]
        return next((span for span in self._spans if span.parent_span_id not in self._by_id), None)

    def tree(self, span: Span | None = None) -> Iterator[tuple[int, Span]]:
        """Walk from a span (default: all spans without a parent here) downwards; yields depth and span."""
        if span is not None:
            starts = [span]
        else:
            starts = [item for item in self._spans if item.parent_span_id not in self._by_id]
        stack = [(0, item) for item in reversed(starts)]
        while stack:
            depth, item = stack.pop()
            yield depth, item
            stack.extend((depth + 1, child) for child in reversed(self._by_parent.get(item.span_id, ())))

    def orphans(self) -> list[Span]:
        """Spans whose parent is not in the trace. A `run` within a caller's own trace is none."""
        return [
            span
            for span in self._spans
            if span.parent_span_id and span.parent_span_id not in self._by_id and span.name != "run"
        ]

    def processes(self) -> list[Process]:
        """In order of their start."""
        return list(self._processes)

    @cached_property
    def warnings(self) -> list[str]:
        """What is missing, as far as it can be told, or not shown: what is shown may be wrong because of that."""
        told = {span.rank for span in self.spans("executor.make_worker_process")}
        silent = told - {process.rank for process in self._processes} - {None}
        numbers = sorted(rank for rank in silent if rank is not None)
        return [
            *(f"no events of {who}" for who in self._silent_parents()),
            *(f"no events of rank {rank}" for rank in numbers),
            *self.damage,
            *(
                [f"this is run {self.number} of the {len(self.trace_ids)} that the directory holds"]
                if len(self.trace_ids) > 1 and not self.chosen  # whoever has chosen it knows of the others
                else []
            ),
        ]

    def _silent_parents(self) -> list[str]:
        """Processes of which others of the trace speak as their parents, and which say nothing themselves."""
        roles = {process.role for process in self._processes}
        silent = []
        if CLIENT not in roles and ENGINE_CORE in roles and self._has_orphan(ENGINE_CORE):
            silent.append("the client")
        if ENGINE_CORE not in roles and self._by_name.get("engine_core.spawn"):
            silent.append("EngineCore")
        if roles == {WORKER} and self._has_orphan(WORKER):
            silent.append("the process that started the workers")
        return silent

    def _has_orphan(self, role: str) -> bool:
        return any(
            span.process.role == role and span.parent_span_id and span.parent_span_id not in self._by_id
            for span in self._spans
        )

    def first_failure(self) -> Span | None:
        """The innermost step in which something went wrong first, whatever failed later because of it.

        A process that was killed in a step failed at its last sign of life, which its parent sees only later. Errors
        of message steps count by the step around them: a time-out of a dequeue is how a reader polls.
        """

        def moment(span: Span) -> tuple[int, int]:
            return (span.process.end_ns if span.unfinished else span.end_ns), -span.start_ns

        def counts(span: Span) -> bool:
            entry = SPANS.get(span.name)
            return span.is_error and (entry is None or entry.level < MESSAGE or span.unfinished)

        return min(filter(counts, self._spans), key=moment, default=None)

    # --- other formats

    def encode_otlp(self) -> bytes:
        """The whole trace as one OTLP/JSON object, a resource for each process."""
        groups: dict[Process, list[Span]] = defaultdict(list)
        for span in self._spans:
            groups[span.process].append(span)
        return msgspec.json.encode(
            {
                "resourceSpans": [
                    {
                        "resource": msgspec.Raw(_encode_resource(process)),
                        "scopeSpans": [
                            {"scope": _scope(process), "spans": [span.raw for span in groups[process]]}
                        ],
                    }
                    for process in self._processes
                ]
            }
        )

    def to_otlp(self) -> dict[str, Any]:
        """The whole trace in the form of an OTLP ExportTraceServiceRequest, ids in hex."""
        request: dict[str, Any] = msgspec.json.decode(self.encode_otlp())
        return request

    def write_otlp_json(self, file: str | Path) -> None:
        """Write one OTLP/JSON file that Jaeger's upload and any collector's file receiver take."""
        Path(file).write_bytes(self.encode_otlp() + b"\n")


def _scope(process: Process) -> dict[str, str]:
    """Who wrote the spans: minivllm in the version that recorded them, where it has said which."""
    version = process.resource.get("service.version")
    return {"name": "minivllm", "version": str(version)} if version else {"name": "minivllm"}


def _encode_resource(process: Process) -> bytes:
    from minivllm.tracing import encode

    return encode.resource(process.resource).encode()


def _latest(spans: list[Span]) -> str:
    """The trace of the run that started last; without any `run`, the trace with most spans."""
    runs = [span for span in spans if span.name == "run"]
    if runs:
        return runs[-1].trace_id
    counts: dict[str, int] = defaultdict(int)
    for span in spans:
        counts[span.trace_id] += 1
    return max(counts, key=lambda trace_id: counts[trace_id])
