"""What the catalogue says about one lifecycle step.

vLLM 0.25.1: vllm/tracing/__init__.py (instrument)
Articles: part 1 §1–§9, part 2 §2–§4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OFF: Final = 0
LIFECYCLE: Final = 1
RPC: Final = 2
MESSAGE: Final = 3
LEVEL_NAMES: Final = ("off", "lifecycle", "rpc", "message")

CLIENT: Final = "client"
ENGINE_CORE: Final = "engine_core"
WORKER: Final = "worker"


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """One row of the catalogue.

    Attributes:
        name: the span's name.
        level: LIFECYCLE, RPC or MESSAGE: the lowest trace level that records it.
        process: the roles that emit it ("client", "engine_core", "worker"). With EngineCore or the worker in the
            client's process, the client emits their steps.
        per: how often a run shows it: "run", "worker", "group", "engine_core", "request", "step", "call", "failure".
        index: number of the row, starting at 1; what status boards and open tables store instead of the name.
        what: one sentence on what the step does.
        method: qualified name of the function of minivllm that emits it.
        articles: sections of the two articles, such as "part 2 §2.4.2".
        vllm: where vLLM 0.25.1 does the same, as "vllm/…/file.py:line Class.method"; empty when it has no such step.
        vllm_span: vLLM's own span name; empty when it has none.
        kind: OpenTelemetry span kind in lower case.
        when: the condition under which a run has this step; empty when each run has it.
    """

    name: str
    level: int
    process: tuple[str, ...]
    per: str
    index: int
    what: str
    method: str
    articles: tuple[str, ...]
    vllm: str
    vllm_span: str
    kind: str
    when: str
