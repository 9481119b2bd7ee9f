"""Sending a recorded run to an OTLP endpoint: Jaeger or any collector, over HTTP or gRPC, in a bounded time.

vLLM 0.25.1: vllm/tracing/otel.py (get_span_exporter)
Articles: –

OTEL_EXPORTER_OTLP_TRACES_PROTOCOL and OTEL_EXPORTER_OTLP_PROTOCOL choose between http/json (the default, which needs
no further package), http/protobuf and grpc; OTEL_EXPORTER_OTLP_HEADERS is sent along.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from minivllm.exceptions import ConfigError
from minivllm.trace_export.errors import ExportError
from minivllm.trace_store import TraceStore

if TYPE_CHECKING:
    from http.client import HTTPConnection

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TIMEOUT_S = 5.0
PROTOCOLS = ("http/json", "http/protobuf", "grpc")
# Collectors refuse bodies above a limit, gRPC servers those above 4 MiB.
_SPANS_PER_REQUEST = 1000
_BYTES_PER_REQUEST = 1 << 20


class Sender(Protocol):
    """Sends requests to one endpoint.

    Attributes:
        url: where they go, for messages.
    """

    url: str

    def send(self, request: dict[str, Any]) -> None:
        """Send one piece, an ExportTraceServiceRequest in OTLP/JSON.

        Raises:
            ExportError: the endpoint cannot be reached, is too slow, or refuses.
        """

    def close(self) -> None: ...


def make_sender(endpoint: str) -> Sender:
    """A sender for an address and the protocol that the environment names.

    Raises:
        ConfigError: the address or the protocol is none, or a package is missing.
    """
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or PROTOCOLS[0]
    ).lower()
    if protocol not in PROTOCOLS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not one of {', '.join(PROTOCOLS)}")
    example = "http://localhost:4317" if protocol == "grpc" else "http://localhost:4318"
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        raise ConfigError(f"--otlp {endpoint}: not a URL; use {example}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp {endpoint}: not an http:// or https:// URL; use {example}")
    if protocol == "grpc":
        return _GrpcSender(parts, port or 4317)
    return _HttpSender(parts, protocol == "http/protobuf")


def send_store(store: TraceStore, sender: Sender) -> int:
    """Send all spans, process by process and in pieces; returns their number.

    Raises:
        ExportError: see Sender.send().
    """
    count = 0
    try:
        for request in _pieces(store):
            sender.send(request)
            count += len(request["resourceSpans"][0]["scopeSpans"][0]["spans"])
    finally:
        sender.close()
    return count


def _pieces(store: TraceStore) -> Iterator[dict[str, Any]]:
    for group in store.to_otlp()["resourceSpans"]:
        batch: list[Any] = []
        size = 0
        for span in group["scopeSpans"][0]["spans"]:
            length = len(msgspec.json.encode(span))
            if batch and (len(batch) == _SPANS_PER_REQUEST or size + length > _BYTES_PER_REQUEST):
                yield _request(group, batch)
                batch, size = [], 0
            batch.append(span)
            size += length
        if batch:
            yield _request(group, batch)


def _request(group: dict[str, Any], spans: list[Any]) -> dict[str, Any]:
    scope = {"scope": group["scopeSpans"][0]["scope"], "spans": spans}
    return {"resourceSpans": [{"resource": group["resource"], "scopeSpans": [scope]}]}


def _headers() -> dict[str, str]:
    """What OTEL_EXPORTER_OTLP_HEADERS says: `name=value` pairs, percent-encoded."""
    text = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or os.environ.get(
        "OTEL_EXPORTER_OTLP_HEADERS", ""
    )
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, sign, value in pairs if sign}


def _refuse_partly(url: str, rejected: int, message: str) -> None:
    if rejected:
        raise ExportError(f"{url} rejected {rejected} spans: {message or 'it does not say why'}")


class _HttpSender:
    def __init__(self, parts: SplitResult, protobuf: bool) -> None:
        import http.client

        self._protobuf = protobuf
        if protobuf:
            _need_protobuf("http/protobuf")
        # As the OTLP specification has it: the endpoint is a base, the signal's path is added.
        base = parts.path.rstrip("/")
        path = base if base.endswith("/v1/traces") else base + "/v1/traces"
        self._path = path + (f"?{parts.query}" if parts.query else "")
        self.url = f"{parts.scheme}://{parts.netloc}{path}"
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection: HTTPConnection = make(parts.hostname or "", parts.port, timeout=TIMEOUT_S)

    def send(self, request: dict[str, Any]) -> None:
        import http.client

        if self._protobuf:
            body, content_type = to_protobuf(request).SerializeToString(), "application/x-protobuf"
        else:
            body, content_type = msgspec.json.encode(request), "application/json"
        connection = self._connection
        try:
            connection.request("POST", self._path, body, {**_headers(), "Content-Type": content_type})
            response = connection.getresponse()
            answer = response.read()
        except TimeoutError:
            raise ExportError(
                f"{self.url} did not answer within {TIMEOUT_S:.0f} s; is it an OTLP/HTTP endpoint?"
            ) from None
        except (OSError, http.client.HTTPException) as e:
            reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
            raise ExportError(
                f"{self.url} cannot be reached ({reason}); start Jaeger or a collector there, or check the address"
            ) from None
        if response.status >= 300:
            text = answer.decode("utf-8", "replace").strip()
            first = text.splitlines()[0][:200] if text else "no text"
            raise ExportError(
                f"{self.url} refused the trace: HTTP {response.status} {response.reason}: {first}"
            )
        self._check(answer)

    def _check(self, answer: bytes) -> None:
        """A collector may take a part only, and says so with HTTP 200."""
        if self._protobuf:
            from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

            partial = ExportTraceServiceResponse.FromString(answer).partial_success
            _refuse_partly(self.url, partial.rejected_spans, partial.error_message)
            return
        try:
            said = msgspec.json.decode(answer).get("partialSuccess") or {}
            _refuse_partly(self.url, int(said.get("rejectedSpans", 0)), str(said.get("errorMessage", "")))
        except (msgspec.MsgspecError, AttributeError, ValueError):
            pass  # an answer that is no JSON object says nothing about a part

    def close(self) -> None:
        self._connection.close()


class _GrpcSender:
    def __init__(self, parts: SplitResult, port: int) -> None:
        _need_protobuf("grpc")
        try:
            import grpc
            from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
        except ImportError:
            raise ConfigError("OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs `pip install minivllm[otlp]`") from None
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        target = f"{host}:{port}"
        self.url = f"{parts.scheme}://{target}"
        self._channel = (
            grpc.secure_channel(target, grpc.ssl_channel_credentials())
            if parts.scheme == "https"
            else grpc.insecure_channel(target)
        )
        make_stub: Any = TraceServiceStub
        self._stub = make_stub(self._channel)

    def send(self, request: dict[str, Any]) -> None:
        import grpc

        metadata = [(name.lower(), value) for name, value in _headers().items()]
        try:
            response = self._stub.Export(to_protobuf(request), timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or "it does not say why"
            if code is grpc.StatusCode.UNAVAILABLE:
                raise ExportError(
                    f"{self.url} cannot be reached ({details}); start Jaeger or a collector there, or check the address"
                ) from None
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ExportError(
                    f"{self.url} did not answer within {TIMEOUT_S:.0f} s; is it an OTLP/gRPC endpoint?"
                ) from None
            raise ExportError(f"{self.url} refused the trace: {code.name}: {details}") from None
        partial = response.partial_success
        _refuse_partly(self.url, partial.rejected_spans, partial.error_message)

    def close(self) -> None:
        self._channel.close()


def _need_protobuf(protocol: str) -> None:
    try:
        import opentelemetry.proto.collector.trace.v1.trace_service_pb2  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} needs `pip install minivllm[otlp]`"
        ) from None


def to_protobuf(request: dict[str, Any]) -> ExportTraceServiceRequest:
    """The same request as a protobuf message; json_format cannot do it, since OTLP/JSON has ids in hex."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest()
    for group in request["resourceSpans"]:
        target = message.resource_spans.add()
        _set_attributes(target.resource.attributes, group["resource"].get("attributes", ()))
        for scope in group["scopeSpans"]:
            scope_target = target.scope_spans.add()
            scope_target.scope.name = scope["scope"].get("name", "")
            scope_target.scope.version = scope["scope"].get("version", "")
            for span in scope["spans"]:
                _set_span(scope_target.spans.add(), span)
    return message


