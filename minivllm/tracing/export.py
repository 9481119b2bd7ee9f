"""Live export: spans go to an OTLP endpoint while the run goes on, from a thread that nothing ever waits for long.

vLLM 0.25.1: vllm/tracing/otel.py (init_otel_tracer, get_span_exporter)
Articles: none

Deviation from vLLM: the standard OTEL_* variables decide, each request is bounded in time, and an endpoint that
does not answer costs one warning line, at most a second at shutdown, and nothing in between.
"""

from __future__ import annotations

import http.client
import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from minivllm import __version__
from minivllm.tracing import encode
from minivllm.tracing.process import identity

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from minivllm.tracing.spans import Span

logger = logging.getLogger(__name__)
THREAD_NAME = "minivllm-trace-export"
MAX_PENDING_SPANS = 65_536
BATCH_SPANS = 512
REQUEST_TIMEOUT_S = 1.0
RETRY_AFTER_S = 1.0
CLOSE_TIMEOUT_S = 0.8

Send = Callable[["list[Span]"], None]
"""Sends one batch; raises whatever when it could not."""


class LiveExport:
    """A sink of the recorder: takes spans at once, sends them from its own thread."""

    def __init__(self, send: Send, target: str) -> None:
        self._send = send
        self._target = target
        self._pending: deque[Span] = deque(maxlen=MAX_PENDING_SPANS)  # the oldest go when nobody takes them
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._warned = self._failing = False
        self._thread: threading.Thread | None = None

    def __call__(self, spans: list[Span]) -> None:
        self._pending.extend(spans)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down: close() sends what it can
                return
            self._thread = thread
        self._wake.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._wake.clear()
            while self._pending and not self._closing.is_set():
                if not self._send_batch():
                    self._closing.wait(RETRY_AFTER_S)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._pending and not self._failing and time.monotonic() < deadline:
            self._send_batch()

    def _send_batch(self) -> bool:
        batch = [self._pending.popleft() for _ in range(min(BATCH_SPANS, len(self._pending)))]
        try:
            self._send(batch)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "live trace export to %s failed: %s: %s", self._target, type(error).__name__, error
                )
            self._failing = True
            self._pending.extendleft(reversed(batch))
            return False
        self._failing = False
        return True

    def close(self) -> None:
        """Send what is left, for CLOSE_TIMEOUT_S at most; an endpoint that failed last time gets no further try."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None and not self._failing:
            self._thread.join(CLOSE_TIMEOUT_S)


def through_exporter(exporter: SpanExporter) -> Send:
    """Send through an exporter made for the OpenTelemetry SDK."""

    def send(spans: list[Span]) -> None:
        from minivllm.tracing.otel import to_readable_spans

        result = exporter.export(to_readable_spans(spans))
        if result.name != "SUCCESS":
            raise ConnectionError(f"the exporter answered {result.name}")

    return send


def _variable(name: str, default: str = "") -> str:
    """A setting for traces, else the one for all signals."""
    return (
        os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
        or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")
        or default
    )


def exports_from_environment() -> list[LiveExport]:
    """The live exports that the standard OTEL_* variables ask for; what cannot be done costs one warning line."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "").replace(" ", "").lower()
    names = wanted.split(",") if wanted else ["otlp"] if _variable("ENDPOINT") else []
    exports = []
    for name in names:
        try:
            if name == "otlp":
                exports.append(_otlp())
            elif name == "console":
                from opentelemetry.sdk.trace.export import ConsoleSpanExporter

                exports.append(LiveExport(through_exporter(ConsoleSpanExporter()), "the console"))
            elif name != "none":
                logger.warning("OTEL_TRACES_EXPORTER=%s: only otlp, console and none are supported", name)
        except (ImportError, ValueError) as error:
            logger.warning("no live trace export: %s", error)
    return exports


def _otlp() -> LiveExport:
    protocol = _variable("PROTOCOL", "http/protobuf").lower()
    if protocol == "grpc":
        return _grpc()
    if protocol not in ("http/protobuf", "http/json"):
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not http/protobuf, http/json or grpc")
    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (
        _variable("ENDPOINT", "http://localhost:4318").rstrip("/") + "/v1/traces"
    )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is not an http:// or https:// address")
    # Every OTLP/HTTP receiver takes JSON, too, which needs no further package.
    protobuf = protocol == "http/protobuf" and _has_protobuf_encoder()
    return LiveExport(_http_sender(url, "application/x-protobuf" if protobuf else "application/json"), url)


def _has_protobuf_encoder() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.common") is not None
    except ModuleNotFoundError:
        return False


def _http_sender(url: str, content_type: str) -> Send:
    parts = urlsplit(url)
    headers = {"Content-Type": content_type, "User-Agent": f"minivllm/{__version__}"}
    for pair in _variable("HEADERS").split(","):
        name, sign, value = pair.partition("=")
        if sign:
            headers[name.strip()] = unquote(value.strip())
    connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def send(spans: list[Span]) -> None:
        body = _protobuf(spans) if content_type.endswith("protobuf") else _json(spans)
        connection = connection_type(parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            response.read()
            if response.status >= 300:
                raise ConnectionError(f"HTTP {response.status} {response.reason}")
        finally:
            connection.close()

    return send


def _json(spans: list[Span]) -> bytes:
    return encode.line(encode.resource(identity.resource()), [encode.span(span) for span in spans])


def _protobuf(spans: list[Span]) -> bytes:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    from minivllm.tracing.otel import to_readable_spans

    body: bytes = encode_spans(to_readable_spans(spans)).SerializeToString()
    return body


def _grpc() -> LiveExport:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ImportError("OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs `pip install minivllm[otlp]`") from None
    endpoint = _variable("ENDPOINT", "http://localhost:4317")
    # The exporter logs each failure; ours is the one line that is wanted.
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").setLevel(logging.CRITICAL)
    return LiveExport(
        through_exporter(OTLPSpanExporter(endpoint=endpoint, timeout=REQUEST_TIMEOUT_S)), endpoint
    )
