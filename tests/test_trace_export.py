"""Exports: the same spans in every format, tracks that do not overlap, arrows, a page that works, and endpoints."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from real_runs import TESTS, recorded
from trace_fixtures import Run, write_run
from tracing_helpers import run_script, store_of

from minivllm import __version__
from minivllm.trace_export.jaeger import encode_jaeger
from minivllm.trace_export.lanes import lanes_of
from minivllm.trace_export.otlp import to_protobuf
from minivllm.trace_export.page import encode_page
from minivllm.trace_export.perfetto import encode_perfetto
from minivllm.trace_store import TraceStore
from minivllm.tracing.catalogue import SPANS
from minivllm.tracing.spec import LIFECYCLE, MESSAGE, RPC

LIMIT_S = 60.0
KILLED = "rpc.execute@rank1#6=kill"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to show the page in")


def export(*args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MINIVLLM_T", "OTEL_"))}
    return subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", "export", *args],
        capture_output=True,
        timeout=LIMIT_S,
        env={**clean, **env},
        check=False,
    )


@pytest.fixture(params=["healthy", "killed", "pipeline", "synthetic"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TraceStore:
    if request.param == "synthetic":
        return TraceStore.open(write_run(tmp_path / "trace", tp=4))
    if request.param == "pipeline":
        return TraceStore.open(recorded(pp=2))
    return TraceStore.open(recorded(KILLED if request.param == "killed" else ""))


def page_data(page: bytes) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.decode(), re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


# --- the same spans everywhere


def test_the_run_of_two_stages_has_spans_of_every_level_from_every_process() -> None:
    """What the comparison below compares is a whole run."""
    store = TraceStore.open(recorded(pp=2))
    levels: dict[tuple[str, int | None], set[int]] = {}
    for span in store.spans():
        levels.setdefault((span.process.role, span.rank), set()).add(SPANS[span.name].level)
    workers = {rank: found for (role, rank), found in levels.items() if role == "worker"}
    assert workers == {rank: {LIFECYCLE, RPC, MESSAGE} for rank in range(4)}
    assert levels["engine_core", None] >= {LIFECYCLE, RPC, MESSAGE}
    ids = [span.span_id for span in store.spans()]
    assert len(ids) == len(set(ids))
    files = "".join(path.read_text(encoding="utf-8") for path in recorded(pp=2).glob("*.jsonl"))
    assert set(ids) <= set(re.findall(r"[0-9a-f]{16}", files))


def test_every_format_has_the_same_spans(store: TraceStore) -> None:
    wanted = {(span.span_id, span.parent_span_id, span.process.pid) for span in store.spans()}

    otlp = {
        (span["spanId"], span.get("parentSpanId", ""), pid)
        for group in store.to_otlp()["resourceSpans"]
        for pid in [
            next(
                int(a["value"]["intValue"])
                for a in group["resource"]["attributes"]
                if a["key"] == "process.pid"
            )
        ]
        for scope in group["scopeSpans"]
        for span in scope["spans"]
    }
    assert otlp == wanted

    trace = json.loads(encode_jaeger(store))["data"][0]
    pids = {
        key: next(tag["value"] for tag in p["tags"] if tag["key"] == "process.pid")
        for key, p in trace["processes"].items()
    }
    jaeger = {
        (
            span["spanID"],
            next((r["spanID"] for r in span["references"] if r["refType"] == "CHILD_OF"), ""),
            pids[span["processID"]],
        )
        for span in trace["spans"]
    }
    assert jaeger == wanted

    events = json.loads(encode_perfetto(store))["traceEvents"]
    perfetto = {
        (e["args"]["span_id"], e["args"]["parent_span_id"], e["pid"])
        for e in events
        if e["ph"] == "X" and "span_id" in e["args"]
    }
    assert perfetto == wanted

    data = page_data(encode_page(store))
    ids = [span[0] for span in data["spans"]]
    known = set(ids)
    page = {
        (
            span[0],
            ids[span[6]] if span[6] >= 0 else "",
            data["processes"][data["lanes"][span[1]]["process"]]["pid"],
        )
        for span in data["spans"]
    }
    assert page == {(a, b if b in known else "", pid) for a, b, pid in wanted}


def test_jaeger_json_keeps_errors_links_and_services() -> None:
    store = TraceStore.open(recorded(KILLED))
    trace = json.loads(encode_jaeger(store))["data"][0]
    assert {p["serviceName"] for p in trace["processes"].values()} == {p.service for p in store.processes()}
    failed = {
        span["spanID"]
        for span in trace["spans"]
        if {"key": "error", "type": "bool", "value": True} in span["tags"]
    }
    assert failed == {span.span_id for span in store.spans() if span.is_error} != set()
    dequeues = [span for span in trace["spans"] if span["operationName"] == "mq.dequeue"]
    assert any(r["refType"] == "FOLLOWS_FROM" for span in dequeues for r in span["references"])
    assert all(isinstance(span["startTime"], int) and span["duration"] >= 0 for span in trace["spans"])


# --- Perfetto


def slices_of(events: list[dict[str, Any]]) -> dict[int, list[tuple[int, int]]]:
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            tracks.setdefault(event["tid"], []).append((begin, begin + length))
    return tracks


def test_slices_of_one_track_are_nested_or_apart(store: TraceStore) -> None:
    for slices in slices_of(json.loads(encode_perfetto(store))["traceEvents"]).values():
        stack: list[int] = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)


def test_spans_that_overlap_get_tracks_of_their_own(tmp_path: Path) -> None:
    run = Run(tmp_path / "trace")
    client = run.process("client", None, 7, "minivllm.client")
    for begin, end in ((0, 10), (5, 15), (12, 20), (14, 16)):
        client.span("request", begin, end, thread__id=7, thread__name="MainThread")
    lanes = lanes_of(TraceStore.open(run.write()))
    assert [(lane.name, len(lane.spans)) for lane in lanes] == [("MainThread", 3), ("MainThread (2)", 1)]
    assert lanes[0].depth == 2


def test_tracks_are_named_and_belong_to_one_process(store: TraceStore) -> None:
    events = json.loads(encode_perfetto(store))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(processes) == {p.pid for p in store.processes()}
    assert {"client", "EngineCore", "Worker_TP0"} <= set(processes.values()) | {"Worker_TP0"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used == set(names) and len({tid for _, tid in used}) == len(used)


def arrows_of(events: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """(category, span id, span id) of each arrow as Perfetto draws it, where test_perfetto.py finds the same.

    It takes events by time, slices first. An end of an arrow goes to the innermost slice begun by then on its track,
    even if that has ended, and the arrow from the slice that begins first. A slice that is no span stands for the
    span around it.
    """
    tracks: dict[int, list[dict[str, Any]]] = {}
    starts: dict[int, tuple[dict[str, Any], str]] = {}
    arrows = set()
    for event in sorted(events, key=lambda e: (e["ts"], e["ph"] in "sf")):
        stack = tracks.setdefault(event["tid"], [])
        if event["ph"] == "X":
            while stack and round((stack[-1]["ts"] + stack[-1]["dur"]) * 1000) <= round(event["ts"] * 1000):
                stack.pop()
            stack.append(event)
        elif event["ph"] in "sf":
            span_id = next(e["args"]["span_id"] for e in reversed(stack) if "span_id" in e["args"])
            if event["ph"] == "s":
                starts[event["id"]] = stack[-1], span_id
                continue
            assert event["bp"] == "e"
            source, source_id = starts.pop(event["id"])
            pair = (source_id, span_id) if source["ts"] <= stack[-1]["ts"] else (span_id, source_id)
            arrows.add((event["cat"], *pair))
    assert not starts
    return arrows


def arrows_wanted(store: TraceStore) -> set[tuple[str, str, str]]:
    messages = {
        ("message", link.span_id, span.span_id) for span in store.spans("mq.dequeue") for link in span.links
    }
    parents = {
        ("parent", parent.span_id, span.span_id)
        for span in store.spans()
        if (parent := store.parent(span)) is not None and parent.process is not span.process
    }
    assert len(messages) > 3 and len(parents) > 3
    return messages | parents


def test_arrows_go_from_each_enqueue_to_its_dequeues_and_from_parents_elsewhere(store: TraceStore) -> None:
    assert arrows_of(json.loads(encode_perfetto(store))["traceEvents"]) == arrows_wanted(store)


def write_waiting(directory: Path) -> Path:
    """A reader that waits; waits, and takes others meanwhile; finds its message there; reads it in no time."""
    run = Run(directory)
    core = run.process("engine_core", None, 7, "minivllm.engine_core")
    worker = run.process("worker", 0, 8, "minivllm.worker.tp0")
    root = core.span("run", 0, 60, thread__id=7)
    for sent, begin, end in ((10, 5, 12), (20, 14, 28), (30, 33, 34), (50, 40, 51)):
        sizes = {"wait_ns": 0, "copy_ns": 1_000_000}
        enqueue = core.span("mq.enqueue", sent, sent + 2, root, thread__id=7, **sizes)
        worker.span("mq.dequeue", begin, end, root, thread__id=8, links=[enqueue])
    worker.span("mq.dequeue", 15, 24, root, thread__id=8)
    return run.write()


def test_a_dequeue_that_waited_has_a_slice_from_when_its_message_was_written(tmp_path: Path) -> None:
    store = TraceStore.open(write_waiting(tmp_path / "trace"))
    events = json.loads(encode_perfetto(store))["traceEvents"]
    reads = [e for e in events if e["ph"] == "X" and "span_id" not in e["args"]]
    assert [(e["ts"], e["dur"]) for e in reads] == [(11000, 1000), (24000, 4000), (50999.999, 0.001)]
    assert arrows_of(events) == arrows_wanted(store)


def test_failed_slices_are_marked_in_their_names() -> None:
    store = TraceStore.open(recorded(KILLED))
    events = json.loads(encode_perfetto(store))["traceEvents"]
    marked = {e["args"]["span_id"] for e in events if e["ph"] == "X" and e["name"].startswith("✖ ")}
    failed = {span.span_id for span in store.spans() if span.is_error}
    assert marked == failed and any(span.unfinished for span in store.spans())


def test_the_scope_is_minivllm_in_the_version_that_recorded() -> None:
    request = TraceStore.open(recorded(KILLED)).to_otlp()
    scopes = [scope["scope"] for group in request["resourceSpans"] for scope in group["scopeSpans"]]
    message = to_protobuf(request)
    scopes += [
        {"name": scope.scope.name, "version": scope.scope.version}
        for group in message.resource_spans
        for scope in group.scope_spans
    ]
    assert scopes and all(scope == {"name": "minivllm", "version": __version__} for scope in scopes)


def test_a_run_that_failed_says_so_with_its_requests_and_one_that_did_not_does_not() -> None:
    failed, healthy = TraceStore.open(recorded(KILLED)), TraceStore.open(recorded())
    assert not any(span.is_error for span in healthy.spans() if span.process.role == "client")
    for span in [failed.root, *failed.spans("request")]:
        assert span is not None and span.is_error and not span.unfinished
        assert "SIGKILL" in span.status_message, span.status_message


@pytest.mark.parametrize("early", [False, True], ids=["", "with_an_older_finalizer"])
def test_a_run_that_nobody_shuts_down_ends_well(tmp_path: Path, early: bool) -> None:
    """Of finalizers and exit hooks the last registered runs first; torch registers one when it is imported."""
    script = f"""
