"""The spool: spans go into the file when their process begins to wait, in a form that costs the traced thread next to nothing.

vLLM 0.25.1: none (the SDK's BatchSpanProcessor, whose spans are lost when a process is killed)
Articles: part 2 §2.6

The file is mapped into memory, so a record outlives the process as soon as it is copied there, and no thread has to
take the GIL from the model to write it. OTLP/JSON, ten times as costly, is made of it when the process ends, or by
whoever reads the run before.

Each record has a frame of u32 length and u32 CRC-32 of what follows: a MessagePack array, one of the classes below.
A unit of the file that has no room for the next record ends in zeros. A record that a kill has torn fails its CRC;
its spans are then still in the open table.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from minivllm.tracing import encode
from minivllm.tracing.catalogue import BY_INDEX
from minivllm.tracing.place import ThreadState

if TYPE_CHECKING:
    from minivllm.tracing.place import Site
    from minivllm.tracing.spans import Span

logger = logging.getLogger(__name__)
UNIT_BYTES = 128 * 1024
SPANS_PER_LINE = 128
FRAME = struct.Struct("<II")
_LOT = 4
_NOWHERE = '{"key":"code.function.name","value":{"stringValue":"?"}}'


class _Resource(msgspec.Struct, array_like=True, tag=0):
    """Who the process is from here on, and its clock."""

    text: str
    clock_offset_ns: int


class _Place(msgspec.Struct, array_like=True, tag=1):
    """Where the hot spans of one row of the catalogue are emitted."""

    index: int
    text: str


class _Text(msgspec.Struct, array_like=True, tag=2):
    """A span as OTLP/JSON: the rare ones, and those whose attributes MessagePack cannot say."""

    text: str


class HotRecord(msgspec.Struct, array_like=True):
    """A span of the hot path, whose place is known by its name: the fields of Span. Times of the monotonic clock."""

    index: int
    attributes: dict[str, Any]
    thread: tuple[int, str]  # id and name
    outer: msgspec.Raw  # nothing, unless shutdown() has ended it
    trace_id: bytes
    span_id: int
    parent_id: int
    start_ns: int
    slot: int
    end_ns: int
    depth: int
    links: tuple[bytes, ...]
    own_kind: str
    site: msgspec.Raw
    status: int
    status_message: str
    events: list[tuple[int, str, dict[str, Any]]] | None


class _Lot(msgspec.Struct, array_like=True, tag=_LOT):
    """Spans that were written together."""

    spans: list[HotRecord]


def _say(value: Any) -> Any:
    """What MessagePack has no type for."""
    return value.said if type(value) is ThreadState else str(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_say).encode
_decode = msgspec.msgpack.Decoder(_Resource | _Place | _Text | _Lot).decode
_frame = FRAME.pack


def _whole_units(size: int) -> int:
    return -(-size // UNIT_BYTES) * UNIT_BYTES


class Spool:
    """The writer's side.

    Any thread, and a signal handler in the middle of it, may write: `mmap.write` copies and advances in one call of C.
    A full unit is replaced by the next and never used again, so that whoever still writes to it loses nothing.

    Attributes:
        ours: nobody had written to this file before.
        write: copies a framed record into the current unit; raises ValueError when there is no room.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError: the file cannot be made, or the disk is full."""
        self.path = path
        self._lock = threading.RLock()
        self._failed = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # What a process of the same role and pid has left there is not ours to overwrite, nor to remove.
        self._end = _whole_units(os.fstat(self._fd).st_size)
        self.ours = not self._end
        self._reader = SpoolReader(self._end)
        try:
            self._next_unit(UNIT_BYTES)
        except OSError:
            os.close(self._fd)
            raise

    def _next_unit(self, size: int) -> None:
        start = self._end
        self._end = start + size
        # Reserved first: a store into a mapped page that the disk has no room for would be a SIGBUS.
        if sys.platform == "darwin":
            os.ftruncate(self._fd, self._end)  # macOS has nothing better
        else:
            os.posix_fallocate(self._fd, start, size)
        # Pages that are there and dirty already are had for a third of what the file system takes when each of them is
        # first stored to, which would be in the middle of a step.
        os.pwrite(self._fd, bytes(size), start)
        memory = mmap.mmap(self._fd, size, offset=start)
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 0
        # Unless a signal handler in the middle of this has gone on to another one: readers do not come back to this.
        if self._end == start + size:
            self.write = memory.write

    def append(self, record: bytes) -> None:
        """Write one record, into a new unit if need be."""
        record = _frame(len(record), crc32(record)) + record
        try:
            self.write(record)
        except ValueError:
            self._append_to_next_unit(record)

    def _append_to_next_unit(self, record: bytes) -> None:
        with self._lock:
            while not self._failed:
                # Again even right after a new unit: other threads, which need no lock to write, may have filled it.
                with contextlib.suppress(ValueError):
                    self.write(record)
                    return
                try:
                    self._next_unit(_whole_units(len(record)))
                except (OSError, ValueError) as error:
                    self._failed = True
                    logger.warning("the trace is incomplete: %s: %s", self.path, error)

    def keep(self, spans: list[Span]) -> None:
        """Write spans of the hot path that have ended."""
        try:
            lot = _encode((_LOT, spans))
        except Exception:
            if len(spans) == 1:  # an attribute that MessagePack cannot say
                self.keep_as_text(spans[0])
            else:
                for item in spans:
                    self.keep([item])
            return
        self.append(lot)

    def keep_as_text(self, item: Span) -> None:
        """Write any other span that has ended."""
        try:
            self.append(_encode(_Text(encode.span(item))))
        except Exception:
            # Whatever a span carries must not end the run: it goes on without this one.
            if not self._failed:
                logger.exception("%s could not be written", item.name)

    def resource(self, text: str, clock_offset_ns: int) -> None:
        """Say who the spans that follow belong to."""
        self.append(_encode(_Resource(text, clock_offset_ns)))

    def place(self, index: int, site: Site) -> None:
        """Say where hot spans of this row of the catalogue come from."""
        self.append(_encode(_Place(index, site.json)))

    def new_lines(self) -> Iterator[bytes]:
        """OTLP/JSON of what was not asked for yet."""
        before = self._reader.position
        try:
            with mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) as data:
                yield from self._reader.lines(data)
        except BaseException:
            # A signal handler has raised, or whoever asked has had enough: better twice than never.
            self._reader.position = before
            raise

    def close(self) -> None:
        """Close the file; units that a thread may still be writing to stay mapped until it has let go of them."""
        os.close(self._fd)


class SpoolReader:
    """Makes OTLP/JSON of a spool, whole or as it grows.

    Attributes:
        position: where the next record is, in bytes from the start of the file.
        damaged: records that a kill has torn.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.damaged = 0
        self._resource = ""
        self._clock_offset_ns = 0
        self._places: dict[int, str] = {}

    def lines(self, data: bytes | mmap.mmap) -> Iterator[bytes]:
        """Lines of OTLP/JSON from `position` to the end of what is there; data: the whole file."""
        spans: list[str] = []
        for body in self._bodies(data):
            try:
                record = _decode(body)
            except msgspec.MsgspecError:
                self.damaged += 1
                continue
            if isinstance(record, _Lot):
                spans.extend(self._spans_of(record))
            elif isinstance(record, _Text):
                spans.append(record.text)
            elif isinstance(record, _Place):
                self._places[record.index] = record.text
            else:
                if spans:
                    yield encode.line(self._resource, spans)
                    spans = []
                self._resource, self._clock_offset_ns = record.text, record.clock_offset_ns
            if len(spans) >= SPANS_PER_LINE:
                yield encode.line(self._resource, spans)
                spans = []
        if spans:
            yield encode.line(self._resource, spans)

    def _spans_of(self, lot: _Lot) -> Iterator[str]:
        for span in lot.spans:
            if 0 < span.index <= len(BY_INDEX):  # else of another version
                place = self._places.get(span.index, _NOWHERE)
                yield encode.hot_span(span, BY_INDEX[span.index - 1], self._clock_offset_ns, place)

    def _bodies(self, data: bytes | mmap.mmap) -> Iterator[bytes]:
        end = len(data)
        while self.position + FRAME.size <= end:
            following = _whole_units(self.position + 1)
            length = 0
            if self.position + FRAME.size <= following:
                length, checksum = FRAME.unpack_from(data, self.position)
            if length:
                start = self.position + FRAME.size
                body = data[start : start + length]
                if crc32(body) == checksum:
                    self.position = start + length
                    yield body
                    continue
                self.damaged += 1
            if following >= end:
                return  # where the process writes next
            self.position = following


def read_lines(path: Path) -> tuple[list[bytes], int]:
    """OTLP/JSON of the spool of a living or dead process, and how many records were torn. An absent file has none."""
    reader = SpoolReader()
    try:
        data = path.read_bytes()
    except OSError:
        return [], 0
    return list(reader.lines(data)), reader.damaged
