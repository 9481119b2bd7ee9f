"""A real worker class without torch: CountingModel behind the methods that the executor calls."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from typing import Any

from counting_model import CountingModel

from minivllm import tracing
from minivllm.core.sched.output import SchedulerOutput
from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from minivllm.outputs import ModelRunnerOutput
from minivllm.worker.worker_base import WorkerBase


class CountingWorker(WorkerBase):
    """COUNTING_FAIL="<rank>:<method>:<raise|kill|sleep>[:<occurrence>]" in the environment makes it fail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self._seen: dict[str, int] = {}

    def _maybe_fail(self, method: str) -> None:
        plan = os.environ.get("COUNTING_FAIL", "")
        if not plan:
            return
        rank, name, action, *rest = plan.split(":")
        if int(rank) != self.rank or name != method:
            return
        self._seen[method] = self._seen.get(method, 0) + 1
        if self._seen[method] != (int(rest[0]) if rest else 1):
            return
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "sleep":
            time.sleep(60)
        raise ValueError(f"{method} was told to fail")

    def init_device(self) -> None:
        if sys.stderr is not None:
            # For a test that wants to know where a worker is.
            faulthandler.register(signal.SIGUSR2)
        self._maybe_fail("init_device")

    def load_model(self) -> None:
        self._maybe_fail("load_model")

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        block_size = self.vllm_config.cache_config.block_size
        return {"layers.0": FullAttentionSpec(block_size, 1, 8, "float32")}

    def determine_available_memory(self) -> int:
        self._maybe_fail("determine_available_memory")
        return 1 << 20

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._maybe_fail("initialize_from_config")
        config = self.vllm_config
        self.model = CountingModel(
            config.model_config.vocab_size,
            config.cache_config.block_size,
            kv_cache_config.num_blocks,
            config.scheduler_config.max_num_seqs,
            config.scheduler_config.max_num_batched_tokens,
        )

    def compile_or_warm_up_model(self) -> None:
        self._maybe_fail("compile_or_warm_up_model")

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        self._maybe_fail("execute_model")
        self.steps += 1
        return self.model.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | None:
        self._maybe_fail("sample_tokens")
        return self.model.sample_tokens()

    def echo(self, value: Any) -> Any:
        return value

    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise LookupError(f"rank {rank} was told to fail")
        return self.rank

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def enter_step(self) -> int:
        with tracing.span("worker.get_kv_cache_spec"):
            return self.rank

    def pid(self) -> int:
        return os.getpid()

    def open_slots(self) -> list[str]:
        return sorted(self.model.slots)
