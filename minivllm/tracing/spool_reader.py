"""OTLP/JSON of what a process has recorded, made of its spool and its span log.

vLLM 0.25.1: none
Articles: none
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import NamedTuple
from zlib import adler32

import msgspec

from minivllm.tracing import encode
from minivllm.tracing.catalogue import BY_INDEX
from minivllm.tracing.mapped import whole_units
from minivllm.tracing.open_table import TableEntry
from minivllm.tracing.span_log import LoggedSpan, LogReader
from minivllm.tracing.spool import FRAME, Detail, Lot, Place, Resource, Text, decode

SPANS_PER_LINE = 128
_NOWHERE = '{"key":"code.function.name","value":{"stringValue":"?"}}'
_NOTHING = Detail(0)
_UNKNOWN = Resource('{"attributes":[]}', 0, 0)


class SpoolReader:
    """Reads a spool, whole or as it grows.

    Attributes:
        position: where the next record is, in bytes from the start of the file.
        damaged: records that a kill has torn.
        until_ns: what had ended by then has all its details in what was read.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.damaged = 0
        self.until_ns = 0
        self._resource = _UNKNOWN
        self._resources: dict[int, Resource] = {}
        self._places: dict[int, str] = {}
        self._details: dict[int, Detail] = {}

    def lines(self, data: bytes | mmap, logged: list[LoggedSpan]) -> Iterator[bytes]:
        """Lines of OTLP/JSON from `position` to the end of what is there, and of spans of the log.

        Args:
            data: the whole file, read after the log.
            logged: spans that have ended.
        """
        spans: list[str] = []
        for body in self._bodies(data):
            try:
                record = decode(body)
            except msgspec.MsgspecError:
                self.damaged += 1
                continue
            if isinstance(record, Lot):
                self.until_ns = max(self.until_ns, record.until_ns)
                self._details.update((detail.span_id, detail) for detail in record.details)
            elif isinstance(record, Text):
                spans.append(record.text)
            elif isinstance(record, Place):
                self._places[record.index] = record.text
            else:
                if spans:
                    yield encode.line(self._resource.text, spans)
                    spans = []
                self._resource = self._resources[record.number] = record
            if len(spans) >= SPANS_PER_LINE:
                yield encode.line(self._resource.text, spans)
                spans = []
        if spans:
            yield encode.line(self._resource.text, spans)
        yield from self.logged_lines(logged)

    def logged_lines(self, logged: list[LoggedSpan]) -> Iterator[bytes]:
        """Lines of OTLP/JSON of spans of the log that have ended, with the details that were read of them."""
        spans: list[str] = []
        resource, number = self._resource, -1
        details, places, last_row = self._details, self._places, len(BY_INDEX)
        for span in logged:
            if not 0 < span.row <= last_row:
                continue  # of another version
            if span.page.resource != number or len(spans) >= SPANS_PER_LINE:
                if spans:
                    yield encode.line(resource.text, spans)
                    spans = []
                number = span.page.resource
                resource = self._resources.get(number, self._resource)
            detail = details.get(span.span_id, _NOTHING)
            place = places.get(span.row, _NOWHERE)
            spans.append(encode.logged_span(span, detail, resource.clock_offset_ns, place))
        if spans:
            yield encode.line(resource.text, spans)

    def forget(self, logged: list[LoggedSpan]) -> None:
        """Let go of the details of spans that have been given out."""
        for span in logged:
            self._details.pop(span.span_id, None)

    def is_whole(self, span: LoggedSpan) -> bool:
        """Whether it has ended, and no kill can have robbed it of its details."""
        return 0 < span.end_ns <= self.until_ns or (span.end_ns != 0 and span.span_id in self._details)

    def in_short(self, span: LoggedSpan) -> TableEntry | None:
        """What the log alone says of a span."""
        if not 0 < span.row <= len(BY_INDEX):
            return None
        offset_ns = self._resources.get(span.page.resource, self._resource).clock_offset_ns
        return TableEntry(
            name=BY_INDEX[span.row - 1].name,
            trace_id=span.page.trace_id.hex(),
            span_id=f"{span.span_id:016x}",
            parent_span_id=f"{span.parent_id:016x}" if span.parent_id else "",
            start_ns=span.start_ns + offset_ns,
            end_ns=span.end_ns + offset_ns if span.end_ns else 0,
            attributes=span.page.thread + self._places.get(span.row, _NOWHERE),
        )

    def _bodies(self, data: bytes | mmap) -> Iterator[bytes]:
        end = len(data)
        while self.position + FRAME.size <= end:
            following = whole_units(self.position + 1)
            length = 0
            if self.position + FRAME.size <= following:
                length, checksum = FRAME.unpack_from(data, self.position)
            if length:
                start = self.position + FRAME.size
                body = data[start : start + length]
                if adler32(body) == checksum:
                    self.position = start + length
                    yield body
                    continue
                self.damaged += 1
            if following >= end:
                return  # where the process writes next
            self.position = following


class Found(NamedTuple):
    """What the spool and the span log of a process say.

    Attributes:
        lines: OTLP/JSON of spans that have ended.
        torn: records of the spool that a kill has torn.
        incomplete: spans that have not ended, or whose attributes may have been lost with the process.
    """

    lines: list[bytes]
    torn: int
    incomplete: list[TableEntry]


def read_process(spool: Path, log: Path) -> Found:
    """Read the two files of a living or dead process. Absent ones have nothing to say: what they held is elsewhere by then."""
    # In this order: what has ended in the log by now has its details in the spool by then, unless its process was killed.
    in_log, reader = LogReader(), SpoolReader()
    log_data = b""
    with contextlib.suppress(OSError):
        log_data = log.read_bytes()
    try:
        spool_data = spool.read_bytes()
    except OSError:
        return Found([], 0, [])
    lines = list(reader.lines(spool_data, []))
    whole: list[LoggedSpan] = []
    rest: list[LoggedSpan] = []
    for span in in_log.spans(log_data):
        (whole if reader.is_whole(span) else rest).append(span)
    lines += reader.logged_lines(whole)
    incomplete = [entry for span in rest if (entry := reader.in_short(span)) is not None]
    return Found(lines, reader.damaged, incomplete)
