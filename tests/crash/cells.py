"""The cells of the crash matrix: every lifecycle and rpc step of a TP=2 run, on every process that has it.

A test compares this table with what a run emits, so a new step cannot be forgotten.
"""

from __future__ import annotations

from minivllm.trace_store import TraceStore
from minivllm.tracing.catalogue import SPANS
from minivllm.tracing.spec import RPC
from tests.crash.harness import Cell

_WORKERS = ("rank0", "rank1")
CELLS: list[Cell] = []
SPREAD: list[Cell] = []


def emitted(store: TraceStore) -> set[tuple[str, str]]:
    """(span, process) of every lifecycle and rpc span of a run that its own process emitted."""
    found = set()
    for span in store.spans():
        role = span.process.role
        who = f"rank{span.process.rank}" if role == "worker" else {"engine_core": "engine"}.get(role, role)
        if SPANS[span.name].level <= RPC:
            found.add((span.name, who))
    return found