class Thing: pass
thing = Thing()
if {early}:
    weakref.finalize(thing, id, 0)
from minivllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(worker_cls="counting_worker.CountingWorker", tensor_parallel_size=2, device="cpu",
              distributed_executor_backend="mp", max_model_len=200, trace=DIR)
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
"""
    done = run_script(tmp_path, "import weakref" + script, PYTHONPATH=str(TESTS))
    assert done.returncode == 0, done.stderr
    store = store_of(tmp_path)
    assert [span.name for span in store.spans() if span.is_error or span.unfinished] == []
    assert len(store.spans("executor.shutdown")) == 1


# --- the page


def hostile(directory: Path) -> Path:
    run = Run(directory)
    client = run.process("client", None, 7, "minivllm.client")
    text = "</script><script>document.title='owned'</script><!-- &amp; @DATA@ @SCRIPT@ \u2028 <img src=x onerror=alert(1)>"
    client.span("run", 0, 10, model=text, error=text, note=text, events=[(text, 1, {"x": text})])
    return run.write()


def test_the_page_is_one_file_without_network(store: TraceStore) -> None:
    page = encode_page(store).decode()
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)\s*=|@import|url\(", page)
    assert "@TITLE@" not in page and "@STYLE@" not in page and "@SCRIPT@" not in page


def test_what_the_trace_says_is_never_markup(tmp_path: Path) -> None:
    page = encode_page(TraceStore.open(hostile(tmp_path / "trace"))).decode()
    assert page.count("<script") == 2 and page.count("</script>") == 2 and "<img" not in page
    data = page_data(page.encode())
    assert "onerror=alert(1)" in data["spans"][0][12], "and nothing of it is lost"


def in_chromium(page: bytes, directory: Path, script: str = "", fragment: str = "") -> str:
    """The document after the page has run, and then a script of the test within it."""
    # Frames by the virtual clock, as everything else here: those of the compositor come by the real one, and on a
    # busy machine not one of them may come before the virtual budget is spent.
    head = "<script>window.requestAnimationFrame = (frame) => setTimeout(frame, 16);</script>"
    # The script waits for what the page does in animation frames.
    tail = f"<script>setTimeout(() => {{ {script} }}, 400);</script></html>"
    assert page.count(b"<head>") == page.count(b"</html>") == 1
    file = directory / "page.html"
    file.write_bytes(page.replace(b"<head>", f"<head>{head}".encode()).replace(b"</html>", tail.encode()))
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={directory / 'profile'}",
        "--window-size=1200,800",
        "--virtual-time-budget=3000",
        "--enable-logging=stderr",
        "--dump-dom",
        f"file://{file}{fragment}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "CONSOLE" not in done.stderr or "Uncaught" not in done.stderr, done.stderr
    return done.stdout


@needs_chromium
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    store = TraceStore.open(recorded(KILLED))
    call = store.spans("rpc.call")[0]
    script = """
      const report = {}, view = document.getElementById("view"), search = document.getElementById("search");
      const press = (key) => view.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
      const title = () => document.querySelector("#details h2").textContent;
      report.selected = title();
      press("ArrowUp"); report.parent = title();
      press("f"); report.failure = document.querySelector("#details .error").textContent;
      press("f"); press("F"); press("0"); press("+"); press("d"); press("z");
      search.value = "SEQ=2"; search.dispatchEvent(new Event("input"));
      report.found = document.getElementById("matches").textContent;
      document.getElementById("next").click(); report.match = document.getElementById("details").textContent;
      const level = document.getElementById("level"); level.value = "1"; level.dispatchEvent(new Event("change"));
      document.getElementById("failure").click(); report.first = document.querySelector("#details .error").textContent;
      const canvas = document.getElementById("canvas");
      for (const type of ["pointermove", "dblclick", "wheel"]) canvas.dispatchEvent(new MouseEvent(type, { clientX: 500, clientY: 300, bubbles: true }));
      setTimeout(() => {
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      report.colors = new Set(Array.from({ length: pixels.length / 400 }, (_, i) => pixels.slice(i * 400, i * 400 + 3).join())).size;
      document.body.dataset.report = JSON.stringify(report);
      }, 400);
    """
    dom = in_chromium(encode_page(store), tmp_path, script, f"#span={call.span_id}")
    assert f'data-ready="{len(store.spans())}"' in dom
    found = re.search(r'data-report="([^"]*)"', dom)
    assert found, dom[-3000:]
    report = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert report["selected"].startswith("rpc.call ")
    parent = store.parent(call)
    assert parent is not None and report["parent"] == parent.name
    assert report["failure"] and "killed by SIGKILL" in report["first"]
    assert re.fullmatch(r"\d+ found", report["found"]) and "seq2" in report["match"]
    assert report["colors"] > 4, "something is drawn"


@needs_chromium
def test_a_hostile_trace_stays_text_in_a_browser(tmp_path: Path) -> None:
    page = encode_page(TraceStore.open(hostile(tmp_path / "trace")))
    dom = in_chromium(page, tmp_path, 'document.getElementById("failure").click();')
    assert 'data-ready="1"' in dom and "<title>minivllm run of" in dom and "owned</title>" not in dom
    assert "onerror=alert(1)&gt;" in dom.split('id="details"')[1]


# --- the command


def test_several_outputs_in_one_call(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("html", "perfetto", "jaeger-json", "otlp-json")}
    done = export(str(recorded()), *(part for name, file in files.items() for part in (f"--{name}", file)))
    assert done.returncode == 0, done.stderr
    assert all(Path(file).stat().st_size > 1000 for file in files.values())
    assert done.stderr.decode().count("wrote ") == 4 and done.stdout == b""


def test_standard_output() -> None:
    done = export(str(recorded()), "--perfetto", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["traceEvents"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--html", "-", "--perfetto", "-"], "same file"),
        ([], "say where to"),
        (["--html", "/nowhere/x.html"], "there is no folder /nowhere"),
        (["--html", "/proc/x.html"], "no file can be made in /proc"),
    ],
)
def test_impossible_outputs(args: list[str], said: str) -> None:
    done = export(str(recorded()), *args)
    assert done.returncode == 2 and said in done.stderr.decode() and b"Traceback" not in done.stderr


# --- endpoints


class Receiver:
    """A small OTLP/HTTP receiver that keeps what it is sent."""

    def __init__(self, answer: bytes = b"", status: int = 200, delay_s: float = 0) -> None:
        requests = self.requests = []  # type: list[tuple[str, dict[str, str], bytes]]

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                requests.append((self.path, dict(self.headers), body))
                time.sleep(delay_s)
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *args: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def receiving(*args: Any, **kwargs: Any) -> Iterator[Receiver]:
    receiver = Receiver(*args, **kwargs)
    try:
        yield receiver
    finally:
        receiver.close()


def check_protobuf(messages: list[Any], store: TraceStore) -> None:
    """Everything about every span, decoded with opentelemetry-proto."""
    found = {}
    for message in messages:
        for group in message.resource_spans:
            service = next(a.value.string_value for a in group.resource.attributes if a.key == "service.name")
            for scope in group.scope_spans:
                for span in scope.spans:
                    found[span.span_id.hex()] = (service, span)
    assert set(found) == {span.span_id for span in store.spans()}
    for wanted in store.spans():
        service, span = found[wanted.span_id]
        assert service == wanted.process.service
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
            wanted.name,
            wanted.trace_id,
            wanted.parent_span_id,
        )
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (wanted.start_ns, wanted.end_ns)
        assert (span.status.code == 2) == wanted.is_error and span.status.message == wanted.status_message
        assert [link.span_id.hex() for link in span.links] == [link.span_id for link in wanted.links]
        assert [event.name for event in span.events] == [event.name for event in wanted.events]
        assert {a.key: _plain(a.value) for a in span.attributes} == wanted.attributes


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)


def test_http_json() -> None:
    store = TraceStore.open(recorded(KILLED))
    with receiving(b"{}") as receiver:
        done = export(str(recorded(KILLED)), "--otlp", receiver.url, OTEL_EXPORTER_OTLP_HEADERS="x-key=a%20b")
    assert done.returncode == 0, done.stderr
    assert f"sent {len(store.spans()):,} spans" in done.stderr.decode()
    ids = {
        span["spanId"]
        for _, _, body in receiver.requests
        for group in json.loads(body)["resourceSpans"]
        for span in group["scopeSpans"][0]["spans"]
    }
    assert ids == {span.span_id for span in store.spans()}
    path, headers, _ = receiver.requests[0]
    assert (
        path == "/v1/traces" and headers["Content-Type"] == "application/json" and headers["x-key"] == "a b"
    )


def test_http_protobuf() -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    with receiving() as receiver:
        done = export(
            str(recorded(KILLED)), "--otlp", receiver.url, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf"
        )
    assert done.returncode == 0, done.stderr
    assert {headers["Content-Type"] for _, headers, _ in receiver.requests} == {"application/x-protobuf"}
    messages = [service.ExportTraceServiceRequest.FromString(body) for _, _, body in receiver.requests]
    check_protobuf(messages, TraceStore.open(recorded(KILLED)))


@contextlib.contextmanager
def grpc_server(delay_s: float = 0) -> Iterator[tuple[str, list[Any]]]:
    grpc = pytest.importorskip("grpc")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    stubs = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    received: list[Any] = []

    class Servicer(stubs.TraceServiceServicer):  # type: ignore[misc, name-defined]
        def Export(self, request: Any, context: Any) -> Any:
            time.sleep(delay_s)
            received.append(request)
            return service.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    stubs.add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        server.stop(0).wait()


def test_grpc() -> None:
    with grpc_server() as (url, received):
        done = export(str(recorded(KILLED)), "--otlp", url, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert done.returncode == 0, done.stderr
    check_protobuf(received, TraceStore.open(recorded(KILLED)))


def test_live_export_by_grpc(tmp_path: Path) -> None:
    """The same receiver takes what a running process sends."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    code = (
        "import sys\nfrom minivllm import tracing\n"
        "tracing.configure('client', trace_dir=sys.argv[1], level='rpc')\n"
        "with tracing.span('run'), tracing.span('request'): pass\n"
        "tracing.shutdown()\n"
    )
    with grpc_server() as (url, received):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "trace")],
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0 and not done.stderr, done.stderr
    names = [s.name for m in received for g in m.resource_spans for c in g.scope_spans for s in c.spans]
    assert sorted(names) == ["request", "run"]


