"""Makes executors of either engine, with workers that have no model."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from methods import Methods

# Called in a worker of vLLM in the middle of its init; inherited by fork.
HOOKS: dict[str, Callable[[Any], None]] = {}


class Vllm:
    """The real executor, worker process and queue of an installed vLLM 0.25.1; only the model is missing."""

    name = "vllm"

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        self.sockets = Path(tempfile.mkdtemp(dir="/tmp", prefix="vx-"))
        os.environ["VLLM_RPC_BASE_PATH"] = str(self.sockets)
        import vllm.v1.executor.multiproc_executor as module

        class Wrapper(Methods):
            def __init__(self, rpc_rank: int = 0, global_rank: int = 0) -> None:
                self.rank = global_rank

            def init_worker(self, all_kwargs: Any) -> None: ...
            def init_device(self) -> None:
                HOOKS.get("init_device", lambda worker: None)(self)

            def load_model(self) -> None: ...
            def shutdown(self) -> None: ...
            def check_health(self) -> None: ...

        class Affinity:
            def __init__(self, config: Any) -> None: ...
            @contextlib.contextmanager
            def configure_omp_envs(self, rank: int, local_rank: int) -> Any:
                yield

        # What would need a model, a GPU's driver, or a whole configuration.
        module.WorkerWrapperBase = Wrapper
        module.OMPProcessManager = Affinity
        module.set_worker_net_device = lambda *args, **kwargs: None
        module.enable_envs_cache = lambda: None
        module.current_platform.update_block_size_for_backend = lambda *args, **kwargs: None
        self.module = module

    def make(self, async_scheduling: bool = False) -> Any:
        """A MultiprocExecutor of two workers."""
        space = types.SimpleNamespace
        parallel = space(
            world_size=2,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes_within_dp=1,
            node_rank_within_dp=0,
            node_rank=0,
            local_world_size=2,
            master_addr="127.0.0.1",
            numa_bind=False,
            enable_expert_parallel=False,
            assigned_physical_gpu_ids=None,
            data_parallel_size_local=1,
        )
        return self.module.MultiprocExecutor(
            space(
                parallel_config=parallel,
                scheduler_config=space(async_scheduling=async_scheduling),
                model_config=None,
                cache_config=None,
                lora_config=None,
                load_config=None,
                device_config=None,
                speculative_config=None,
                observability_config=None,
            )
        )

    def segments(self) -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("psm_*")}

    def files(self) -> set[str]:
        """Socket files."""
        return {path.name for path in self.sockets.iterdir()}

    def fail_in_init(self) -> None:
        def fail(worker: Any) -> None:
            if worker.rank == 1:
                raise ValueError("no such weights")

        HOOKS["init_device"] = fail

    def do_not_fail_in_init(self) -> None:
        HOOKS.clear()

    def die_after_ready(self) -> None:
        """Have rank 1 die right after it has sent READY."""
        import multiprocessing.connection

        original = self.module.WorkerProc.monitor_death_pipe

        def monitor(worker: Any, *args: Any) -> None:
            original(worker, *args)
            if worker.rank == 1:
                send = multiprocessing.connection.Connection.send

                def send_and_die(connection: Any, message: Any) -> None:
                    send(connection, message)
                    if isinstance(message, dict) and message.get("status") == "READY":
                        os._exit(9)

                multiprocessing.connection.Connection.send = send_and_die  # type: ignore[method-assign]

        self.module.WorkerProc.monitor_death_pipe = monitor


class Minivllm:
    """minivllm's own, with its default start method."""

    name = "minivllm"

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="mx-"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.directory)

    def make(self, async_scheduling: bool = False) -> Any:
        from minivllm.config import ParallelConfig, SchedulerConfig, VllmConfig
        from minivllm.executor.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(
            VllmConfig(
                parallel_config=ParallelConfig(
                    tensor_parallel_size=2, worker_cls="minivllm_worker.StubWorker"
                ),
                scheduler_config=SchedulerConfig(async_scheduling=async_scheduling),
            )
        )

    def segments(self) -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"minivllm-{os.getpid()}-*")}

    def files(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}

    def fail_in_init(self) -> None:
        os.environ["STUB_FAILS"] = "1"

    def do_not_fail_in_init(self) -> None:
        del os.environ["STUB_FAILS"]

    def die_after_ready(self) -> None:
        os.environ["MINIVLLM_FAILPOINTS"] = "worker.mq_handshake@rank1=kill"


def engine(name: str) -> Vllm | Minivllm:
    return Vllm() if name == "vllm" else Minivllm()


def state(pid: int) -> str:
    """Of a process, as in /proc: "gone", Z for a zombie, and so on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "gone"


def is_alive(pid: int) -> bool:
    return state(pid) not in ("gone", "Z")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def say(text: str) -> None:
    print(text)
    sys.stdout.flush()
