"""Spans as OTLP/JSON text, put together by hand because a process that ends has many of them to write.

vLLM 0.25.1: none (it exports protobuf through the OpenTelemetry SDK)
Articles: none
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from minivllm import __version__
from minivllm.tracing.catalogue import BY_INDEX
from minivllm.tracing.process import clock

if TYPE_CHECKING:
    from minivllm.tracing.span_log import LoggedSpan
    from minivllm.tracing.spans import Span
    from minivllm.tracing.spool import Detail

KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
_INT64 = 1 << 63
# Lists that are text to whoever reads them; the hot path leaves it to the reader to put them into words.
_AS_TEXT = frozenset({"req_ids", "num_tokens_per_req"})
_text_cache: dict[str, str] = {}
_key_cache: dict[str, str] = {}


def quote(text: str) -> str:
    """JSON string; what is not valid Unicode is replaced."""
    cached = _text_cache.get(text)
    if cached is not None:
        return cached
    try:
        quoted = msgspec.json.encode(text).decode()
    except UnicodeEncodeError:
        quoted = msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()
    if len(text) <= 64 and len(_text_cache) < 4096:
        _text_cache[text] = quoted
    return quoted


def attribute_name(name: str) -> str:
    """Our own attributes start with `minivllm.`; dotted names are the conventions' and stay."""
    return name if "." in name else "minivllm." + name


def in_words(name: str, value: Any) -> Any:
    """The value that an attribute has outside."""
    return ", ".join(map(str, value)) if name in _AS_TEXT and not isinstance(value, str) else value


def _value(value: Any) -> str:
    """One AnyValue of OTLP/JSON. Unknown types become text."""
    kind = type(value)
    if kind is str:
        return f'{{"stringValue":{quote(value)}}}'
    if kind is bool:
        return '{"boolValue":true}' if value else '{"boolValue":false}'
    if kind is int:
        if -_INT64 <= value < _INT64:
            return f'{{"intValue":"{value}"}}'
        return f'{{"stringValue":"{value}"}}'
    if kind is float:
        if math.isfinite(value):
            return f'{{"doubleValue":{value!r}}}'
        return f'{{"doubleValue":"{"NaN" if value != value else "Infinity" if value > 0 else "-Infinity"}"}}'
    if kind is list or kind is tuple:
        return f'{{"arrayValue":{{"values":[{",".join(map(_value, value))}]}}}}'
    if kind is dict:
        entries = ",".join(
            f'{{"key":{quote(str(key))},"value":{_value(item)}}}' for key, item in value.items()
        )
        return f'{{"kvlistValue":{{"values":[{entries}]}}}}'
    if kind is bytes:
        return f'{{"bytesValue":"{base64.b64encode(value).decode()}"}}'
    if isinstance(value, (set, frozenset)):
        return _value(sorted(map(str, value)))
    for plain in (bool, int, float, str):  # subclasses: enums, numpy scalars that are Python numbers
        if isinstance(value, plain):
            return _value(plain(value))
    try:
        return _value(str(value))
    except Exception as error:
        return _value(f"<{kind.__name__}: {type(error).__name__} in str()>")


def attributes(items: Mapping[str, Any]) -> str:
    """The list of KeyValue objects, without the brackets. None values are left out."""
    parts = []
    for name, value in items.items():
        start = _key_cache.get(name) or _key(name)
        kind = type(value)
        if kind is int and -_INT64 <= value < _INT64:
            parts.append(f'{start}{{"intValue":"{value}"}}}}')
        elif kind is str:
            parts.append(f'{start}{{"stringValue":{_text_cache.get(value) or quote(value)}}}}}')
        elif value is not None:
            parts.append(f"{start}{_value(in_words(name, value))}}}")
    return ",".join(parts)


def _key(name: str) -> str:
    """The part of a KeyValue before its value."""
    start = f'{{"key":{quote(attribute_name(name))},"value":'
    if len(_key_cache) < 4096:
        _key_cache[name] = start
    return start


