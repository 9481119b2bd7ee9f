"""What a recorded run consists of: processes, and the spans, events and links that they wrote.

vLLM 0.25.1: none
Articles: none
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

STATUS_ERROR: Final = 2
KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")


class RawStatus(msgspec.Struct, omit_defaults=True):
    code: int = 0
    message: str = ""


class RawSpan(msgspec.Struct, omit_defaults=True):
    """A span as OTLP/JSON has it; attributes, events and links stay undecoded until somebody asks for them."""

    traceId: str
    spanId: str
    name: str
    startTimeUnixNano: str | int
    parentSpanId: str = ""
    kind: int = 0
    endTimeUnixNano: str | int = "0"
    attributes: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))
    events: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))
    links: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))
    status: RawStatus = msgspec.field(default_factory=RawStatus)


class _KeyValue(msgspec.Struct):
    key: str
    value: dict[str, Any] = msgspec.field(default_factory=dict)


class _RawEvent(msgspec.Struct):
    name: str
    timeUnixNano: str | int = "0"
    attributes: list[_KeyValue] = msgspec.field(default_factory=list)


class _RawLink(msgspec.Struct):
    spanId: str
    traceId: str = ""


_attributes_decoder = msgspec.json.Decoder(list[_KeyValue])
_events_decoder = msgspec.json.Decoder(list[_RawEvent])
_links_decoder = msgspec.json.Decoder(list[_RawLink])


def plain_value(value: dict[str, Any]) -> Any:
    """The Python value of an AnyValue of OTLP/JSON."""
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind == "doubleValue":
            return float(content)
        if kind == "arrayValue":
            return [plain_value(item) for item in content.get("values", [])]
        if kind == "kvlistValue":
            return {item["key"]: plain_value(item.get("value", {})) for item in content.get("values", [])}
        if kind == "bytesValue":
            return base64.b64decode(content)
        return content
    return None


def plain_attributes(items: list[_KeyValue]) -> dict[str, Any]:
    return {item.key: plain_value(item.value) for item in items}


def decode_attributes(raw: bytes | msgspec.Raw) -> dict[str, Any]:
    """Decode a list of KeyValue objects."""
    return plain_attributes(_attributes_decoder.decode(raw))


@dataclass(slots=True, eq=False)
class Process:
    """One process of the run.

    Attributes:
        role: "client", "engine_core" or "worker".
        rank: global rank of a worker, None for the others.
        service: its `service.name`, such as "minivllm.worker.tp0".
        resource: all resource attributes.
        alive: it still runs (only known on the host of the run).
        start_ns, end_ns: first and last moment known of it, by its own spans.
    """

    role: str
    rank: int | None
    pid: int
    parent_pid: int
    service: str
    instance_id: str
    resource: dict[str, Any] = field(default_factory=dict, repr=False)
    alive: bool = False
    start_ns: int = 0
    end_ns: int = 0

    @property
    def label(self) -> str:
        """Short name for people: "client", "engine_core", "worker.tp0"."""
        return self.service.removeprefix("minivllm.")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one moment within a span."""

    name: str
    time_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Link:
    """A reference to a span that is not the parent."""

    trace_id: str
    span_id: str


class Span:
    """One step of one process.

    Attributes:
        span_id, parent_span_id, trace_id: lower-case hex; the parent's id is "" for a root.
        start_ns, end_ns: nanoseconds since the epoch.
        recovered: the process was killed before the span reached the file; it has no attributes.
    """

    __slots__ = (
        "_attributes",
        "end_ns",
        "name",
        "parent_span_id",
        "process",
        "raw",
        "recovered",
        "span_id",
        "start_ns",
        "trace_id",
    )

    def __init__(self, raw: RawSpan, process: Process, recovered: bool = False) -> None:
        self.raw = raw
        self.process = process
        self.name = raw.name
        self.trace_id = raw.traceId
        self.span_id = raw.spanId
        self.parent_span_id = raw.parentSpanId
        self.start_ns = int(raw.startTimeUnixNano)
        self.end_ns = int(raw.endTimeUnixNano)
        self.recovered = recovered
        self._attributes: dict[str, Any] | None = None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def kind(self) -> str:
        return KINDS[self.raw.kind]

    @property
    def attributes(self) -> dict[str, Any]:
        """All attributes by their full names: `minivllm.seq`, `rpc.method`, `thread.name` …"""
        if self._attributes is None:
            self._attributes = decode_attributes(self.raw.attributes)
        return self._attributes

    def get(self, name: str, default: Any = None) -> Any:
        """One of our own attributes, without its prefix `minivllm.`."""
        return self.attributes.get("minivllm." + name, default)

    @property
    def rank(self) -> int | None:
        """The rank this span is about: that of its process, else its attribute `minivllm.rank`."""
        return self.process.rank if self.process.rank is not None else self.get("rank")

    @property
    def events(self) -> list[Event]:
        return [
            Event(raw.name, int(raw.timeUnixNano), plain_attributes(raw.attributes))
            for raw in _events_decoder.decode(self.raw.events)
        ]

    @property
    def links(self) -> list[Link]:
        return [Link(raw.traceId, raw.spanId) for raw in _links_decoder.decode(self.raw.links)]

    @property
    def unfinished(self) -> bool:
        """The process ended within this step; end_ns is the last moment known of it."""
        return self.is_error and bool(self.get("unfinished"))

    @property
    def is_error(self) -> bool:
        return self.raw.status.code == STATUS_ERROR

    @property
    def status_message(self) -> str:
        return self.raw.status.message

    def finish(self, end_ns: int, error: str, **marks: bool) -> None:
        """Give an end to a span that has none. error: status message, "" for no error; marks: `minivllm.*` flags."""
        self.end_ns = max(end_ns, self.start_ns)
        self.raw.endTimeUnixNano = str(self.end_ns)
        if error:
            self.raw.status = RawStatus(STATUS_ERROR, error)
        self.attributes.update({f"minivllm.{name}": value for name, value in marks.items()})
        extra = b",".join(
            b'{"key":"minivllm.%b","value":{"boolValue":%b}}'
            % (name.encode(), b"true" if value else b"false")
            for name, value in marks.items()
        )
        before = bytes(self.raw.attributes).rstrip()[:-1]
        self.raw.attributes = msgspec.Raw(before + (b"," if len(before) > 1 else b"") + extra + b"]")

    def __repr__(self) -> str:
        flag = " unfinished" if self.unfinished else " error" if self.is_error else ""
        return f"<{self.name} {self.process.label} {self.duration_ns / 1e6:.3f} ms{flag}>"
