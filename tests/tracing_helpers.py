"""What the tracing tests share: running a script in a process of its own, and recording within this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from minivllm import tracing
from minivllm.trace_store import TraceStore

LIMIT_S = 60


def environment(**variables: str) -> dict[str, str]:
    """This environment without any tracing or OpenTelemetry setting, plus the given ones."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MINIVLLM_", "OTEL_")) and name not in ("TRACEPARENT", "TRACESTATE")
    }
    return {**clean, "OMP_NUM_THREADS": "1", **variables}


def run_script(
    directory: Path, code: str, limit_s: float = LIMIT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run code as a script of its own, with `DIR` set to a trace directory; kills it after limit_s."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "script.py"
    script.write_text("import os, sys, time\nDIR = sys.argv[1]\n" + textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script), str(directory / "trace")],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def store_of(directory: Path) -> TraceStore:
    return TraceStore.open(directory / "trace")


@contextlib.contextmanager
def recording(directory: Path, level: str = "rpc", role: str = "client") -> Iterator[None]:
    """Record in this process; the files are complete when the block ends."""
    tracing.configure(role, trace_dir=str(directory / "trace"), level=level)
    try:
        yield
    finally:
        tracing.shutdown()