@pytest.mark.parametrize("protocol", ["http/json", "http/protobuf", "grpc"])
def test_a_refused_endpoint_is_one_line_in_time_and_loses_nothing(protocol: str, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        begin = time.monotonic()
        done = export(
            str(recorded()),
            "--otlp",
            url,
            "--otlp-json",
            str(tmp_path / "run.json"),
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        )
        elapsed = time.monotonic() - begin
    assert done.returncode == 1 and elapsed < 20
    lines = done.stderr.decode().splitlines()
    assert lines[-1].startswith("minivllm: error: ") and "cannot be reached" in lines[-1] and len(lines) == 2
    assert (tmp_path / "run.json").stat().st_size > 1000, "the file is written all the same"


def test_a_silent_endpoint_ends_in_time() -> None:
    """Both protocols at once, since all of it is waiting."""
    directory, protocols = str(recorded()), ("http/json", "grpc")
    with socket.socket() as silent, futures.ThreadPoolExecutor(2) as pool:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        def run(protocol: str) -> tuple[float, subprocess.CompletedProcess[bytes]]:
            begin = time.monotonic()
            done = export(directory, "--otlp", url, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
            return time.monotonic() - begin, done

        ended = dict(zip(protocols, pool.map(run, protocols), strict=True))
    for protocol, (elapsed, done) in ended.items():
        assert done.returncode == 1 and 4 < elapsed < 25, protocol
        assert b"did not answer within 5 s" in done.stderr or (
            protocol == "grpc" and b"cannot be reached" in done.stderr
        )
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (b"no such thing\nmore", 404, "refused the trace: HTTP 404"),
        (
            b'{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too old"}}',
            200,
            "rejected 3 spans: too old",
        ),
    ],
)
def test_what_an_endpoint_refuses_is_said(answer: bytes, status: int, said: str) -> None:
    with receiving(answer, status) as receiver:
        done = export(str(recorded()), "--otlp", receiver.url)
    assert done.returncode == 1 and said in done.stderr.decode() and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "protocol", "said"),
    [
        ("localhost:4318", "http/json", "not an http:// or https:// URL"),
        ("http://localhost:port", "grpc", "not a URL"),
        ("http://localhost", "smoke", "is not one of http/json, http/protobuf, grpc"),
    ],
)
def test_addresses_and_protocols_that_are_none(url: str, protocol: str, said: str) -> None:
    done = export(str(recorded()), "--otlp", url, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    assert done.returncode == 2 and said in done.stderr.decode()
