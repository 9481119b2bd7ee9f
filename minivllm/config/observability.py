"""Where a run's trace goes and how much of it is recorded.

vLLM 0.25.1: vllm/config/observability.py (ObservabilityConfig)
Articles: part 2 §2.4.8
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.exceptions import ConfigError

TRACE_LEVELS = ("off", "lifecycle", "rpc", "message")


@dataclass(slots=True)
class ObservabilityConfig:
    """Attributes:
    trace_dir: directory for the trace files (None: no files).
    trace_level: "off", "lifecycle", "rpc" or "message".
    """

    trace_dir: str | None = None
    trace_level: str = "off"

    def __post_init__(self) -> None:
        if self.trace_level not in TRACE_LEVELS:
            raise ConfigError(f"trace_level={self.trace_level!r} is not one of {', '.join(TRACE_LEVELS)}")
