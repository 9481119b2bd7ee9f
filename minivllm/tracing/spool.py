"""The spool: what a process says about its spans besides when they were, in a form that costs the traced thread next to nothing.

vLLM 0.25.1: none (the SDK's BatchSpanProcessor, whose spans are lost when a process is killed)
Articles: part 2 §2.6

The file is mapped into memory, so a record outlives the process as soon as it is copied there, and no thread has to
take the GIL from the model to write it. OTLP/JSON, ten times as costly, is made of it when the process ends, or by
whoever reads the run before.

Each record has a frame of u32 length and u32 Adler-32 of what follows (a CRC looks things up in tables that are rarely in
the cache): a MessagePack array, one of the classes below. A unit of the file that has no room for the next record ends in
zeros. A record that a kill has torn fails its checksum.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from zlib import adler32

import msgspec

from minivllm.tracing import encode
from minivllm.tracing.mapped import MappedFile, whole_units
from minivllm.tracing.process import clock

if TYPE_CHECKING:
    from minivllm.tracing.place import Site
    from minivllm.tracing.spans import Span

logger = logging.getLogger(__name__)
FRAME = struct.Struct("<II")
_LOT = 4

Details = tuple[Any, ...]
"""The fields of Detail, as many of them as are needed."""


class Resource(msgspec.Struct, array_like=True, tag=0):
    """Who the process is from here on, and its clock. Pages of the span log refer to the number."""

    text: str
    clock_offset_ns: int
    number: int


class Place(msgspec.Struct, array_like=True, tag=1):
    """Where the hot spans of one row of the catalogue are emitted."""

    index: int
    text: str


class Text(msgspec.Struct, array_like=True, tag=2):
    """A span as OTLP/JSON: the rare ones, which are not in the span log."""

    text: str


class Detail(msgspec.Struct, array_like=True, gc=False):
    """What there is to say of a span of the span log, besides its numbers there.

    Attributes:
        own_text: attributes as OTLP/JSON, where MessagePack cannot say them; `tail_text` the same of events, links and status.
    """

    span_id: int
    attributes: dict[str, Any] = {}
    links: tuple[bytes, ...] = ()
    own_kind: str = ""
    status: int = 0
    status_message: str = ""
    events: list[tuple[int, str, dict[str, Any]]] | None = None
    own_text: str = ""
    tail_text: str = ""


class Lot(msgspec.Struct, array_like=True, tag=_LOT):
    """Details that were written together: of all spans that had ended by then and were not in an earlier one."""

    until_ns: int
    details: list[Detail]


def _as_text(value: Any) -> str:
    """What MessagePack has no type for."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__} in str()>"


_encode = msgspec.msgpack.Encoder(enc_hook=_as_text).encode
decode = msgspec.msgpack.Decoder(Resource | Place | Text | Lot).decode
_frame = FRAME.pack


def _no_room(record: bytes) -> int:
    """What writes to a unit that is full."""
    raise ValueError


class Spool(MappedFile):
    """The writer's side.

    Any thread, and a signal handler in the middle of it, may write: `mmap.write` copies and advances in one call of C.

    Attributes:
        write: copies a framed record into the current unit; raises ValueError when there is no room.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError: the file cannot be made, or the disk is full."""
        super().__init__(path)
        try:
            self.write: Callable[[bytes], int] = self.next_unit().write
        except OSError:
            self.close()
            raise

    def append(self, record: bytes) -> None:
        """Write one record, into a new unit if need be."""
        record = _frame(len(record), adler32(record)) + record
        try:
            self.write(record)
        except ValueError:
            self._append_to_next_unit(record)

    def _append_to_next_unit(self, record: bytes) -> None:
        with self.lock:
            size = whole_units(len(record))
            while not self.failed:
                # Again even right after a new unit: other threads, which need no lock to write, may have filled it.
                with contextlib.suppress(ValueError):
                    self.write(record)
                    return
                # No call between these lines. Nothing goes into an older unit from here on, whatever comes of this: readers
                # leave it as soon as there is another one.
                start = self.end
                self.end = start + size
                self.write = _no_room
                try:
                    write = self.map_unit(start, size).write
                except (OSError, ValueError) as error:
                    self.give_up(error)
                    return
                # Unless a signal handler in the middle of this has gone on to another one.
                if self.end == start + size:
                    self.write = write

    def keep(self, details: list[Details], until_ns: int) -> None:
        """Write what there is to say of spans that have ended."""
        try:
            lot = _encode((_LOT, until_ns, details))
        except Exception:
            lot = _encode((_LOT, until_ns, [_sayable(item) for item in details]))
        self.append(lot)

    def keep_as_text(self, item: Span) -> None:
        """Write a span that is not in the span log."""
        try:
            self.append(_encode(Text(encode.span(item))))
        except Exception:
            # Whatever a span carries must not end the run: it goes on without this one.
            if not self.failed:
                logger.exception("%s could not be written", item.name)

    def resource(self, text: str, clock_offset_ns: int) -> int:
        """Say who the spans that follow belong to; returns the number of that."""
        number = monotonic_ns()
        self.append(_encode(Resource(text, clock_offset_ns, number)))
        return number

    def place(self, index: int, site: Site) -> None:
        """Say where hot spans of this row of the catalogue come from."""
        self.append(_encode(Place(index, site.json)))


def _sayable(item: Details) -> Details:
    """The same in OTLP/JSON where MessagePack has no way to say it."""
    try:
        _encode(item)
    except Exception:
        detail = Detail(*item)
        try:
            own = encode.attributes(detail.attributes)
            tail = encode.tail(detail, clock.offset_ns)
        except Exception:
            # Whatever a span carries must not end the run: it goes on without what this one has to say.
            logger.exception("what a span says of itself could not be written")
            own = tail = ""
        return (detail.span_id, {}, (), detail.own_kind, 0, "", None, own, tail)
    return item
