"""A real Jaeger, when there is one: MINIVLLM_JAEGER_URL names its UI, such as http://localhost:16686.

MINIVLLM_JAEGER_OTLP and MINIVLLM_JAEGER_OTLP_GRPC name its OTLP ports (default: 4318 and 4317 of the same host).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from real_runs import TESTS, recorded

from minivllm.trace_store import TraceStore

URL = os.environ.get("MINIVLLM_JAEGER_URL", "").rstrip("/")
HOST = urlsplit(URL).hostname or "localhost"
OTLP = {
    "http/json": os.environ.get("MINIVLLM_JAEGER_OTLP", f"http://{HOST}:4318"),
    "http/protobuf": os.environ.get("MINIVLLM_JAEGER_OTLP", f"http://{HOST}:4318"),
    "grpc": os.environ.get("MINIVLLM_JAEGER_OTLP_GRPC", f"http://{HOST}:4317"),
}
# Each protocol sends a run of its own: Jaeger would merge two copies of one trace.
RUNS = {"http/json": "", "http/protobuf": "run@client=sleep:0.01", "grpc": "rpc.execute@rank1#6=kill"}
ARRIVAL_S = 30.0

pytestmark = pytest.mark.skipif(not URL, reason="MINIVLLM_JAEGER_URL is not set")


def get(path: str, **query: str) -> Any:
    address = f"{URL}/api/v3/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    with urllib.request.urlopen(address, timeout=10) as response:
        return json.load(response)


def spans_in_jaeger(trace_id: str) -> list[tuple[str, dict[str, Any]]]:
    """(service, span) of everything that Jaeger has of a trace; empty as long as it has nothing."""
    try:
        answer = get(f"traces/{trace_id}")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []
        raise
    return [
        (
            next(
                a["value"]["stringValue"]
                for a in group["resource"]["attributes"]
                if a["key"] == "service.name"
            ),
            s,
        )
        for group in answer["result"]["resourceSpans"]
        for scope in group["scopeSpans"]
        for s in scope["spans"]
    ]


@pytest.mark.parametrize("protocol", RUNS)
def test_jaeger_has_every_span(protocol: str) -> None:
    directory = recorded(RUNS[protocol], pp=2 if protocol == "http/json" else 1)
    subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", "export", str(directory), "--otlp", OTLP[protocol]],
        env={**os.environ, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol},
        check=True,
        timeout=60,
    )
    check(TraceStore.open(directory))


def test_jaeger_has_every_span_of_a_run_that_sends_them_as_it_goes_on(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MINIVLLM_T", "MINIVLLM_F", "OTEL_"))}
    env |= {"OTEL_EXPORTER_OTLP_ENDPOINT": OTLP["http/json"], "PYTHONPATH": str(TESTS)}
    script, trace = TESTS / "real_runs.py", tmp_path / "trace"
    subprocess.run([sys.executable, str(script), str(trace)], env=env, check=True, timeout=120)
    check(TraceStore.open(trace))


def check(store: TraceStore) -> None:
    """Jaeger has this run: every span, one root, no orphan, a service per role."""
    # The collector batches.
    deadline = time.monotonic() + ARRIVAL_S
    while len(found := spans_in_jaeger(store.trace_id)) < len(store.spans()) and time.monotonic() < deadline:
        time.sleep(0.5)
    ids = {span["spanId"] for _, span in found}
    assert ids == {span.span_id for span in store.spans()}
    roots = [span for _, span in found if not span.get("parentSpanId")]
    assert [span["name"] for span in roots] == ["run"]
    orphans = [s["name"] for _, s in found if s.get("parentSpanId") and s["parentSpanId"] not in ids]
    assert not orphans
    services = {service for service, _ in found}
    assert services == {process.service for process in store.processes()}
    assert services <= set(get("services")["services"])
