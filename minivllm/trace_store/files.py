"""Reading the files of a trace directory, whatever state a killed process left them in.

vLLM 0.25.1: none
Articles: none
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from minivllm.trace_store.model import Process, RawSpan, decode_attributes
from minivllm.tracing.open_table import TableEntry, read_table
from minivllm.tracing.spool_reader import read_process


class _Resource(msgspec.Struct):
    attributes: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))


class _ScopeSpans(msgspec.Struct):
    spans: list[RawSpan] = msgspec.field(default_factory=list)


class _ResourceSpans(msgspec.Struct):
    resource: _Resource = msgspec.field(default_factory=_Resource)
    scopeSpans: list[_ScopeSpans] = msgspec.field(default_factory=list)


class _Line(msgspec.Struct):
    resourceSpans: list[_ResourceSpans]


class _JournalLine(msgspec.Struct):
    resource: _Resource | None = None
    span: RawSpan | None = None


_BEGINNINGS = (b'{"resourceSpans":', b'{"resource":', b'{"span":')
_line_decoder = msgspec.json.Decoder(_Line)
_journal_decoder = msgspec.json.Decoder(_JournalLine)


@dataclass(slots=True)
class ProcessRecord:
    """Everything that was found of one process."""

    process: Process
    finished: dict[str, RawSpan] = field(default_factory=dict)
    started: dict[str, RawSpan] = field(default_factory=dict)
    table: list[TableEntry] = field(default_factory=list)


class Directory:
    """All processes of a trace directory.

    Attributes:
        records: by `service.instance.id`, or by role and pid where a file has none.
        damaged_lines: lines that could not be read, such as the torn last line of a killed process.
        damage: the same in words, a sentence for each file.
        files: the names of all files that may hold spans.
    """

    def __init__(self, path: Path) -> None:
        self.records: dict[str, ProcessRecord] = {}
        self.damaged_lines = 0
        self.damage: list[str] = []
        self._known_resources: dict[bytes, ProcessRecord] = {}
        self._by_stem: dict[str, ProcessRecord] = {}
        files = sorted(path.glob("*.jsonl"))
        spools = sorted(path.glob("*.spool"))
        self.files = [file.name for file in (*files, *spools)]
        for file in files:
            if file.name.endswith(".journal.jsonl"):
                self._read_journal(file)
        # Spools before what is made of them: one that is gone by now has gone into the file beside it.
        for file in spools:
            found = read_process(file, file.with_suffix(".spans"))
            self._note_damage(file, found.torn, "record")
            self._read_spans(file, found.lines)
            if (record := self._by_stem.get(file.stem)) is not None:
                record.table += found.incomplete
        for file in files:
            if not file.name.endswith(".journal.jsonl"):
                self._read_spans(file, self._lines(file))

    def _lines(self, file: Path) -> list[bytes]:
        try:
            return file.read_bytes().splitlines()
        except OSError:
            return []

    def _note_damage(self, file: Path, count: int, noun: str = "line", is_cut_off: bool = False) -> None:
        self.damaged_lines += count
        if is_cut_off:
            count -= 1
            self.damage.append(f"{file.name} is cut off")
        if count:
            self.damage.append(f"{count:,} {noun}{'s' if count > 1 else ''} unreadable in {file.name}")

    def _read_spans(self, file: Path, lines: list[bytes]) -> None:
        damaged: list[bytes] = []
        for line in lines:
            try:
                request = _line_decoder.decode(line)
            except msgspec.MsgspecError:
                damaged.append(line)
                continue
            for group in request.resourceSpans:
                record = self._record(group.resource)
                for scope in group.scopeSpans:
                    record.finished.update((span.spanId, span) for span in scope.spans)
        self._note_damage(file, len(damaged), is_cut_off=_is_cut_off(lines, damaged))

    def _read_journal(self, file: Path) -> None:
        record: ProcessRecord | None = None
        lines, damaged = self._lines(file), []
        for line in lines:
            try:
                entry = _journal_decoder.decode(line)
            except msgspec.MsgspecError:
                damaged.append(line)
                continue
            if entry.resource is not None:
                record = self._record(entry.resource)
            if entry.span is not None and record is not None:
                record.started[entry.span.spanId] = entry.span
        self._note_damage(file, len(damaged), is_cut_off=_is_cut_off(lines, damaged))
        if record is not None:
            # The files belong to the last process of this role and pid.
            record.process.alive = _is_locked(file)
            stem = file.name.removesuffix(".journal.jsonl")
            record.table = read_table(file.with_name(f"{stem}.open"))
            self._by_stem[stem] = record

    def _record(self, resource: _Resource) -> ProcessRecord:
        raw = bytes(resource.attributes)
        record = self._known_resources.get(raw)
        if record is None:
            attributes = decode_attributes(raw)
            process = _process(attributes)
            record = self.records.setdefault(process.instance_id, ProcessRecord(process))
            # A worker gets its label when the groups exist: the last resource is the one that knows most.
            record.process.service = process.service
            record.process.resource = attributes
            self._known_resources[raw] = record
        return record


def _process(resource: dict[str, Any]) -> Process:
    service = str(resource.get("service.name", "unknown"))
    role, pid = str(resource.get("minivllm.role", "process")), int(resource.get("process.pid", 0))
    return Process(
        role=role,
        rank=resource.get("minivllm.rank"),
        pid=pid,
        parent_pid=int(resource.get("process.parent_pid", 0)),
        service=service,
        instance_id=str(resource.get("service.instance.id", f"{role}-{pid}")),
    )


def _is_cut_off(lines: list[bytes], damaged: list[bytes]) -> bool:
    """Whether the last line begins as ours do and does not end."""
    return bool(damaged) and damaged[-1] is lines[-1] and lines[-1].startswith(_BEGINNINGS)


def _is_locked(file: Path) -> bool:
    """Whether the process that writes this journal still lives: it holds a lock on it."""
    try:
        with open(file, "rb") as journal:
            fcntl.flock(journal, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
