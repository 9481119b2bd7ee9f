"""Limits of a step.

vLLM 0.25.1: vllm/config/scheduler.py (SchedulerConfig)
Articles: part 2 §2.3.10
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.config.checks import check_flags, check_integers
from minivllm.exceptions import ConfigError


@dataclass(slots=True)
class SchedulerConfig:
    """Attributes:
    max_num_seqs: requests that run at the same time.
    max_num_batched_tokens: tokens computed in one step.
    enable_chunked_prefill: a prompt may be computed in several steps.
    async_scheduling: schedule step n + 1 while step n runs.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    # Deviation from vLLM: off unless asked for, so that a step can be watched alone. There the default, None, becomes
    # True unless something forbids it: pooling, n-gram or draft-model speculation, an executor that cannot.
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        check_integers(self, ("max_num_seqs", "max_num_batched_tokens"), 1)
        check_flags(self, ("enable_chunked_prefill", "async_scheduling"))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: each running request needs one token per step"
            )
