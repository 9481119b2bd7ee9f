"""A run as the JSON that Jaeger's UI uploads and downloads.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations

from typing import Any

import msgspec

from minivllm.trace_store import Event, Span, TraceStore


def encode_jaeger(store: TraceStore) -> bytes:
    """One trace with a process per process of the run. Times are microseconds, which is all the format has."""
    keys = {process: f"p{number}" for number, process in enumerate(store.processes(), 1)}
    return msgspec.json.encode(
        {
            "data": [
                {
                    "traceID": store.trace_id,
                    "spans": [_span(span, keys[span.process]) for span in store.spans()],
                    "processes": {
                        key: {
                            "serviceName": process.service,
                            "tags": [
                                _tag(name, value)
                                for name, value in process.resource.items()
                                if name != "service.name"
                            ],
                        }
                        for process, key in keys.items()
                    },
                    "warnings": None,
                }
            ]
        }
    )


def _span(span: Span, process: str) -> dict[str, Any]:
    references = [
        {"refType": "FOLLOWS_FROM", "traceID": link.trace_id or span.trace_id, "spanID": link.span_id}
        for link in span.links
    ]
    if span.parent_span_id:
        parent = {"refType": "CHILD_OF", "traceID": span.trace_id, "spanID": span.parent_span_id}
        references.insert(0, parent)
    tags = [_tag(name, value) for name, value in span.attributes.items()]
    tags.append(_tag("span.kind", span.kind))
    if span.is_error:
        tags.append(_tag("error", True))
        tags.append(_tag("otel.status_code", "ERROR"))
        tags.append(_tag("otel.status_description", span.status_message))
    start_us = span.start_ns // 1000
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": references,
        "startTime": start_us,
        # From the ends and not from the rounded length, so that children stay within their parents.
        "duration": span.end_ns // 1000 - start_us,
        "tags": tags,
        "logs": [_log(event) for event in span.events],
        "processID": process,
        "warnings": None,
    }


def _log(event: Event) -> dict[str, Any]:
    fields = [_tag("event", event.name), *(_tag(name, value) for name, value in event.attributes.items())]
    return {"timestamp": event.time_ns // 1000, "fields": fields}


def _tag(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"key": name, "type": "bool", "value": value}
    if isinstance(value, int):
        return {"key": name, "type": "int64", "value": value}
    if isinstance(value, float):
        return {"key": name, "type": "float64", "value": value}
    if isinstance(value, (list, dict)):
        value = msgspec.json.encode(value).decode()
    return {"key": name, "type": "string", "value": str(value)}
