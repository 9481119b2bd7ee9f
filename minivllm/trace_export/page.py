"""A run as one HTML page that needs nothing else: a timeline to zoom, search and read.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import Any

import msgspec

from minivllm.timeline import text as words
from minivllm.timeline import theme
from minivllm.timeline.run import Run, found_nothing
from minivllm.trace_export.lanes import lanes_of
from minivllm.trace_store import Span, TraceStore
from minivllm.tracing.catalogue import SPANS

_ERROR, _UNFINISHED = 1, 2
# Shown elsewhere on the page: the lane is the thread, the site has the source.
_ELSEWHERE = ("thread.", "code.")


def encode_page(store: TraceStore) -> bytes:
    """The whole page. Everything that comes from the trace is data in it, never markup or script."""
    folder = resources.files("minivllm.assets") / "trace_page"
    page = (folder / "page.html").read_text(encoding="utf-8")
    root = store.root
    model = f" of {root.get('model')}" if root is not None and root.get("model") else ""
    # In one pass over the template, so that nothing that is put in can be taken for a place to fill.
    parts = {
        "@TITLE@": escape(f"minivllm run{model}"),
        "@STYLE@": (folder / "page.css").read_text(encoding="utf-8"),
        "@SCRIPT@": (folder / "page.js").read_text(encoding="utf-8"),
        "@DATA@": _as_script_text(msgspec.json.encode(_data(store))),
    }
    pieces = [page]
    for mark in parts:
        pieces = [part for piece in pieces for part in _split(piece, mark, parts)]
    return "".join(parts.get(piece, piece) for piece in pieces).encode()


def _split(piece: str, mark: str, marks: dict[str, str]) -> list[str]:
    if piece in marks:
        return [piece]
    parts: list[str] = []
    for number, part in enumerate(piece.split(mark)):
        parts += [mark, part] if number else [part]
    return parts


def _as_script_text(encoded: bytes) -> str:
    """JSON that may stand in a script element: without `<` nothing in it can end the element or begin a comment."""
    return encoded.decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Table:
    """Values by number: what comes again is written once."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def _data(store: TraceStore) -> dict[str, Any]:
    run = Run(store)
    lanes = lanes_of(store)
    processes = list(dict.fromkeys(lane.process for lane in lanes))
    names, keys, sites = _Table(), _Table(), _Table()
    drawn = [(span, number, depth) for number, lane in enumerate(lanes) for span, depth in lane.spans]
    index = {span.span_id: i for i, (span, _, _) in enumerate(drawn)}
    spans = [
        [
            span.span_id,
            lane,
            depth,
            run.at(span.start_ns),
            span.duration_ns,
            names.number(span.name),
            index.get(span.parent_span_id, -1),
            (_ERROR if span.is_error and not found_nothing(span) else 0)
            | (_UNFINISHED if span.unfinished else 0),
            _site(span, sites),
            [
                [keys.number(key), _plain(value)]
                for key, value in span.attributes.items()
                if not key.startswith(_ELSEWHERE)
            ],
            [
                [run.at(event.time_ns), event.name, [[k, _plain(v)] for k, v in event.attributes.items()]]
                for event in span.events
            ],
            [index[link.span_id] for link in span.links if link.span_id in index],
            span.status_message,
        ]
        for span, lane, depth in drawn
    ]
    at = 0
    lane_rows = []
    for lane in lanes:
        members = range(at, at + len(lane.spans))
        at += len(lane.spans)
        lane_rows.append(
            {"process": processes.index(lane.process), "name": lane.name, "spans": list(members)}
        )
    end_ns = max((run.at(span.end_ns) for span, _, _ in drawn), default=1)
    failure = store.first_failure()
    return {
        "trace_id": store.trace_id,
        "summary": f"{words.count(len(spans), 'step')} of {words.count(len(processes), 'process', 'processes')} in "
        f"{words.duration(end_ns)}; trace {store.trace_id}",
        "duration_ns": end_ns,
        "first_failure": index.get(failure.span_id, -1) if failure is not None else -1,
        "processes": [
            {"name": run.actor(p).name, "pid": p.pid, "color": theme.color(run.actor(p).slot)}
            for p in processes
        ],
        "lanes": lane_rows,
        "names": [_name(name) for name in names.numbers],
        "keys": list(keys.numbers),
        "sites": [list(site) for site in sites.numbers],
        "spans": spans,
    }


def _site(span: Span, sites: _Table) -> int:
    attributes = span.attributes
    path = attributes.get("code.file.path")
    if path is None:
        return -1
    return sites.number(
        (attributes.get("code.function.name", ""), path, attributes.get("code.line.number", 0))
    )


def _name(name: str) -> dict[str, Any]:
    spec = SPANS.get(name)
    if spec is None:
        return {"name": name, "level": 1}
    return {
        "name": name,
        "level": spec.level,
        "what": spec.what,
        "articles": ", ".join(spec.articles),
        "vllm": spec.vllm,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else str(value)
