"""Tracing: what each process does, step by step, by the names of the catalogue.

vLLM 0.25.1: vllm/tracing/__init__.py (instrument, init_tracer, maybe_init_worker_tracer)
Articles: part 2 §2.4.8

    with tracing.span("worker.init_device", device="cpu") as step:
        step.set(world_size=2)

Hot paths guard with one global read: `if tracing.calls:` where spans are of level rpc, `if tracing.messages:` where
they are of level message. A failpoint counts like the level that it needs.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing import util as _mp_util
from time import monotonic_ns
from typing import TYPE_CHECKING

from minivllm import envs
from minivllm.exceptions import ConfigError
from minivllm.tracing import catalogue, context, failpoints
from minivllm.tracing import spans as _spans
from minivllm.tracing.board import BOARD_BYTES, attach_board, detach_board, read_board
from minivllm.tracing.deadlines import Patience, deadline_clock, stand_still_for
from minivllm.tracing.ended import write_ended
from minivllm.tracing.failpoints import FailpointError
from minivllm.tracing.files import TraceFiles
from minivllm.tracing.gate import Gate, open_gate
from minivllm.tracing.parents import parents as _parents
from minivllm.tracing.place import find_site
from minivllm.tracing.process import ROLES, clock, identity, renew_identity
from minivllm.tracing.recorder import recorder as _recorder
from minivllm.tracing.spans import (
    Span,
    current_span,
    hot_span,
    instrument,
    pack_context,
    save_before_death,
    span,
    start_span,
)
from minivllm.tracing.spec import LEVEL_NAMES, LIFECYCLE, MESSAGE, OFF, RPC, SpanSpec

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from minivllm.tracing.export import LiveExport

__all__ = [
    "BOARD_BYTES",
    "LIFECYCLE",
    "MESSAGE",
    "OFF",
    "RPC",
    "FailpointError",
    "Patience",
    "Span",
    "SpanSpec",
    "active",
    "add_exporter",
    "attach_board",
    "calls",
    "catalogue",
    "child_environment",
    "child_variables",
    "configure",
    "current_span",
    "deadline_clock",
    "detach_board",
    "flush",
    "hot_span",
    "instrument",
    "level",
    "messages",
    "pack_context",
    "read_board",
    "record_bootstrap",
    "save_before_death",
    "set_label",
    "set_service_name",
    "shutdown",
    "span",
    "start_span",
    "step_live",
    "write_ended",
]

logger = logging.getLogger(__name__)
level = OFF
active = False
calls = False
messages = False
_failpoints: dict[str, list[failpoints.Failpoint]] = {}
_gate: Gate | None = None
_started_ns = 0
_exports: list[LiveExport] = []


def _apply(new_level: int) -> None:
    global level, active, calls, messages
    level = new_level
    active = bool(new_level or _failpoints)
    calls = bool(new_level >= RPC or _failpoints)
    messages = new_level >= MESSAGE or any(catalogue.SPANS[name].level == MESSAGE for name in _failpoints)
    _spans.apply(new_level, _failpoints, _gate)


def configure(
    role: str,
    rank: int | None = None,
    trace_dir: str | None = None,
    level: int | str | None = None,
    label: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Say who this process is and start recording as configured; may be called again.

    Args:
        role: "client", "engine_core" or "worker".
        rank: global rank of a worker.
        trace_dir: directory for the files; None takes MINIVLLM_TRACE_DIR.
        level: number or name of the level; None takes MINIVLLM_TRACE, or "rpc" when only a directory is given.
        label: see set_label().
        environment: what child_variables() returned in the parent, for start methods that do not hand over the
            environment (forkserver); None reads os.environ.

    Raises:
        ConfigError: unknown level, bad MINIVLLM_FAILPOINTS, or a directory that cannot be written.
    """
    global _failpoints, _started_ns
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
    variables: Mapping[str, str] = os.environ if environment is None else environment
    _failpoints = failpoints.parse(envs.MINIVLLM_FAILPOINTS)
    trace_dir = trace_dir or variables.get("MINIVLLM_TRACE_DIR") or None
    new_level = _parse_level(level, variables.get("MINIVLLM_TRACE"), trace_dir)
    with _recorder.lock:
        flush()
        identity.role, identity.rank, identity.label = role, rank, label
        identity.service_name_override = None
        clock.adopt(variables.get("MINIVLLM_TRACE_ANCHOR", ""))
        started = variables.get("MINIVLLM_TRACE_START", "")
        _started_ns = int(started) if started.isdigit() else 0
        _parents.inherited = (
            context.parse_traceparent(variables.get("TRACEPARENT", "")) or _parents.forked_from
        )
        _open_files(trace_dir if new_level else None)
        if new_level and not _exports and any(name.startswith("OTEL_") for name in os.environ):
            from minivllm.tracing.export import exports_from_environment

            for export in exports_from_environment():
                _add_export(export)
        if new_level and not trace_dir and role == "client" and not _exports:
            logger.warning("tracing is on, but MINIVLLM_TRACE_DIR is not set: no trace files are written")
        _apply(new_level)
    if live_step := variables.get("MINIVLLM_LIVE_STEP"):
        step_live(live_step)
    if parent_process() is not None:
        # A forked child of multiprocessing leaves through os._exit: atexit does not run there, this does.
        _mp_util.Finalize(None, shutdown, exitpriority=0)


