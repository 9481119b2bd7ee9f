"""A real worker class without a model: everything around the model runs, nothing imports torch, start-up takes 0.2 s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from minivllm.outputs import ModelRunnerOutput
from minivllm.worker.worker_base import WorkerBase

if TYPE_CHECKING:
    from minivllm.core.sched.output import GrammarOutput, SchedulerOutput


class LightWorker(WorkerBase):
    """Answers every step with token 1 for each request."""

    def init_device(self) -> None:
        self._scheduled: SchedulerOutput | None = None

    def load_model(self) -> None:
        pass

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        block_size = self.cache_config.block_size
        return {"layer": FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype="float32")}

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._scheduled = scheduler_output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        assert self._scheduled is not None
        ids = list(self._scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(req_ids=ids, sampled_token_ids=[[1] for _ in ids])
