"""`minivllm export DIR`: a recorded run for other tools, as files or sent to Jaeger or any OTLP collector.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from minivllm.cli import common
from minivllm.trace_export.errors import ExportError

if TYPE_CHECKING:
    from minivllm.trace_store import TraceStore

__all__ = ["ExportError", "add_parser", "run"]

_EXAMPLES = """\
examples:
  minivllm export traces/run --html run.html                  one page that needs no network
  minivllm export traces/run --perfetto run.json              for https://ui.perfetto.dev
  minivllm export traces/run --otlp http://localhost:4318     into a running Jaeger
  minivllm export traces/run --otlp-json - | gzip > run.json.gz
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        parents=[common.options()],
        help="give a recorded run to other tools: a page, Perfetto, Jaeger, any OTLP collector",
        description="Write a recorded run in the formats of other tools, or send it to an OTLP endpoint. Several at once are fine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common.add_directory(parser)
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="one self-contained page: timeline, zoom, search, details (- for stdout)",
    )
    parser.add_argument("--perfetto", metavar="FILE", help="Chrome's JSON, for Perfetto (- for stdout)")
    parser.add_argument("--jaeger-json", metavar="FILE", help="Jaeger's own JSON (- for stdout)")
    parser.add_argument(
        "--otlp-json", metavar="FILE", help="one OTLP/JSON file; Jaeger's upload takes it (- for stdout)"
    )
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="an OTLP endpoint, such as http://localhost:4318; with OTEL_EXPORTER_OTLP_PROTOCOL=grpc http://localhost:4317",
    )
    parser.set_defaults(run=run, refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    from minivllm.cli.timeline import open_store
    from minivllm.exceptions import ConfigError

    wanted = [
        (file, encode)
        for file, encode in (
            (args.html, _html),
            (args.perfetto, _perfetto),
            (args.jaeger_json, _jaeger_json),
            (args.otlp_json, _otlp_json),
        )
        if file is not None
    ]
    if not wanted and not args.otlp:
        args.refuse("say where to: --html, --perfetto, --jaeger-json, --otlp-json or --otlp")
    files = [file for file, _ in wanted]
    if len(set(files)) < len(files):
        raise ConfigError("two outputs cannot go to the same file")
    sender = None
    if args.otlp:
        from minivllm.trace_export.otlp import make_sender

        # An address that cannot work is refused before a large trace is read.
        sender = make_sender(args.otlp)
    store = open_store(args.directory, args.number)
    # Files first: whatever an endpoint does, they are there.
    for file, encode in wanted:
        _write(file, encode, store)
    if sender is not None:
        from minivllm.trace_export.otlp import send_store

        count = send_store(store, sender)
        print(f"sent {count:,} spans of trace {store.trace_id} to {sender.url}", file=sys.stderr)
    return common.OK


def _write(file: str, encode: Callable[[TraceStore], bytes], store: TraceStore) -> None:
    content = encode(store)
    if file == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(content + b"\n")
        sys.stdout.buffer.flush()
        return
    common.write_file(file, content + b"\n")
    print(f"wrote {file} ({len(store.spans()):,} spans)", file=sys.stderr)


def _html(store: TraceStore) -> bytes:
    from minivllm.trace_export.page import encode_page

    return encode_page(store)


def _perfetto(store: TraceStore) -> bytes:
    from minivllm.trace_export.perfetto import encode_perfetto

    return encode_perfetto(store)


def _jaeger_json(store: TraceStore) -> bytes:
    from minivllm.trace_export.jaeger import encode_jaeger

    return encode_jaeger(store)


def _otlp_json(store: TraceStore) -> bytes:
    return store.encode_otlp()