def step_live(address: str) -> None:
    """Stop before each lifecycle step of this process, and of those it starts, for the controller at this address.

    Args:
        address: "" takes that back.
    """
    global _gate
    if _gate is not None and _gate.address != address:
        stand_still_for(None)
        _gate.close()
        _gate = None
    if _gate is None and address:
        _gate = open_gate(address)
        stand_still_for(_gate.clock if _gate is not None else None)
    _apply(level)


def _open_files(trace_dir: str | None) -> None:
    """Write to this directory from now on; None: to none. The caller holds the recorder's lock."""
    files = _recorder.files
    if files is not None and files.belongs_to(trace_dir):
        files.write_resource()
        return
    if files is not None:
        _spans.move_open_spans()
        _recorder.files = None
        files.close()
    if trace_dir is not None:
        try:
            _recorder.files = TraceFiles(trace_dir)
        except OSError as error:
            raise ConfigError(f"cannot write traces to {trace_dir}: {error}") from None


def _parse_level(level: int | str | None, variable: str | None, trace_dir: str | None) -> int:
    if level is None:
        level = variable or ("rpc" if trace_dir else "off")
    if isinstance(level, int):
        level = LEVEL_NAMES[level]
    if level not in LEVEL_NAMES:
        raise ConfigError(f"trace level {level!r} is not one of {', '.join(LEVEL_NAMES)}")
    return LEVEL_NAMES.index(level)


def _add_export(export: LiveExport) -> None:
    _exports.append(export)
    _recorder.sinks.append(export)


def add_exporter(exporter: SpanExporter) -> None:
    """Hand the spans of this process to an exporter made for the OpenTelemetry SDK, in the background, until shutdown()."""
    from minivllm.tracing.export import LiveExport, through_exporter

    _add_export(LiveExport(through_exporter(exporter), type(exporter).__name__))
    _apply(level)


def set_label(label: str) -> None:
    """Name this worker among its kind ("tp0", "pp1.tp0"): `service.name` becomes `minivllm.worker.<label>`."""
    identity.label = label
    with _recorder.lock:
        if _recorder.files is not None:
            flush()
            _recorder.files.write_resource()


def set_service_name(name: str) -> None:
    """Set `service.name` as a whole."""
    identity.service_name_override = name
    set_label(identity.label or "")


def record_bootstrap(name: str) -> None:
    """Record the span from the parent's Process.start() to this moment; call it right after configure().

    Without a start time (tracing off, or not started under child_environment()) only its failpoints fire.
    """
    entry = _spans.enabled(name)
    if entry is not None:
        site = find_site(sys._getframe(1))
        _spans.start_at(entry, site, _started_ns or monotonic_ns(), None, (), "", {}).end()


def child_variables(parent: bytes | None = None) -> dict[str, str]:
    """What a child process needs to join this trace, as environment variables. parent: packed context."""
    packed = parent or pack_context()
    trace_dir = str(_recorder.files.directory) if _recorder.files is not None else None
    variables = context.child_variables(context.unpack(packed) if packed else None, level, trace_dir)
    if _gate is not None:
        variables["MINIVLLM_LIVE_STEP"] = _gate.address
    return variables


@contextmanager
def child_environment(parent: bytes | None = None) -> Iterator[None]:
    """Set child_variables() in os.environ around Process.start(); children then belong to the current span."""
    with context.environment(child_variables(parent)):
        yield


def flush() -> None:
    """Write all spans that have ended."""
    write_ended()
    _recorder.drain()


def shutdown() -> None:
    """Write everything, spans still open as unfinished, and close the files. Idempotent; configure() starts again."""
    step_live("")
    with _recorder.lock:
        for item in _spans.open_spans():
            item.set(unfinished=True)
            item.error("still open when the process ended")
            item.end()
        write_ended()
        if not level:
            return
        _apply(OFF)
    _recorder.stop()
    with _recorder.lock:
        if _recorder.files is not None:
            _recorder.files.remove_table()
        _open_files(None)
    for export in _exports:
        export.close()
    _exports.clear()
    _recorder.sinks.clear()


def _after_fork_in_child() -> None:
    global _gate
    renew_identity()
    if _gate is not None:
        stand_still_for(None)
        _gate.close_copy()
        _gate = None
    _spans.forget()
    _exports.clear()
    _recorder.sinks.clear()
    _apply(level)


atexit.register(shutdown)
os.register_at_fork(after_in_child=_after_fork_in_child)
_apply(OFF)