def _set_span(target: Any, span: dict[str, Any]) -> None:
    target.trace_id = bytes.fromhex(span["traceId"])
    target.span_id = bytes.fromhex(span["spanId"])
    target.parent_span_id = bytes.fromhex(span.get("parentSpanId", ""))
    target.name = span["name"]
    target.kind = span.get("kind", 0)
    target.start_time_unix_nano = int(span["startTimeUnixNano"])
    target.end_time_unix_nano = int(span["endTimeUnixNano"])
    _set_attributes(target.attributes, span.get("attributes", ()))
    for event in span.get("events", ()):
        note = target.events.add()
        note.name = event["name"]
        note.time_unix_nano = int(event.get("timeUnixNano", 0))
        _set_attributes(note.attributes, event.get("attributes", ()))
    for link in span.get("links", ()):
        reference = target.links.add()
        reference.trace_id = bytes.fromhex(link.get("traceId") or span["traceId"])
        reference.span_id = bytes.fromhex(link["spanId"])
    status = span.get("status") or {}
    target.status.code = status.get("code", 0)
    target.status.message = status.get("message", "")


def _set_attributes(target: Any, items: Any) -> None:
    for item in items:
        entry = target.add()
        entry.key = item["key"]
        _set_value(entry.value, item.get("value") or {})


def _set_value(target: Any, value: dict[str, Any]) -> None:
    for kind, content in value.items():
        if kind == "stringValue":
            target.string_value = content
        elif kind == "boolValue":
            target.bool_value = content
        elif kind == "intValue":
            target.int_value = int(content)
        elif kind == "doubleValue":
            target.double_value = float(content)
        elif kind == "arrayValue":
            # An empty list is a value, too.
            target.array_value.SetInParent()
            for item in content.get("values", ()):
                _set_value(target.array_value.values.add(), item)
        elif kind == "kvlistValue":
            target.kvlist_value.SetInParent()
            _set_attributes(target.kvlist_value.values, content.get("values", ()))
