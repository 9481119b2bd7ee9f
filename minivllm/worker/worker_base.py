"""What every worker offers, and the wrapper that builds the configured worker class inside its process.

vLLM 0.25.1: vllm/v1/worker/worker_base.py (WorkerBase, WorkerWrapperBase)
Articles: part 1 §4, part 2 §2.4.2

No torch here: a worker class without it starts in a fraction of a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minivllm import tracing
from minivllm.config import VllmConfig
from minivllm.exceptions import ConfigError
from minivllm.platforms import get_platform

if TYPE_CHECKING:
    from minivllm.core.sched.output import GrammarOutput, SchedulerOutput
    from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
    from minivllm.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput


class WorkerBase:
    """One rank's work. Executors call these methods by name, in the order in which they stand here.

    Attributes:
        local_rank: index of this rank's device on its node.
        rank: global rank.
        distributed_init_method: where the ranks meet, in torch.distributed's notation.
        is_driver_worker: first rank of its tensor-parallel group.
        device: set by init_device; None for a worker that needs no device (and no torch).
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.parallel_config = vllm_config.parallel_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.local_rank = local_rank
        self.rank = rank
        self.distributed_init_method = distributed_init_method
        self.is_driver_worker = is_driver_worker
        self.device: Any = None

    def init_device(self) -> None:
        """Take the device and join the process groups; returns when all ranks have."""
        raise NotImplementedError

    def load_model(self) -> None:
        """Bring this rank's share of the model onto the device."""
        raise NotImplementedError

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Layer name -> spec, for the layers of this rank."""
        raise NotImplementedError

    def determine_available_memory(self) -> int:
        """Bytes that this rank can give to the KV cache."""
        raise NotImplementedError

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache."""
        raise NotImplementedError

    def compile_or_warm_up_model(self) -> None:
        """Run the first real shapes, so that no request pays for them."""
        raise NotImplementedError

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Compute one step. None means: call sample_tokens next."""
        raise NotImplementedError

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Sample the tokens of the step that execute_model has computed."""
        raise NotImplementedError

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Speculative tokens proposed in the last step; None when there are none."""
        raise NotImplementedError

    def execute_dummy_batch(self) -> None:
        """Run a step without requests."""
        raise NotImplementedError

    def check_health(self) -> None:
        """Raises when this worker cannot go on. That it answers at all is most of the proof."""

    def shutdown(self) -> None:
        """Give back what this worker holds: runner, groups, memory."""


class WorkerWrapperBase:
    """Stands for one worker before and after it exists. Names it does not know itself are the worker's.

    Attributes:
        rpc_rank: which entry of init_worker's list is meant for this wrapper.
        global_rank: rank in the whole job.
    """

    def __init__(self, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.rpc_rank = rpc_rank
        self.global_rank = rpc_rank if global_rank is None else global_rank
        self.worker: WorkerBase | None = None

    def init_worker(self, all_kwargs: list[dict[str, Any]]) -> None:
        """Resolve the worker class by its name and build it.

        Args:
            all_kwargs: `[world_size]` constructor arguments of all workers; ours stand at `rpc_rank`.

        Raises:
            ConfigError: the class or the extension class cannot be found, or the two clash.
        """
        kwargs = all_kwargs[self.rpc_rank]
        vllm_config: VllmConfig = kwargs["vllm_config"]
        with tracing.span("worker.init_worker") as step:
            worker_class = resolve_worker_class(vllm_config)
            step.set(worker_cls=f"{worker_class.__module__}.{worker_class.__qualname__}")
            self.worker = worker_class(**kwargs)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Pick this rank's configuration out of `[world_size]`."""
        self._worker.initialize_from_config(kv_cache_configs[self.global_rank])

    def execute_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method by its name, of the wrapper or of the worker."""
        return getattr(self, method)(*args, **kwargs)

    def shutdown(self) -> None:
        """Shut the worker down, if there is one yet."""
        if self.worker is not None:
            self.worker.shutdown()

    @property
    def _worker(self) -> WorkerBase:
        if self.worker is None:
            raise RuntimeError("the worker does not exist before init_worker")
        return self.worker

    def __getattr__(self, name: str) -> Any:
        worker = self.__dict__.get("worker")
        if worker is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and no worker yet")
        return getattr(worker, name)


def resolve_worker_class(vllm_config: VllmConfig) -> type[WorkerBase]:
    """The class that `worker_cls` and `worker_extension_cls` name; "auto" is the platform's choice.

    Raises:
        ConfigError: see WorkerWrapperBase.init_worker.
    """
    parallel_config = vllm_config.parallel_config
    name = parallel_config.worker_cls
    if name == "auto":
        name = get_platform(vllm_config.device).worker_cls
    worker_class: type[WorkerBase] = _resolve_class(name, "worker_cls")
    if not parallel_config.worker_extension_cls:
        return worker_class
    extension = _resolve_class(parallel_config.worker_extension_cls, "worker_extension_cls")
    clashes = [
        attribute
        for attribute in dir(extension)
        if not attribute.startswith("__") and hasattr(worker_class, attribute)
    ]
    if clashes:
        raise ConfigError(
            f"worker_extension_cls={parallel_config.worker_extension_cls!r} redefines {', '.join(clashes)} of {name}; "
            "rename them"
        )
    # Deviation from vLLM: a new class instead of a change of the worker class's bases, which every other executor
    # in this process would see.
    return type(worker_class.__name__, (worker_class, extension), {"__module__": worker_class.__module__})


def _resolve_class(name: str, setting: str) -> Any:
    found = resolve_obj_by_qualname(name, setting)
    if not isinstance(found, type):
        raise ConfigError(f"{setting}={name!r} is no class, but a {type(found).__name__}")
    return found


def resolve_obj_by_qualname(qualname: str, setting: str) -> Any:
    """Import the object that a dotted name means.

    Raises:
        ConfigError: there is none; the text names the setting.
    """
    module_name, _, name = qualname.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{setting}={qualname!r} cannot be found: {error}") from error
