"""`minivllm export DIR`: send a recorded run to Jaeger or any OTLP collector, or merge it into one file.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from minivllm.cli import common

if TYPE_CHECKING:
    from http.client import HTTPConnection

    from minivllm.trace_store import TraceStore

_SPANS_PER_REQUEST = 1000
_TIMEOUT_S = 5.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        parents=[common.options()],
        help="send a recorded run to Jaeger, or merge it into one OTLP/JSON file",
        description="Send a recorded run to Jaeger or another OTLP collector, or merge the files of its processes into one.",
    )
    parser.add_argument("directory", metavar="DIR", help="the trace directory of the run")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--otlp", metavar="URL", help="an OTLP/HTTP endpoint, such as http://localhost:4318")
    target.add_argument(
        "--otlp-json", metavar="FILE", help="one OTLP/JSON file; Jaeger's upload takes it (- for stdout)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minivllm.cli.timeline import open_store

    # An address that cannot work is refused before a large trace is read.
    sender = _Sender(args.otlp) if args.otlp else None
    store = open_store(args.directory)
    if sender is not None:
        sender.send(store)
        print(f"sent {len(store.spans()):,} spans of trace {store.trace_id} to {sender.url}", file=sys.stderr)
    elif args.otlp_json == "-":
        sys.stdout.buffer.write(store.encode_otlp() + b"\n")
    else:
        store.write_otlp_json(args.otlp_json)
        print(f"wrote {args.otlp_json} ({len(store.spans()):,} spans)", file=sys.stderr)
    return common.OK


class ExportError(RuntimeError):
    """The endpoint did not take the trace; the text says why and what to do. Nothing is lost: the files stay."""


class _Sender:
    """OTLP/HTTP with JSON bodies, which every collector and Jaeger take and which need no further package."""

    def __init__(self, endpoint: str) -> None:
        from urllib.parse import urlsplit

        from minivllm.exceptions import ConfigError

        try:
            parts = urlsplit(endpoint)
            self.port = parts.port
        except ValueError:
            raise ConfigError(f"--otlp {endpoint}: not a URL; use http://localhost:4318") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--otlp {endpoint}: not an http:// or https:// URL; use http://localhost:4318")
        self.secure, self.host = parts.scheme == "https", parts.hostname
        # As the OTLP specification has it: the endpoint is a base, the signal's path is added.
        base = parts.path.rstrip("/")
        self.path = base if base.endswith("/v1/traces") else base + "/v1/traces"
        self.url = f"{parts.scheme}://{parts.netloc}{self.path}"

    def send(self, store: TraceStore) -> None:
        """Send the spans process by process, in pieces that a collector's limit on a body lets through.

        Raises:
            ExportError: the endpoint cannot be reached, is too slow, or refuses.
        """
        import http.client
        import json

        connection_type = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = connection_type(self.host, self.port, timeout=_TIMEOUT_S)
        try:
            for resource_spans in store.to_otlp()["resourceSpans"]:
                spans = [span for scope in resource_spans["scopeSpans"] for span in scope["spans"]]
                for at in range(0, len(spans), _SPANS_PER_REQUEST):
                    piece = {"scope": {"name": "minivllm"}, "spans": spans[at : at + _SPANS_PER_REQUEST]}
                    body = {"resourceSpans": [{**resource_spans, "scopeSpans": [piece]}]}
                    self._post(connection, json.dumps(body).encode())
        except TimeoutError:
            raise ExportError(
                f"{self.url} did not answer within {_TIMEOUT_S:.0f} s; is it an OTLP/HTTP endpoint?"
            ) from None
        except (OSError, http.client.HTTPException) as e:
            reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
            raise ExportError(
                f"{self.url} cannot be reached ({reason}); start Jaeger or a collector there, or check the address"
            ) from None
        finally:
            connection.close()

    def _post(self, connection: HTTPConnection, body: bytes) -> None:
        connection.request("POST", self.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read(2000).decode("utf-8", "replace")
        # What is left of a long answer would be taken for the next one.
        response.read()
        if response.status >= 300:
            first = answer.strip().splitlines()[0][:200] if answer.strip() else "no text"
            raise ExportError(
                f"{self.url} refused the trace: HTTP {response.status} {response.reason}: {first}"
            )
