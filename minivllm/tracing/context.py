"""How a trace travels: W3C text in the environment of a child process, 25 bytes in a message.

vLLM 0.25.1: vllm/tracing/utils.py (extract_trace_headers), vllm/tracing/otel.py (propagate_trace_to_env)
Articles: part 2 §2.4.8

Deviation from vLLM: the variables are upper case, as OpenTelemetry's environment carriers have them, and are
restored after the start, so that a process never inherits the context of a sibling.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from minivllm.tracing.process import clock
from minivllm.tracing.spec import LEVEL_NAMES

CONTEXT_BYTES = 25
PACKED = struct.Struct(">16sQB")
_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")
_environment_lock = threading.RLock()

Parent = tuple[bytes, int]
"""Trace id (16 bytes) and span id of a parent; span id 0 for the root of a trace."""


def new_trace_id() -> bytes:
    return secrets.token_bytes(16)


def new_span_ids() -> Iterator[int]:
    """Span ids of one process: consecutive from a random 63-bit start, so that no two processes share one."""
    return itertools.count(secrets.randbits(63) | 1 << 32)


def pack(trace_id: bytes, span_id: int) -> bytes:
    """16 bytes trace id, 8 bytes span id, 1 byte flags (sampled)."""
    return PACKED.pack(trace_id, span_id, 1)


def unpack(packed: bytes) -> Parent:
    """Inverse of `pack`.

    Raises:
        ValueError: not 25 bytes.
    """
    if len(packed) != CONTEXT_BYTES:
        raise ValueError(f"a packed trace context has {CONTEXT_BYTES} bytes, got {len(packed)}")
    trace_id, span_id, _ = PACKED.unpack(packed)
    return trace_id, span_id


def format_traceparent(parent: Parent) -> str:
    return f"00-{parent[0].hex()}-{parent[1]:016x}-01"


def parse_traceparent(text: str) -> Parent | None:
    """Return the context, or None when the text is not a valid W3C traceparent."""
    match = _TRACEPARENT.match(text.strip().lower())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = bytes.fromhex(match[2]), int(match[3], 16)
    return (trace_id, span_id) if any(trace_id) and span_id else None


def active_opentelemetry_parent() -> Parent | None:
    """The caller's current OpenTelemetry span, looked up only when the caller has imported OpenTelemetry."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return (context.trace_id.to_bytes(16, "big"), context.span_id) if context.is_valid else None


def child_variables(parent: Parent | None, level: int, trace_dir: str | None) -> dict[str, str]:
    """Variables that hand trace level, directory, clock, parent and the moment of the start to a child process."""
    variables = {
        "MINIVLLM_TRACE": LEVEL_NAMES[level],
        "MINIVLLM_TRACE_DIR": trace_dir or "",
        "MINIVLLM_TRACE_ANCHOR": clock.anchor(),
        "MINIVLLM_TRACE_START": str(time.monotonic_ns()),
    }
    if parent is not None:
        variables["TRACEPARENT"] = format_traceparent(parent)
    return variables


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in os.environ for the time of a Process.start() and restore what was there.

    Starts of several executors in threads of one process take turns, since the environment is one per process.
    """
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
