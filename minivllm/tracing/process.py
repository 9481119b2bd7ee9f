"""Who this process is in a trace: role, rank, label, ids, and the clock it shares with the others.

vLLM 0.25.1: vllm/tracing/otel.py (init_otel_tracer)
Articles: part 2 §2.4.14
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import unquote

from minivllm import __version__
from minivllm.tracing.spec import CLIENT, ENGINE_CORE, WORKER

SERVICE_NAMESPACE = "minivllm"
ROLES = (CLIENT, ENGINE_CORE, WORKER)


@dataclass(slots=True)
class ProcessIdentity:
    """What the resource of each span of this process says.

    Attributes:
        role: "client", "engine_core", "worker", or "process" before configure().
        rank: global rank of a worker.
        label: short name of a worker among its kind, such as "tp0" or "pp1.tp0".
        instance_id: unique even when a pid is used again.
    """

    role: str = "process"
    rank: int | None = None
    label: str | None = None
    service_name_override: str | None = None
    pid: int = field(default_factory=os.getpid)
    instance_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def service_name(self) -> str:
        """`minivllm.client`, `minivllm.engine_core`, `minivllm.worker.tp0` (`.rank0` until it has a label)."""
        if self.service_name_override:
            return self.service_name_override
        name = f"{SERVICE_NAMESPACE}.{self.role}"
        if self.label:
            return f"{name}.{self.label}"
        return name if self.rank is None else f"{name}.rank{self.rank}"

    def resource(self) -> dict[str, str | int]:
        """Resource attributes in the conventions' names. OTEL_RESOURCE_ATTRIBUTES adds to them, and never replaces ours."""
        attributes: dict[str, str | int] = dict(_resource_from_environment())
        attributes.update(
            {
                "service.namespace": SERVICE_NAMESPACE,
                "service.name": self.service_name,
                "service.version": __version__,
                "service.instance.id": self.instance_id,
                "process.pid": self.pid,
                "process.parent_pid": os.getppid(),
                "host.name": socket.gethostname(),
                "telemetry.sdk.name": "minivllm",
                "telemetry.sdk.language": "python",
                "telemetry.sdk.version": __version__,
                "minivllm.role": self.role,
            }
        )
        if self.rank is not None:
            attributes["minivllm.rank"] = self.rank
        return attributes


def _resource_from_environment() -> dict[str, str]:
    """Parse OTEL_RESOURCE_ATTRIBUTES: `key=value,key=value`, values percent-encoded; bad parts are skipped."""
    pairs = (part.partition("=") for part in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    return {key.strip(): unquote(value.strip()) for key, sign, value in pairs if sign and key.strip()}


class Clock:
    """Wall-clock time stamps derived from the monotonic clock.

    All processes of one host have the same monotonic clock; with one anchor for all of them, a message never
    seems to arrive before it was sent, and a step of the wall clock does not bend a trace.
    """

    __slots__ = ("offset_ns",)

    def __init__(self) -> None:
        self.offset_ns = time.time_ns() - time.monotonic_ns()

    def wall_ns(self, monotonic_ns: int) -> int:
        """Nanoseconds since the epoch for a time of this host's monotonic clock."""
        return monotonic_ns + self.offset_ns

    def anchor(self) -> str:
        """The text that gives a child process this clock."""
        now = time.monotonic_ns()
        return f"{self.wall_ns(now)}:{now}"

    def adopt(self, anchor: str) -> None:
        """Take over the clock that `anchor()` described; a malformed text is ignored."""
        wall, _, monotonic = anchor.partition(":")
        if wall.isdigit() and monotonic.isdigit():
            self.offset_ns = int(wall) - int(monotonic)


identity = ProcessIdentity()
clock = Clock()


def renew_identity() -> None:
    """Give a forked child its own pid and instance id; role and rank stay until it configures itself."""
    identity.pid = os.getpid()
    identity.instance_id = secrets.token_hex(8)
