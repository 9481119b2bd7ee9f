"""OpenTelemetry: conversion to SDK spans, live OTLP export, a caller's own trace."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from minivllm import tracing
from minivllm.tracing.process import clock
from minivllm.tracing.recorder import recorder
from tests.tracing_helpers import recording, run_script, store_of


class Receiver:
    """A small OTLP/HTTP receiver that keeps what it is sent."""

    def __init__(self, status: int = 200) -> None:
        requests = self.requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                requests.append((self.path, dict(self.headers), body))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def protobuf_spans(self) -> dict[str, str]:
        """Span name -> service name, decoded with opentelemetry-proto."""
        found = {}
        for _, headers, body in self.requests:
            assert headers["Content-Type"] == "application/x-protobuf"
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {item.key: item.value.string_value for item in group.resource.attributes}
                for scope in group.scope_spans:
                    found.update((span.name, resource["service.name"]) for span in scope.spans)
        return found


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


RUN = """
import multiprocessing
from minivllm import tracing

def worker():
    tracing.configure("worker", rank=0, label="tp0")
    with tracing.span("worker.main"), tracing.span("rpc.execute", n=1):
        pass

if __name__ == "__main__":
    tracing.configure("client", trace_dir=DIR, level="rpc")
    with tracing.span("run"), tracing.child_environment():
        child = multiprocessing.get_context("spawn").Process(target=worker)
        child.start()
        child.join()
    begin = time.monotonic()
    tracing.shutdown()
    print(f"{time.monotonic() - begin:.3f}")
"""


def test_live_export_in_protobuf(tmp_path: Path, receiver: Receiver) -> None:
    result = run_script(
        tmp_path,
        RUN,
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
        OTEL_EXPORTER_OTLP_HEADERS="x-key=a%20b",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test,service.name=not-this,bad",
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert receiver.protobuf_spans() == {
        "run": "minivllm.client",
        "worker.main": "minivllm.worker.tp0",
        "rpc.execute": "minivllm.worker.tp0",
    }
    path, headers, body = receiver.requests[0]
    assert path == "/v1/traces" and headers["x-key"] == "a b"
    resource = ExportTraceServiceRequest.FromString(body).resource_spans[0].resource.attributes
    assert {item.key: item.value.string_value for item in resource}["deployment.environment.name"] == "test"
    assert len(store_of(tmp_path).spans()) == 3


def test_live_export_in_json(tmp_path: Path, receiver: Receiver) -> None:
    result = run_script(
        tmp_path,
        RUN,
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=receiver.url + "/here",
        OTEL_EXPORTER_OTLP_PROTOCOL="http/json",
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert {path for path, _, _ in receiver.requests} == {"/here"}
    names = {
        span["name"]
        for _, _, body in receiver.requests
        for span in json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    }
    assert names == {"run", "worker.main", "rpc.execute"}


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
def test_live_export_can_be_switched_off(
    tmp_path: Path, receiver: Receiver, variables: dict[str, str]
) -> None:
    result = run_script(tmp_path, RUN, **{"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, **variables})
    assert result.returncode == 0 and result.stderr == ""
    assert receiver.requests == []
    assert len(store_of(tmp_path).spans()) == 3


def test_refused_endpoint_costs_one_line(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        result = run_script(tmp_path, RUN, OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert result.returncode == 0
    warnings = result.stderr.splitlines()
    assert len(warnings) == 2  # one for each process
    assert all("live trace export" in line and "refused" in line for line in warnings)
    assert float(result.stdout) < 1
    assert len(store_of(tmp_path).spans()) == 3


def test_silent_endpoint_delays_nothing(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)  # accepts, and never answers
        begin = time.monotonic()
        result = run_script(
            tmp_path,
            RUN.replace('child.join()\n', 'child.join()\n        for n in range(50):\n'
                        '            with tracing.span("rpc.call"): time.sleep(0.01)\n'),
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}",
        )  # fmt: skip
        elapsed = time.monotonic() - begin
    assert result.returncode == 0
    assert float(result.stdout) < 1
    assert elapsed < 20
    calls = store_of(tmp_path).spans("rpc.call")
    assert len(calls) == 50 and max(span.duration_ns for span in calls) < 900e6


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}, "OTEL_EXPORTER_OTLP_PROTOCOL=smoke is not"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, "is not an http:// or https:// address"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "only otlp, console and none"),
    ],
)
def test_settings_that_cannot_be_honoured_cost_a_line(
    tmp_path: Path, variables: dict[str, str], line: str
) -> None:
    result = run_script(tmp_path, RUN, **{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", **variables})
    assert result.returncode == 0
    assert [line in text for text in result.stderr.splitlines()] == [True, True]


def test_server_error_is_a_failure(tmp_path: Path) -> None:
    receiver = Receiver(status=503)
    result = run_script(tmp_path, RUN, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
    receiver.server.shutdown()
    receiver.server.server_close()
    assert "HTTP 503" in result.stderr


def test_any_exporter_of_the_sdk_takes_the_spans(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    exporter = InMemorySpanExporter()
    with recording(tmp_path):
        tracing.add_exporter(exporter)
        with tracing.span("run") as run:
            with (
                contextlib.suppress(ValueError),
                tracing.span("rpc.call", seq=3, mixed=[1, "a"]) as call,
            ):
                call.link(run.context)
                raise ValueError("no")
            packed = call.context
            wall = clock.wall_ns(time.monotonic_ns())
        assert not recorder.idle
    call, run = exporter.get_finished_spans()
    assert (call.name, run.name) == ("rpc.call", "run")
    assert call.parent.span_id == run.context.span_id and run.parent is None
    assert call.context.trace_id == run.context.trace_id
    assert call.context.span_id.to_bytes(8, "big") == packed[16:24]
    assert call.kind is SpanKind.CLIENT
    assert call.status.status_code is StatusCode.ERROR and call.status.description == "ValueError: no"
    assert call.attributes["minivllm.seq"] == 3 and call.attributes["minivllm.mixed"] == ["1", "a"]
    assert call.attributes["thread.name"] == "MainThread"
    assert call.events[0].name == "exception"
    assert call.links[0].context.span_id == run.context.span_id
    assert abs(call.start_time - wall) < 60e9
    assert call.resource.attributes["service.name"] == "minivllm.client"
    assert json.loads(call.to_json())["name"] == "rpc.call"


def test_run_within_a_callers_opentelemetry_span(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from minivllm import tracing
        trace.set_tracer_provider(TracerProvider())
        tracing.configure("client", trace_dir=DIR, level="rpc")
        with trace.get_tracer("caller").start_as_current_span("outer") as outer:
            with tracing.span("run"), tracing.span("rpc.call"):
                pass
            print(f"{outer.get_span_context().trace_id:032x} {outer.get_span_context().span_id:016x}")
        """,
        TRACEPARENT=f"00-{'c' * 32}-{'d' * 16}-01",  # the active span says more than the environment
    )
    trace_id, span_id = result.stdout.split()
    store = store_of(tmp_path)
    assert store.root is not None
    assert (store.trace_id, store.root.parent_span_id) == (trace_id, span_id)
    assert store.orphans() == []
