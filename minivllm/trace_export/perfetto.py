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
    """One track per process and thread; arrows from each enqueue to its dequeues and from parents elsewhere.

    A dequeue that began before its message was written has a slice inside, from then on, where the arrow ends.
    """
    lanes = lanes_of(store)
    track = _number_tracks(lanes)
    tid = {span.span_id: track[lane] for lane in lanes for span, _ in lane.spans}
    run = Run(store)
    events: list[dict[str, Any]] = [*_names(run, lanes, track)]
    for lane in lanes:
        for span, _ in lane.spans:
            events += _span_events(run, span, lane.process.pid, track[lane])
    inner_end = _inner_ends(lanes)
    arrows: list[tuple[str, Span, Span, int]] = []
    for source, target in message_arrows(store):
        read_ns = max(written_ns(source), inner_end.get(target.span_id, 0))
        # Within the dequeue: at its end, it would be next to it.
        read_ns = max(target.start_ns, min(read_ns, target.end_ns - 1))
        if read_ns > target.start_ns:
            events.append(_read(run, target, read_ns, tid[target.span_id]))
        arrows.append(("message", source, target, read_ns))
    arrows += [("parent", source, target, target.start_ns) for source, target in parent_arrows(store)]
    # Of the same moment, what comes first in the file is taken first.
    for number, (kind, source, _, _) in enumerate(arrows, 1):
        events.append(_arrow_end(run, "s", kind, number, source, source.start_ns, tid[source.span_id]))
    for number, (kind, _, target, at_ns) in enumerate(arrows, 1):
        events.append(_arrow_end(run, "f", kind, number, target, at_ns, tid[target.span_id]))
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
        # The colour is for chrome://tracing; Perfetto colours by name, and its search finds the mark.
        event["cname"] = "terrible"
        event["name"] = f"✖ {event['name']}"
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


def _inner_ends(lanes: list[Lane]) -> dict[str, int]:
    """When the last of the spans drawn inside a span ended (absolute), for those with any."""
    ends: dict[str, int] = {}
    for lane in lanes:
        outer: list[Span] = []
        for span, depth in lane.spans:
            del outer[depth:]
            for around in outer:
                ends[around.span_id] = max(ends.get(around.span_id, 0), span.end_ns)
            outer.append(span)
    return ends


def _read(run: Run, dequeue: Span, from_ns: int, tid: int) -> dict[str, Any]:
    """What a dequeue did once its message was there; before that, it waited."""
    return {
        "ph": "X",
        "name": "wake, read, unpickle",
        "cat": "message",
        "ts": _us(run.at(from_ns)),
        "dur": _us(dequeue.end_ns - from_ns),
        "pid": dequeue.process.pid,
        "tid": tid,
        "args": {"what": "What is left of mq.dequeue once the message was written."},
    }


def _arrow_end(
    run: Run, phase: str, kind: str, number: int, span: Span, at_ns: int, tid: int
) -> dict[str, Any]:
    """One end of an arrow (`s`: where it begins, `f`: where it ends), at the start of its slice.

    Perfetto gives it to the innermost slice begun by then, even if that has ended: any later, it may be that of a
    step inside. And whatever `s` and `f` say, its arrow goes from the slice that begins first.
    """
    return {
        "ph": phase,
        **({"bp": "e"} if phase == "f" else {}),
        "name": kind,
        "cat": kind,
        "id": number,
        "ts": _us(run.at(at_ns)),
        "pid": span.process.pid,
        "tid": tid,
    }
