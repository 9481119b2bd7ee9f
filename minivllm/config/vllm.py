"""VllmConfig: the whole configuration of one engine, and the decisions that need more than one part of it.

vLLM 0.25.1: vllm/config/vllm.py (VllmConfig)
Articles: part 1 §6, part 2 §2.3.10
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm import envs
from minivllm.config.cache import CacheConfig
from minivllm.config.model import ModelConfig
from minivllm.config.model_runner_decision import (
    RunnerConfigError,
    RunnerDecision,
    decide_model_runner,
    warn_once,
)
from minivllm.config.observability import ObservabilityConfig
from minivllm.config.parallel import ParallelConfig
from minivllm.config.scheduler import SchedulerConfig
from minivllm.config.speculative import SpeculativeConfig
from minivllm.exceptions import ConfigError


@dataclass(slots=True)
class VllmConfig:
    """Everything that processes need to know; it is pickled into each child.

    Attributes:
        model_config: None only for executors whose worker class brings no model (tests, walkthroughs).
        device: "cpu" or "cuda".
        speculative_config: who proposes tokens; None when nobody does.
        instance_id: short random text that ties the processes of one run together.
        model_runner_decision: V1 or V2, and why.
    """

    model_config: ModelConfig | None = None
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    speculative_config: SpeculativeConfig | None = None
    device: str = "cpu"
    instance_id: str = ""
    # Deviation from vLLM: decided once, where the configuration is made, and sent to all processes with it. There,
    # each process asks its own environment, and ranks on two hosts may end up with different runners.
    model_runner_decision: RunnerDecision = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is not supported; use cpu or cuda")
        if self.model_config is not None:
            self.model_config.verify_with_parallel_config(
                self.parallel_config.tensor_parallel_size, self.parallel_config.pipeline_parallel_size
            )
            if (
                not self.scheduler_config.enable_chunked_prefill
                and self.scheduler_config.max_num_batched_tokens < (self.model_config.max_model_len or 0)
            ):
                raise ConfigError(
                    f"max_num_batched_tokens={self.scheduler_config.max_num_batched_tokens} is below "
                    f"max_model_len={self.model_config.max_model_len} and chunked prefill is off: "
                    "the longest prompt could never be scheduled"
                )
        if self.speculative_config is not None and self.speculative_config.draft_model_config is not None:
            # The last pipeline stage has all of it.
            self.speculative_config.draft_model_config.verify_with_parallel_config(
                self.parallel_config.tensor_parallel_size, 1
            )
        if not self.instance_id:
            import uuid

            self.instance_id = uuid.uuid4().hex[:8]
        self.model_runner_decision = decide_model_runner(self)
        if self.model_runner_decision.error:
            raise RunnerConfigError(self.model_runner_decision)
        if self.model_runner_decision.warning:
            warn_once(self.model_runner_decision.warning)

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens per request and step, at most; 0 without speculation."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def use_v2_model_runner(self) -> bool:
        """Whether workers build Model Runner V2; decide_model_runner knows why."""
        return self.model_runner_decision.use_v2

    @property
    def max_concurrent_batches(self) -> int:
        """Batches in flight: pp fills the pipeline, one more overlaps scheduling with execution.

        Deviation from vLLM: MINIVLLM_MAX_CONCURRENT_BATCHES overrides the formula, so that a pipeline can be seen without
        its batch queue.
        """
        forced: int | None = envs.MINIVLLM_MAX_CONCURRENT_BATCHES
        if forced is not None:
            return forced
        pp_size = self.parallel_config.pipeline_parallel_size
        if self.scheduler_config.async_scheduling:
            if self.use_v2_model_runner:
                return pp_size + 1
            return 2 if pp_size == 1 else pp_size
        return pp_size
