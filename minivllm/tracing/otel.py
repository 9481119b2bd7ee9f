"""Recorded spans as OpenTelemetry ReadableSpans, for any exporter made for the OpenTelemetry SDK.

vLLM 0.25.1: vllm/tracing/otel.py (init_otel_tracer)
Articles: none

Importing this module imports the SDK (about 0.1 s): do it only where somebody exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from minivllm import __version__
from minivllm.tracing.context import unpack
from minivllm.tracing.encode import attribute_name, in_words
from minivllm.tracing.process import clock, identity

if TYPE_CHECKING:
    from minivllm.tracing.spans import Span

_SCOPE = InstrumentationScope("minivllm", __version__)
_STATUS = {0: StatusCode.UNSET, 1: StatusCode.OK, 2: StatusCode.ERROR}


def to_readable_spans(
    spans: Iterable[Span], resource: Mapping[str, str | int] | None = None
) -> list[ReadableSpan]:
    """Convert spans of this process that have ended. resource: None takes that of this process."""
    owner = Resource(dict(resource or identity.resource()))
    return [_readable(span, owner) for span in spans]


def _readable(span: Span, resource: Resource) -> ReadableSpan:
    place = span.place
    attributes: dict[str, Any] = {
        "thread.id": span.thread.native_id,
        "thread.name": span.thread.name,
        "code.function.name": place.function,
        "code.file.path": place.path,
        "code.line.number": place.line,
        **_attributes(span.attributes or {}),
    }
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=_context(span.trace_id, span.parent_id, remote=True) if span.parent_id else None,
        resource=resource,
        attributes=attributes,
        events=[
            Event(name, _attributes(values), timestamp=clock.wall_ns(time_ns))
            for time_ns, name, values in span.events or ()
        ],
        links=[Link(_context(*unpack(link), remote=True)) for link in span.links],
        kind=SpanKind[span.kind.upper()],
        status=Status(_STATUS[span.status], span.status_message or None),
        start_time=clock.wall_ns(span.start_ns),
        end_time=clock.wall_ns(span.end_ns),
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: bytes, span_id: int, remote: bool = False) -> SpanContext:
    return SpanContext(int.from_bytes(trace_id, "big"), span_id, remote, TraceFlags(TraceFlags.SAMPLED))


def _attributes(items: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes in types that the SDK takes: scalars and lists of one kind of scalar; the rest becomes text."""
    return {
        attribute_name(name): _plain(in_words(name, value))
        for name, value in items.items()
        if value is not None
    }


def _plain(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return items if len({type(item) for item in items}) <= 1 else [str(item) for item in items]
    return str(value)
