"""A run as Chrome's JSON trace format, which ui.perfetto.dev and chrome://tracing show.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from minivllm.timeline.messages import written_ns
from minivllm.timeline.run import Run, step_label
from minivllm.trace_export.lanes import Lane, lanes_of
from minivllm.trace_export.messages import message_arrows, parent_arrows
from minivllm.trace_store import Span, TraceStore
from minivllm.tracing.catalogue import LEVEL_NAMES, SPANS


def encode_perfetto(store: TraceStore) -> bytes:
    """One track per process and thread; arrows from each enqueue to its dequeues and from parents elsewhere."""
    lanes = lanes_of(store)
    track = _number_tracks(lanes)
    where = {span.span_id: lane for lane in lanes for span, _ in lane.spans}
    run = Run(store)
    events: list[dict[str, Any]] = [*_names(run, lanes, track)]
    for lane in lanes:
        for span, _ in lane.spans:
            events += _span_events(run, span, lane.process.pid, track[lane])
    arrows = 0
    for kind, pairs in (("message", message_arrows(store)), ("parent", parent_arrows(store))):
        for source, target in pairs:
            arrows += 1
            source_lane, target_lane = where[source.span_id], where[target.span_id]
            events += _arrow(run, kind, arrows, source, target, track[source_lane], track[target_lane])
    root = store.root
    return msgspec.json.encode(
        {
            "displayTimeUnit": "ms",
            "otherData": {
                "trace_id": store.trace_id,
                "start_unix_ns": str(run.zero_ns),
                "model": str(root.get("model", "")) if root else "",
            },
            "traceEvents": events,
        }
    )


def _number_tracks(lanes: list[Lane]) -> dict[Lane, int]:
    """Thread ids; the tracks beside a thread's first one get numbers that no thread has."""
    unused = 1 + max((max(lane.thread_id, lane.process.pid) for lane in lanes), default=0)
    numbers: dict[Lane, int] = {}
    for lane in lanes:
        if lane.thread_id and not lane.extra:
            numbers[lane] = lane.thread_id
        else:
            numbers[lane] = unused
            unused += 1
    return numbers


def _names(run: Run, lanes: list[Lane], track: dict[Lane, int]) -> Iterator[dict[str, Any]]:
    for order, process in enumerate(dict.fromkeys(lane.process for lane in lanes)):
        pid = process.pid
        yield _metadata("process_name", pid, 0, {"name": run.actor(process).name})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": order})
    for order, lane in enumerate(lanes):
        pid, tid = lane.process.pid, track[lane]
        yield _metadata("thread_name", pid, tid, {"name": lane.name})
        yield _metadata("thread_sort_index", pid, tid, {"sort_index": order})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _us(ns: int) -> float:
    # Three decimals keep nanoseconds apart; times count from the start of the run so that a double holds them.
    return round(ns / 1000, 3)


def _span_events(run: Run, span: Span, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    spec = SPANS.get(span.name)
    event: dict[str, Any] = {
        "ph": "X",
        "name": step_label(span),
        "cat": LEVEL_NAMES[spec.level] if spec is not None else "span",
        "ts": _us(run.at(span.start_ns)),
        "dur": _us(span.duration_ns),
        "pid": pid,
        "tid": tid,
        "args": {
            "span": span.name,
            "span_id": span.span_id,
            "parent_span_id": span.parent_span_id,
            **({"what": spec.what} if spec is not None else {}),
            **{key.removeprefix("minivllm."): _plain(value) for key, value in span.attributes.items()},
        },
    }
    if span.is_error:
        event["cname"] = "terrible"
        event["args"]["error"] = span.status_message
    yield event
    for note in span.events:
        yield {
            "ph": "i",
            "s": "t",
            "name": note.name,
            "cat": "event",
            "ts": _us(run.at(note.time_ns)),
            "pid": pid,
            "tid": tid,
            "args": {key.removeprefix("minivllm."): _plain(value) for key, value in note.attributes.items()},
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def _arrow(
    run: Run, kind: str, number: int, source: Span, target: Span, source_tid: int, target_tid: int
) -> Iterator[dict[str, Any]]:
    """From where the message was written (or the parent began) to where it was taken (or the child began).

    Each end lies within its span, which is how the viewer finds the span it belongs to.
    """
    is_message = kind == "message"
    end_ns = max(target.start_ns, target.end_ns - 1) if is_message else target.start_ns
    begin_ns = written_ns(source) if is_message else max(source.start_ns, min(target.start_ns, source.end_ns))
    begin_ns = max(source.start_ns, min(begin_ns, end_ns))
    common = {"name": kind, "cat": kind, "id": number}
    yield {
        **common,
        "ph": "s",
        "ts": _us(run.at(begin_ns)),
        "pid": source.process.pid,
        "tid": source_tid,
    }
    yield {
        **common,
        "ph": "f",
        "bp": "e",
        "ts": _us(run.at(end_ns)),
        "pid": target.process.pid,
        "tid": target_tid,
    }
