"""minivllm: how vLLM V1 runs one model over several processes, small enough to read and traced step by step.

vLLM 0.25.1: vllm/__init__.py
Articles: part 1, part 2

Names are imported when first used: `import minivllm` alone costs milliseconds and imports neither torch
nor OpenTelemetry, because each spawned process pays for it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minivllm.engine.arg_utils import EngineArgs
    from minivllm.entrypoints.llm import LLM
    from minivllm.request_output import CompletionOutput, RequestOutput
    from minivllm.sampling_params import SamplingParams, StructuredOutputsParams

_LAZY = {
    "LLM": "minivllm.entrypoints.llm",
    "EngineArgs": "minivllm.engine.arg_utils",
    "SamplingParams": "minivllm.sampling_params",
    "StructuredOutputsParams": "minivllm.sampling_params",
    "RequestOutput": "minivllm.request_output",
    "CompletionOutput": "minivllm.request_output",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __dir__() -> list[str]:
    # What is not imported yet is there all the same, for a REPL that completes names.
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