def span(item: Span) -> str:
    """One Span object of OTLP/JSON. A span that has not ended has no end time (used by the journal)."""
    offset = clock.offset_ns
    return _span(
        item.trace_id,
        item.span_id,
        item.parent_id,
        item.name,
        item.kind,
        item.start_ns + offset,
        f'"endTimeUnixNano":"{item.end_ns + offset}",' if item.end_ns else "",
        item.thread.json,
        item.place.json,
        attributes(item.attributes) if item.attributes else "",
        tail(item, offset) if item.events or item.links or item.status else "",
    )


def logged_span(item: LoggedSpan, detail: Detail, offset: int, place: str) -> str:
    """The same for a span of the span log. offset: wall clock minus monotonic clock, ns."""
    page, entry = item.page, BY_INDEX[item.row - 1]
    own = detail.own_text or (attributes(detail.attributes) if detail.attributes else "")
    more = detail.tail_text
    if detail.events or detail.links or detail.status:
        more = tail(detail, offset)
    return _span(
        page.trace_id,
        item.span_id,
        item.parent_id,
        entry.name,
        detail.own_kind or entry.kind,
        item.start_ns + offset,
        f'"endTimeUnixNano":"{item.end_ns + offset}",',
        page.thread,
        place,
        own,
        more,
    )


def thread(native_id: int, name: str) -> str:
    """The attributes of a thread, and a comma."""
    return (
        f'{{"key":"thread.id","value":{{"intValue":"{native_id}"}}}},'
        f'{{"key":"thread.name","value":{{"stringValue":{quote(name)}}}}},'
    )


def _span(
    trace_id: bytes,
    span_id: int,
    parent_id: int,
    name: str,
    kind: str,
    start_ns: int,
    end: str,
    thread: str,
    place: str,
    own: str,
    more: str,
) -> str:
    parent = '","parentSpanId":"%016x' % parent_id if parent_id else ""  # noqa: UP031 - the quickest
    return (
        f'{{"traceId":"{trace_id.hex()}","spanId":"{"%016x" % span_id}{parent}","name":"{name}"'  # noqa: UP031
        f',"kind":{KINDS[kind]},"startTimeUnixNano":"{start_ns}",{end}"attributes":['
        f"{thread}{place}{',' if own else ''}{own}]{more}}}"
    )


def _links(packed: tuple[bytes, ...]) -> str:
    return ",".join(f'{{"traceId":"{link[:16].hex()}","spanId":"{link[16:24].hex()}"}}' for link in packed)


def tail(item: Span | Detail, offset: int) -> str:
    """Events, links and status, which few spans have."""
    parts = []
    if item.events:
        events = ",".join(
            f'{{"timeUnixNano":"{time_ns + offset}","name":{quote(name)},"attributes":[{attributes(values)}]}}'
            for time_ns, name, values in item.events
        )
        parts.append(f',"events":[{events}]')
    if item.links:
        parts.append(f',"links":[{_links(item.links)}]')
    if item.status:
        parts.append(f',"status":{{"code":{item.status},"message":{quote(item.status_message)}}}')
    return "".join(parts)


def resource(items: Mapping[str, Any]) -> str:
    """The Resource object of OTLP/JSON; names are taken as they are."""
    pairs = ",".join(f'{{"key":{quote(name)},"value":{_value(value)}}}' for name, value in items.items())
    return f'{{"attributes":[{pairs}]}}'


def line(resource_json: str, spans: list[str]) -> bytes:
    """One line of the file: an ExportTraceServiceRequest with one resource."""
    return (
        f'{{"resourceSpans":[{{"resource":{resource_json},"scopeSpans":[{{"scope":{{"name":"minivllm",'
        f'"version":"{__version__}"}},"spans":[{",".join(spans)}]}}]}}]}}\n'
    ).encode()
