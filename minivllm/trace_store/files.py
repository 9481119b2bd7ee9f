"""Reading the files of a trace directory, whatever state a killed process left them in.

vLLM 0.25.1: none
Articles: none
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from minivllm.trace_store.model import Process, RawSpan, decode_attributes
from minivllm.tracing.open_table import TableEntry, read_table
from minivllm.tracing.spool_reader import Found, read_process


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


class _Files(NamedTuple):
    """What the files of one process said.

    Attributes:
        compact: of the spool and the span log; None: there is no spool.
        lines: of the OTLP/JSON file.
    """

    stem: str
    compact: Found | None
    lines: list[bytes]
    table: list[TableEntry]
    journal: list[bytes]

    @classmethod
    def read(cls, path: Path, stem: str) -> _Files:
        spool = path / f"{stem}.spool"
        # In this order: a spool that is gone by now has gone into the file beside it.
        return cls(
            stem,
            read_process(spool, path / f"{stem}.spans") if spool.exists() else None,
            _lines(path / f"{stem}.jsonl"),
            read_table(path / f"{stem}.open"),
            _lines(path / f"{stem}.journal.jsonl"),
        )


def _stem(file: Path) -> str:
    return file.name.removesuffix(".jsonl").removesuffix(".journal")


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines()
    except OSError:
        return []


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
        files = sorted(path.glob("*.jsonl"))
        spools = sorted(path.glob("*.spool"))
        self.files = [file.name for file in (*files, *spools)]
        stems = sorted({*(_stem(file) for file in files), *(file.stem for file in spools)})
        alive = {stem: _is_locked(path / f"{stem}.journal.jsonl") for stem in stems}
        # Of a run that goes on what began later is read first, so that no span is there without its parent: workers before
        # EngineCore before the client, and of each the log, which has the innermost spans, before the journal.
        for found in [_Files.read(path, stem) for stem in reversed(stems)][::-1]:
            record = self._read_journal(found)
            if record is not None:
                # The files belong to the last process of this role and pid.
                record.process.alive = alive[found.stem]
                record.table = found.table
                if found.compact is not None:
                    record.table += found.compact.incomplete
            if found.compact is not None:
                self._note_damage(found.stem + ".spool", found.compact.torn, "record")
                self._read_spans("", found.compact.lines)
            # What a full disk or a kill has kept from being written here is still in the spool.
            self._read_spans("" if found.compact is not None else found.stem + ".jsonl", found.lines)

    def _note_damage(self, name: str, count: int, noun: str = "line", is_cut_off: bool = False) -> None:
        self.damaged_lines += count
        if is_cut_off:
            count -= 1
            self.damage.append(f"{name} is cut off")
        if count:
            self.damage.append(f"{count:,} {noun}{'s' if count > 1 else ''} unreadable in {name}")

    def _read_spans(self, name: str, lines: list[bytes]) -> None:
        """name: of the file, for what is said of damage; "": nothing is."""
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
        if name:
            self._note_damage(name, len(damaged), is_cut_off=_is_cut_off(lines, damaged))

    def _read_journal(self, found: _Files) -> ProcessRecord | None:
        record: ProcessRecord | None = None
        damaged = []
        for line in found.journal:
            try:
                entry = _journal_decoder.decode(line)
            except msgspec.MsgspecError:
                damaged.append(line)
                continue
            if entry.resource is not None:
                record = self._record(entry.resource)
            if entry.span is not None and record is not None:
                record.started[entry.span.spanId] = entry.span
        name = found.stem + ".journal.jsonl"
        self._note_damage(name, len(damaged), is_cut_off=_is_cut_off(found.journal, damaged))
        return record

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
