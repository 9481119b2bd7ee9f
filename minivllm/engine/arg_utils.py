"""EngineArgs: the keyword arguments of LLM, and how they become a VllmConfig.

vLLM 0.25.1: vllm/engine/arg_utils.py (EngineArgs)
Articles: part 1 §6
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any

from minivllm import envs
from minivllm.config import (
    CacheConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from minivllm.exceptions import ConfigError
from minivllm.platforms import resolve_device
from minivllm.tracing.failpoints import check_ranks


@dataclass(slots=True)
class EngineArgs:
    """Everything that can be set for one engine; the parts of VllmConfig explain each field.

    Attributes:
        model: local checkpoint directory (None: the bundled one).
        device: "auto" is cuda when torch and the host have it, else cpu.
        distributed_executor_backend: "mp", "uni", an Executor class or its qualified name (None: "mp" for
            several ranks, else "uni").
        async_scheduling: schedule a step while the one before it runs (None: no).
        speculative_config: dict with the keys of SpeculativeConfig: method "ngram", or model, the draft model.
        trace: directory for the trace of this run (None: MINIVLLM_TRACE_DIR, else no trace).
        trace_level: "lifecycle", "rpc" or "message" (None: MINIVLLM_TRACE, or "rpc" when only a directory is given).
    """

    model: str | os.PathLike[str] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    distributed_executor_backend: Any = None
    worker_cls: str = "auto"
    worker_extension_cls: str = ""
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    numa_bind: bool = False
    startup_timeout_s: float | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    device: str = "auto"
    enforce_eager: bool = False
    logits_processors: list[str | type] | None = None
    logprobs_mode: str = "raw_logprobs"
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None
    speculative_config: dict[str, Any] | None = None
    trace: str | os.PathLike[str] | None = None
    trace_level: str | None = None

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Raises ConfigError for an unknown name, with the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
                raise ConfigError(f"{name!r} is not an engine argument; {hint}")
        return cls(**kwargs)

    def create_engine_config(self) -> VllmConfig:
        """Check everything that can be checked without starting a process. Raises ConfigError."""
        device = resolve_device(self.device)
        model_config = ModelConfig(
            model=None if self.model is None else _path("model", self.model),
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            seed=self.seed,
            device=device,
            enforce_eager=self.enforce_eager,
            logits_processors=self.logits_processors,
            logprobs_mode=self.logprobs_mode,
        )
        config = VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(
                block_size=self.block_size,
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                num_gpu_blocks_override=self.num_gpu_blocks_override,
            ),
            parallel_config=ParallelConfig(
                tensor_parallel_size=self.tensor_parallel_size,
                pipeline_parallel_size=self.pipeline_parallel_size,
                prefill_context_parallel_size=self.prefill_context_parallel_size,
                distributed_executor_backend=self.distributed_executor_backend,
                worker_cls=self.worker_cls,
                worker_extension_cls=self.worker_extension_cls,
                nnodes=self.nnodes,
                node_rank=self.node_rank,
                master_addr=self.master_addr,
                master_port=self.master_port,
                numa_bind=self.numa_bind,
                startup_timeout_s=self.startup_timeout_s,
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                enable_chunked_prefill=self.enable_chunked_prefill,
                async_scheduling=False if self.async_scheduling is None else self.async_scheduling,
            ),
            observability_config=self._observability_config(),
            speculative_config=None
            if self.speculative_config is None
            else SpeculativeConfig.from_dict(self.speculative_config, model_config),
            device=device,
        )
        if envs.MINIVLLM_FAILPOINTS:
            check_ranks(envs.MINIVLLM_FAILPOINTS, config.parallel_config.world_size)
        # Last, so that a setting that is refused for another reason leaves no directory.
        if config.observability_config.trace_dir is not None:
            self._make_trace_directory(config.observability_config.trace_dir)
        return config

    def _make_trace_directory(self, path: str) -> None:
        """Raises ConfigError when no trace can be written there: a run without it would be a run in vain."""
        name = "MINIVLLM_TRACE_DIR" if self.trace is None else "trace"
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"{name}={path!r} cannot be used: {e.strerror}") from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"{name}={path!r} cannot be written to")

    def _observability_config(self) -> ObservabilityConfig:
        trace_dir = _path("trace", self.trace) if self.trace is not None else envs.MINIVLLM_TRACE_DIR or None
        level = self.trace_level
        if level is None:
            level = envs.MINIVLLM_TRACE
            # A directory alone asks for a trace; with the variable, MINIVLLM_TRACE=off takes that back.
            if level == "off" and (
                self.trace is not None or (trace_dir is not None and "MINIVLLM_TRACE" not in os.environ)
            ):
                level = "rpc"
        if trace_dir is None and self.trace_level not in (None, "off"):
            raise ConfigError(f"trace_level={level!r} needs a directory: give trace, too")
        return ObservabilityConfig(
            trace_dir=os.path.abspath(trace_dir) if trace_dir is not None and level != "off" else None,
            trace_level=level if trace_dir is not None else "off",
        )


def _path(name: str, value: str | os.PathLike[str]) -> str:
    """A path as text. Raises ConfigError that names the argument."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    # Nothing can have a name with a null character, which comes out of os as a ValueError.
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"{name}={value!r} is not valid: a directory is needed, as a string or a path")
    return path
