"""The executor as the engine sees it: one object that runs a method on all workers.

vLLM 0.25.1: vllm/v1/executor/abstract.py (Executor)
Articles: part 1 §2, part 2 §1.3, §2.3
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from minivllm import envs, tracing
from minivllm.config import VllmConfig
from minivllm.exceptions import ConfigError
from minivllm.executor.status_page import RankStatus
from minivllm.utils.system_utils import open_standard_descriptors

if TYPE_CHECKING:
    from minivllm.core.sched.output import GrammarOutput, SchedulerOutput
    from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
    from minivllm.outputs import DraftTokenIds, ModelRunnerOutput

FailureCallback = Callable[[], None]
ProgressCallback = Callable[[list[RankStatus]], None]
HEALTH_TIMEOUT_S = 10.0


class KVOutputAggregator(Protocol):
    """Makes one output of the outputs of all ranks."""

    def aggregate(self, outputs: list[Any], output_rank: int) -> Any:
        """Merge `[world_size]` outputs into that of `output_rank`."""


class Executor(ABC):
    """Runs methods on all workers. Usable as a context manager: shuts down at the end of the block.

    Attributes:
        supports_pp: whether more than one pipeline stage is possible.
        output_rank: the rank whose output a step returns.
        kv_output_aggregator: set by a KV connector; steps then collect the outputs of all ranks.
        on_progress: called about ten times a second during start-up with what each rank is doing; None: nobody.
    """

    supports_pp: ClassVar[bool] = False
    output_rank: int = 0

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type[Executor]:
        """The class that `distributed_executor_backend` asks for: "mp", "uni", a class, or its qualified name.

        None chooses "uni" for one rank and "mp" for several.

        Raises:
            ConfigError: no such executor, or one that cannot run that many ranks.
        """
        parallel_config = vllm_config.parallel_config
        backend = parallel_config.distributed_executor_backend
        if backend is None:
            backend = "uni" if parallel_config.world_size == 1 else "mp"
        if backend == "mp":
            from minivllm.executor.multiproc_executor import MultiprocExecutor

            return MultiprocExecutor
        if backend == "uni":
            from minivllm.executor.uniproc_executor import UniProcExecutor

            if parallel_config.world_size > 1:
                raise ConfigError(
                    f"distributed_executor_backend='uni' runs one rank, not {parallel_config.world_size}; use 'mp'"
                )
            return UniProcExecutor
        if isinstance(backend, str):
            if "." not in backend:
                raise ConfigError(
                    f"distributed_executor_backend={backend!r} is not known; use 'mp', 'uni', an Executor class or "
                    "its qualified name"
                )
            from minivllm.worker.worker_base import resolve_obj_by_qualname

            backend = resolve_obj_by_qualname(backend, "distributed_executor_backend")
        if not (isinstance(backend, type) and issubclass(backend, Executor)):
            raise ConfigError(f"distributed_executor_backend={backend!r} is not a subclass of Executor")
        return backend

    def __init__(self, vllm_config: VllmConfig, on_progress: ProgressCallback | None = None) -> None:
        open_standard_descriptors()
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.parallel_config = vllm_config.parallel_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.on_progress = on_progress
        self.kv_output_aggregator: KVOutputAggregator | None = None
        self.step_timeout_s: float = envs.MINIVLLM_EXECUTE_MODEL_TIMEOUT_S
        with tracing.span("executor.init", backend=type(self).__name__):
            self._init_executor()

    @abstractmethod
    def _init_executor(self) -> None:
        """Bring the workers up: afterwards every method can be called."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: KVOutputAggregator | None = None,
    ) -> Any:
        """Run a method on every worker.

        Args:
            method: name of a worker method, or a callable that gets the worker as its first argument and is sent by
                value.
            timeout: limit of the whole call in seconds, sending included; None waits for ever.
            non_block: return a Future of the result.
            unique_reply_rank: the only rank whose result is wanted. All ranks run the method, and an exception on
                any of them is raised.
            kv_output_aggregator: all results are wanted, and merged into one.

        Returns:
            `[world_size]` results in rank order; one result with unique_reply_rank or kv_output_aggregator.

        Raises:
            RemoteError: the method raised on a worker.
            TimeoutError: the limit has passed; the text says which ranks are missing and what they are doing.
            ExecutorFailedError: a worker has died, or the executor was shut down.
        """

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV caches, `[world_size]` configurations, and warm the workers up. The start-up ends here."""
        self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))
        self.collective_rpc("compile_or_warm_up_model")
        self.on_progress = None

    def get_kv_cache_specs(self) -> list[dict[str, FullAttentionSpec]]:
        """`[world_size]` dicts from layer name to spec."""
        specs: list[dict[str, FullAttentionSpec]] = self.collective_rpc("get_kv_cache_spec")
        return specs

    def determine_available_memory(self) -> list[int]:
        """`[world_size]` bytes that each rank can give to its KV cache."""
        sizes: list[int] = self.collective_rpc("determine_available_memory")
        return sizes

    @tracing.instrument("executor.execute_model")
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Compute one step. A result of None means: call sample_tokens next."""
        output: ModelRunnerOutput | Future[ModelRunnerOutput | None] | None
        output = self._step("execute_model", scheduler_output, non_block)
        return output

    @tracing.instrument("executor.sample_tokens")
    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Sample the tokens of the step that execute_model has computed."""
        output: ModelRunnerOutput | Future[ModelRunnerOutput | None] | None
        output = self._step("sample_tokens", grammar_output, non_block)
        return output

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        return self.collective_rpc(
            method,
            timeout=self.step_timeout_s,
            args=(argument,),
            non_block=non_block,
            unique_reply_rank=self.output_rank,
            kv_output_aggregator=self.kv_output_aggregator,
        )

    # Deviation from vLLM: the next two have the same limit as a step; there they wait for ever.
    @tracing.instrument("executor.execute_dummy_batch")
    def execute_dummy_batch(self) -> None:
        """Run a step without requests on all workers."""
        self.collective_rpc(
            "execute_dummy_batch", timeout=self.step_timeout_s, unique_reply_rank=self.output_rank
        )

    @tracing.instrument("executor.take_draft_token_ids")
    def take_draft_token_ids(
        self, non_block: bool = False
    ) -> DraftTokenIds | Future[DraftTokenIds | None] | None:
        """Speculative tokens proposed in the last step; None when there are none."""
        drafts: DraftTokenIds | Future[DraftTokenIds | None] | None = self.collective_rpc(
            "take_draft_token_ids",
            timeout=self.step_timeout_s,
            non_block=non_block,
            unique_reply_rank=self.output_rank,
        )
        return drafts

    @tracing.instrument("executor.check_health")
    def check_health(self) -> None:
        """Ask every worker whether it can go on; raises what collective_rpc raises when one cannot, or is silent."""
        self.collective_rpc("check_health", timeout=HEALTH_TIMEOUT_S)

    @property
    def max_concurrent_batches(self) -> int:
        """Batches that may be in flight."""
        return self.vllm_config.max_concurrent_batches

    @property
    @abstractmethod
    def is_failed(self) -> bool:
        """Whether a worker has died or cannot be reached any more. There is no way back; make a new executor."""

    @abstractmethod
    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Have `callback` called once when the executor fails; at once when it has failed already."""

    @abstractmethod
    def status_snapshot(self) -> list[RankStatus]:
        """What each rank is doing at this moment."""

    @abstractmethod
    def shutdown(self, hurried: bool = False) -> None:
        """End the workers and give everything back. From any thread, at any time, any number of times; every caller
        returns after it is done.

        Args:
            hurried: nobody waits for what a busy worker is at: after a failure, or when the caller was interrupted.
        """

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether steps can be sent before earlier ones have ended."""
        return False

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()
