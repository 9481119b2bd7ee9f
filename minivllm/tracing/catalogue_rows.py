"""The rows of the catalogue: start-up, running, failure and shutdown.

vLLM 0.25.1: the file and line stand in each row
Articles: the sections stand in each row
"""

from __future__ import annotations

from minivllm.tracing.spec import CLIENT, ENGINE_CORE, LIFECYCLE, MESSAGE, RPC, WORKER, SpanSpec

_LEVELS = {"L": LIFECYCLE, "R": RPC, "M": MESSAGE}
_ROLES = {"C": CLIENT, "E": ENGINE_CORE, "W": WORKER}
_PLACES = {
    # short name -> (module of minivllm, file of vLLM)
    "core": ("minivllm.engine.core", "vllm/v1/engine/core.py"),
    "client": ("minivllm.engine.core_client", "vllm/v1/engine/core_client.py"),
    "llm": ("minivllm.entrypoints.llm", "vllm/entrypoints/llm.py"),
    "executor": ("minivllm.executor.abstract", "vllm/v1/executor/abstract.py"),
    "mp": ("minivllm.executor.multiproc_executor", "vllm/v1/executor/multiproc_executor.py"),
    "startup": ("minivllm.executor.worker_startup", "vllm/v1/executor/multiproc_executor.py"),
    "proc": ("minivllm.executor.worker_proc", "vllm/v1/executor/multiproc_executor.py"),
    "main": ("minivllm.executor.worker_main", "vllm/v1/executor/multiproc_executor.py"),
    "names": ("minivllm.executor.worker_names", "vllm/v1/executor/multiproc_executor.py"),
    "end": ("minivllm.executor.termination", "vllm/v1/executor/multiproc_executor.py"),
    "death": ("minivllm.executor.death_pipe", "vllm/v1/executor/multiproc_executor.py"),
    "call": ("minivllm.executor.call", "vllm/v1/executor/multiproc_executor.py"),
    "future": ("minivllm.executor.future", "vllm/v1/executor/multiproc_executor.py"),
    "mq": (
        "minivllm.distributed.mq_traced",
        "vllm/distributed/device_communicators/shm_broadcast.py",
    ),
    "dist": ("minivllm.distributed.parallel_state", "vllm/distributed/parallel_state.py"),
    "wrapper": ("minivllm.worker.worker_base", "vllm/v1/worker/worker_base.py"),
    "worker": ("minivllm.worker.gpu_worker", "vllm/v1/worker/gpu_worker.py"),
    "runner": ("minivllm.worker.gpu.model_runner", "vllm/v1/worker/gpu/model_runner.py"),
    "loader": (
        "minivllm.model_executor.model_loader.default_loader",
        "vllm/model_executor/model_loader/base_loader.py",
    ),
    "scheduler": ("minivllm.core.sched.scheduler", "vllm/v1/core/sched/scheduler.py"),
    "output": ("minivllm.engine.output_processor", "vllm/v1/engine/output_processor.py"),
    "speculator": ("minivllm.worker.gpu.spec_decode.speculator", "vllm/v1/worker/gpu/model_runner.py"),
    "grammar": ("minivllm.worker.gpu.structured_outputs", "vllm/v1/worker/gpu/structured_outputs.py"),
}

ROWS: list[SpanSpec] = []


def _articles(text: str) -> tuple[str, ...]:
    """Expand "1§4 2§2.4.2" to ("part 1 §4", "part 2 §2.4.2")."""
    return tuple("part " + section.replace("§", " §") for section in text.split())


def _row(
    name: str,
    level: str,
    roles: str,
    per: str,
    where: str,
    what: str,
    *,
    articles: str = "",
    vllm: str = "",
    vllm_span: str = "",
    kind: str = "internal",
    when: str = "",
) -> None:
    """Append one row.

    where: "place:Class.method" in minivllm; a place is a key of _PLACES.
    vllm: "line Class.method" in the counterpart of that place, or "vllm/<file>.py:line Class.method" elsewhere.
    """
    place, _, method = where.partition(":")
    module, vllm_file = _PLACES[place]
    if vllm and not vllm.startswith("vllm/"):
        vllm = f"{vllm_file}:{vllm}"
    ROWS.append(
        SpanSpec(
            name=name,
            level=_LEVELS[level],
            process=tuple(_ROLES[letter] for letter in roles),
            per=per,
            index=len(ROWS) + 1,
            what=what,
            method=f"{module}.{method}",
            articles=_articles(articles),
            vllm=vllm,
            vllm_span=vllm_span,
            kind=kind,
            when=when,
        )
    )


# fmt: off
# --- start-up: client and EngineCore ---------------------------------------------------------------------------
_row("run", "L", "C", "run", "llm:_start_trace",
     "Root of a traced run, from the construction of LLM to its shutdown: model, sizes, backend, device.",
     vllm="176 LLM.__init__")
_row("engine_core.spawn", "L", "C", "run", "client:BackgroundResources.__init__",
     "The client starts the EngineCore process and learns its pid.",
     articles="1§intro", vllm="vllm/v1/engine/utils.py:126 CoreEngineProcManager.__init__",
     vllm_span="SyncMPClient init", when="EngineCore in a process of its own")
_row("engine_core.init", "L", "E", "engine_core", "core:EngineCore.__init__",
     "EngineCore builds the executor, sizes the KV caches and makes the scheduler.",
     articles="1§1 1§9", vllm="99 EngineCore.__init__", vllm_span="EngineCoreProc init")
_row("engine_core.ready", "L", "C", "run", "client:SyncMPClient.wait_until_ready",
     "The client waits until EngineCore says that it is ready to take requests.",
     articles="1§1", vllm="vllm/v1/engine/utils.py:1225 wait_for_engine_startup",
     when="EngineCore in a process of its own")
_row("engine_core.init_kv_caches", "L", "E", "engine_core", "core:EngineCore._initialize_kv_caches",
     "EngineCore asks the workers for their layers and free memory, decides the number of blocks, and has the caches made.",
     articles="1§8.3", vllm="240 EngineCore._initialize_kv_caches", vllm_span="Prepare model")
_row("engine_core.init_scheduler", "L", "E", "engine_core", "core:EngineCore._init_scheduler",
     "The scheduler is made, and a batch queue as long as the executor can have batches in flight.",
     articles="2§2.3.10", vllm="150 EngineCore.__init__")

# --- start-up: executor ----------------------------------------------------------------------------------------
_row("executor.init", "L", "E", "engine_core", "executor:Executor.__init__",
     "The executor comes up: everything from the first queue to the handshake with the last worker.",
     articles="1§2 2§2.3.1", vllm="95 Executor.__init__", vllm_span="Executor init")
_row("executor.parallel_sizes", "L", "E", "engine_core", "mp:MultiprocExecutor._get_parallel_sizes",
     "World size is the product of the tensor, pipeline and prefill-context parallel sizes; it is checked against the number of ranks.",
     articles="2§2.3.1", vllm="249 MultiprocExecutor._get_parallel_sizes", when="multiprocess executor")
_row("executor.set_worker_envs", "L", "E", "engine_core", "mp:set_multiprocessing_worker_envs",
     "The start method and the number of OpenMP threads are settled before any worker inherits them.",
     articles="2§2.7", vllm="1047 set_multiprocessing_worker_envs", when="multiprocess executor")
_row("executor.distributed_init_method", "L", "E", "engine_core", "mp:MultiprocExecutor._start_workers",
     "The place where the ranks will meet is chosen: a file in a private directory here, a loopback address and an open port in vLLM.",
     articles="2§2.3.1", vllm="128 MultiprocExecutor._init_executor", when="multiprocess executor")
_row("executor.create_broadcast_mq", "L", "E", "engine_core", "mp:MultiprocExecutor._start_workers",
     "The ring through which every RPC reaches all workers is created, and its handle exported.",
     articles="1§2 2§2.3.1", vllm="151 MultiprocExecutor._init_executor", when="multiprocess executor")
_row("executor.spawn_workers", "L", "E", "engine_core", "mp:MultiprocExecutor._start_workers",
     "All workers are started before any is waited for, since each of them waits for the others in init_device.",
     articles="1§2 2§2.3.1", vllm="182 MultiprocExecutor._init_executor", when="multiprocess executor")
_row("executor.make_worker_process", "L", "E", "worker", "startup:make_worker_process",
     "One worker gets its ready pipe and death pipe and is started.",
     articles="1§3 2§2.4.3", vllm="659 WorkerProc.make_worker_process", when="multiprocess executor")
_row("executor.wait_for_ready", "L", "E", "engine_core", "startup:wait_for_ready",
     "The parent waits on all ready pipes at once; READY messages come in any order.",
     articles="2§2.4.4", vllm="733 WorkerProc.wait_for_ready", when="multiprocess executor")
_row("executor.connect_response_mq", "L", "E", "worker", "startup:wait_for_response_handle_ready",
     "The response ring of one worker is opened from the handle that came with READY.",
     articles="2§2.4.5", vllm="712 WorkerProc.wait_for_response_handle_ready", when="multiprocess executor")
_row("executor.start_worker_monitor", "L", "E", "engine_core", "mp:MultiprocExecutor.start_worker_monitor",
     "A thread begins to watch the sentinels of the worker processes.",
     articles="2§2.3.2", vllm="268 MultiprocExecutor.start_worker_monitor", when="multiprocess executor")
_row("executor.collect_response_mqs", "L", "E", "engine_core", "mp:MultiprocExecutor._start_workers",
     "The response queues are put in rank order, local and remote ones.",
     articles="2§2.3.1", vllm="207 MultiprocExecutor._init_executor", when="multiprocess executor")
_row("executor.mq_handshake", "L", "E", "engine_core", "mp:MultiprocExecutor._handshake",
     "Both sides wait until each queue is connected, the broadcast ring first; the other order here would deadlock.",
     articles="2§2.3.1 2§2.5.3", vllm="227 MultiprocExecutor._init_executor", when="multiprocess executor")
_row("executor.post_init", "L", "E", "engine_core", "mp:MultiprocExecutor._post_init_executor",
     "The queue of futures is made and the rank that replies is settled.",
     articles="2§2.3.1 2§2.3.10", vllm="232 MultiprocExecutor._init_executor", when="multiprocess executor")

# --- start-up: worker ------------------------------------------------------------------------------------------
_row("worker.process", "L", "E", "worker", "startup:make_worker_process",
     "The whole life of one worker process as its parent sees it, up to the exit code or signal.",
     articles="2§2.6.1", vllm="659 WorkerProc.make_worker_process", when="multiprocess executor")
_row("worker.bootstrap", "L", "W", "worker", "main:worker_main",
     "From Process.start() in the parent to the first instruction of worker_main: interpreter start and imports.",
     articles="1§3", vllm="807 WorkerProc.worker_main", when="multiprocess executor")
_row("worker.main", "L", "W", "worker", "main:worker_main",
     "The entry point of a worker process, from its first instruction to its last.",
     articles="2§2.4.8", vllm="807 WorkerProc.worker_main", when="multiprocess executor")
_row("worker.install_signal_handlers", "L", "W", "worker", "main:_WorkerMain._prepare",
     "SIGTERM is made to end the worker with SystemExit, once, and SIGINT is ignored; in vLLM both end it.",
     articles="2§2.4.8", vllm="826 WorkerProc.worker_main", when="multiprocess executor")
_row("worker.close_inherited_fds", "L", "W", "worker", "main:_WorkerMain._prepare_forked",
     "A forked worker closes the pipe ends of its elder siblings; a copy kept open would hide their EOF.",
     articles="2§4.6", vllm="850 WorkerProc.worker_main", when="start method fork")
_row("worker.monitor_death_pipe", "L", "W", "worker", "main:_WorkerMain._prepare",
     "A thread begins to watch the death pipe, whose EOF says that the parent is gone or wants the worker to end.",
     articles="2§2.4.7", vllm="781 WorkerProc.monitor_death_pipe", when="multiprocess executor")
_row("worker.init", "L", "W", "worker", "proc:WorkerProc.__init__",
     "WorkerProc builds the worker, the device, the model and the queues, in this order.",
     articles="1§4 2§2.4.2", vllm="594 WorkerProc.__init__", vllm_span="Worker init", when="multiprocess executor")
_row("worker.init_worker", "L", "W", "worker", "wrapper:WorkerWrapperBase.init_worker",
     "The wrapper resolves the worker class by its name and builds it.",
     articles="1§4", vllm="230 WorkerWrapperBase.init_worker", vllm_span="Worker init")
_row("worker.set_process_title", "L", "W", "worker", "names:setup_proc_title_and_log_prefix",
     "The process title and log prefix get the parallel ranks, once the groups exist.",
     articles="2§2.4.14", vllm="1011 WorkerProc.setup_proc_title_and_log_prefix", when="multiprocess executor")
_row("worker.init_device", "L", "W", "worker", "worker:Worker.init_device",
     "The worker takes its device, joins the process groups and builds its model runner.",
     articles="1§5", vllm="279 Worker.init_device", vllm_span="Init device")
_row("device.bind", "L", "W", "worker", "worker:Worker.init_device",
     "This rank's device is chosen and made current.",
     articles="1§5", vllm="343 Worker.init_device")
_row("dist.rendezvous", "L", "W", "worker", "dist:init_distributed_environment",
     "The ranks meet at the store; whoever comes first waits for the others.",
     articles="1§5", vllm="1648 init_distributed_environment")
_row("dist.init_process_group", "L", "W", "worker", "dist:init_distributed_environment",
     "The default process group of all ranks is built on the store with the chosen backend.",
     articles="1§5", vllm="1648 init_distributed_environment")
_row("dist.new_group", "L", "W", "group", "dist:GroupCoordinator.__init__",
     "One group of ranks gets its device and CPU communicators: world, tensor parallel, pipeline parallel and so on.",
     articles="2§2.4.14", vllm="387 GroupCoordinator.__init__")
_row("dist.init_communicator", "L", "W", "group", "dist:GroupCoordinator.init_communicator",
     "The first collective of a group, with a device synchronisation: only here does NCCL build its communicator.",
     articles="1§2 1§5", vllm="vllm/distributed/device_communicators/pynccl.py:144 PyNcclCommunicator.__init__")
_row("device.memory_snapshot", "L", "W", "worker", "worker:Worker.init_device",
     "Free and total memory are taken after the communicators have taken their buffers, so that these are not counted as the model's.",
     articles="1§8.3", vllm="370 Worker.init_device")
_row("runner.select", "L", "W", "worker", "worker:Worker.init_device",
     "Model Runner V2 or V1 is chosen, with the answer at each step of the decision.",
     articles="1§5 1§6", vllm="384 Worker.init_device")
_row("runner.init", "L", "W", "worker", "runner:GPUModelRunner.__init__",
     "The model runner builds its parts: request states, input buffers, block tables, and what this rank needs besides.",
     articles="1§8.1", vllm="121 GPUModelRunner.__init__")
_row("worker.load_model", "L", "W", "worker", "worker:Worker.load_model",
     "The model's modules are built, its weights loaded, and the parts that depend on the model made.",
     articles="1§8.2", vllm="406 Worker.load_model", vllm_span="Load model")
_row("model.initialize", "L", "W", "worker", "loader:DefaultModelLoader.load_model",
     "The modules are built with this rank's share of the parameters, still without values.",
     articles="1§8.2", vllm="vllm/model_executor/model_loader/utils.py:42 initialize_model",
     vllm_span="Initialize model")
_row("model.load_weights", "L", "W", "worker", "loader:DefaultModelLoader.load_model",
     "Each tensor is read from the checkpoint, and the shard that belongs to this rank is kept.",
     articles="1§8.2",
     vllm="vllm/model_executor/model_loader/default_loader.py:415 DefaultModelLoader.load_weights",
     vllm_span="Load weights")
_row("runner.init_model_state", "L", "W", "worker", "runner:GPUModelRunner.load_model",
     "Model state, sampler and rejection sampler are made where this rank needs them.",
     articles="1§8.2", vllm="vllm/v1/worker/gpu/model_states/__init__.py:11 init_model_state")
_row("worker.start_async_output_thread", "L", "W", "worker", "proc:WorkerProc._start_async_output_thread",
     "A thread begins to wait for outputs on the device and to send them, so that the loop can take the next RPC.",
     articles="2§2.4.2", vllm="640 WorkerProc.__init__", when="async scheduling")
_row("worker.init_message_queues", "L", "W", "worker", "proc:WorkerProc._init_message_queues",
     "The broadcast ring is opened from its handle and the response ring created, after init_device since queues over several nodes need the groups.",
     articles="2§2.4.1", vllm="561 WorkerProc._init_message_queues", when="multiprocess executor")
_row("worker.enable_envs_cache", "L", "W", "worker", "proc:WorkerProc.__init__",
     "From here on each environment variable keeps the value of its first use; in vLLM all are read and kept at this moment.",
     articles="2§2.4.2", vllm="656 WorkerProc.__init__", when="multiprocess executor")
_row("worker.send_ready", "L", "W", "worker", "main:_WorkerMain.run",
     "READY goes to the parent with the handle of the response ring, or here FAILED with the traceback; vLLM only closes the pipe.",
     articles="2§2.4.8", vllm="873 WorkerProc.worker_main", when="multiprocess executor")
_row("worker.mq_handshake", "L", "W", "worker", "main:_WorkerMain.run",
     "The worker waits for its queues in the executor's order: broadcast ring, then response ring.",
     articles="2§2.4.8", vllm="884 WorkerProc.worker_main", when="multiprocess executor")
_row("worker.get_kv_cache_spec", "L", "W", "worker", "worker:Worker.get_kv_cache_spec",
     "The worker says which attention layers it has and how many bytes a block of each takes.",
     articles="1§8.3", vllm="679 Worker.get_kv_cache_spec")
_row("worker.determine_available_memory", "L", "W", "worker", "worker:Worker.determine_available_memory",
     "The peak of a dummy run is measured; what the budget leaves is for the KV cache.",
     articles="1§8.3", vllm="430 Worker.determine_available_memory")
_row("runner.profile_run", "L", "W", "worker", "runner:GPUModelRunner.profile_run",
     "A dummy forward pass with the largest batch the scheduler may send.",
     articles="1§8.3", vllm="648 GPUModelRunner.profile_run")
_row("runner.initialize_kv_cache", "L", "W", "worker", "runner:GPUModelRunner.initialize_kv_cache",
     "The cache tensors, block tables and attention back end are made for the number of blocks that EngineCore decided.",
     articles="1§8.3", vllm="399 GPUModelRunner.initialize_kv_cache", vllm_span="Allocate KV cache")
_row("runner.warm_up", "L", "W", "worker", "worker:Worker.compile_or_warm_up_model",
     "First runs with real shapes, so that no request pays for compilation or allocation.",
     articles="1§8.3", vllm="724 Worker.compile_or_warm_up_model", vllm_span="Warmup (GPU)")
_row("runner.capture_model", "L", "W", "worker", "runner:GPUModelRunner.capture_model",
     "CUDA graphs are captured for the chosen batch sizes; on a CPU this is skipped and the span says why.",
     articles="1§8.3", vllm="685 GPUModelRunner.capture_model", vllm_span="Capture model")
_row("worker.busy_loop", "L", "W", "worker", "proc:WorkerProc.worker_busy_loop",
     "The worker takes RPCs from the broadcast ring until it is told or forced to end; the span says why it ended.",
     articles="2§2.4.13", vllm="983 WorkerProc.worker_busy_loop", when="multiprocess executor")

# --- running ---------------------------------------------------------------------------------------------------
_row("request", "R", "C", "request", "output:RequestState.__init__",
     "One request from its arrival to its last token, with token counts and finish reason.",
     vllm="712 OutputProcessor.do_tracing", vllm_span="llm_request")
_row("engine_core.step", "R", "E", "step", "core:EngineCore.step",
     "One step of the engine: schedule, execute, update; with a batch queue, one batch is sent while an older one is awaited.",
     articles="2§2.3.10", vllm="479 EngineCore.step")
_row("scheduler.schedule", "R", "E", "step", "scheduler:Scheduler.schedule",
     "The scheduler decides which requests get how many tokens and blocks in this step.",
     articles="1§2", vllm="396 Scheduler.schedule")
_row("scheduler.update_from_output", "R", "E", "step", "scheduler:Scheduler.update_from_output",
     "The new tokens are added to their requests, and finished requests give back their blocks.",
     articles="1§2", vllm="1499 Scheduler.update_from_output")
_row("rpc.call", "R", "E", "call", "mp:MultiprocExecutor._collective_rpc_traced",
     "One call of a method on all workers: method, sequence number, who replies, deadline, blocking or not.",
     articles="2§2.3.7", vllm="340 MultiprocExecutor.collective_rpc", kind="client")
_row("rpc.serialize_method", "M", "E", "call", "mp:MultiprocExecutor._submit",
     "A callable is pickled by value with cloudpickle so that workers can run code they do not have.",
     articles="2§2.3.7", vllm="373 MultiprocExecutor.collective_rpc", when="an RPC with a callable")
_row("mq.enqueue", "M", "EW", "call", "mq:enqueue",
     "A message is written into the ring: waiting for a free slot, copying, waking readers that sleep.",
     articles="2§2.5.2", vllm="727 MessageQueue.enqueue", kind="producer", when="multiprocess executor")
_row("mq.dequeue", "M", "WE", "call", "mq:dequeue",
     "A message is read from the ring: spinning, sleeping, unpickling; linked to the enqueue.",
     articles="2§2.5.2", vllm="772 MessageQueue.dequeue", kind="client", when="multiprocess executor")
_row("rpc.execute", "R", "W", "call", "proc:WorkerProc._execute_traced",
     "The method of one RPC runs on this rank.",
     articles="2§2.4.13", vllm="996 WorkerProc.worker_busy_loop", kind="server")
_row("rpc.resolve_method", "M", "W", "call", "proc:WorkerProc._execute_traced",
     "The method's name is looked up on the worker, or the pickled callable is loaded.",
     articles="2§2.4.13", vllm="991 WorkerProc.worker_busy_loop", when="multiprocess executor")
_row("rpc.handle_output", "R", "W", "call", "proc:WorkerProc._execute_traced",
     "The result is sent directly or handed to the output thread; ranks that need not reply skip this.",
     articles="2§2.4.11", vllm="955 WorkerProc.handle_output", when="multiprocess executor")
_row("rpc.enqueue_output", "R", "W", "call", "proc:WorkerProc.enqueue_output",
     "An output is awaited if it is still on the device, and goes into the response ring as SUCCESS or FAILURE.",
     articles="2§2.4.10 2§2.4.12", vllm="936 WorkerProc.enqueue_output", when="multiprocess executor")
_row("rpc.await_responses", "R", "E", "call", "mp:MultiprocExecutor._collective_rpc_traced",
     "The executor waits for the response queue of each rank that was asked, in rank order.",
     articles="2§2.3.7", vllm="380 MultiprocExecutor.collective_rpc", when="multiprocess executor")
_row("rpc.aggregate", "R", "E", "call", "call:PendingCall.finish",
     "The outputs of all ranks are merged into one by the KV output aggregator.",
     articles="2§2.3.7", vllm="363 MultiprocExecutor.collective_rpc", when="a KV output aggregator")
_row("future.result", "R", "E", "call", "future:FutureWrapper._wait",
     "Somebody waits for the result of a non-blocking RPC; older futures are drained first.",
     articles="2§2.1", vllm="83 FutureWrapper.result", when="non-blocking RPCs")
_row("runner.execute_model", "R", "W", "step", "runner:GPUModelRunner.execute_model",
     "One batch goes through states, inputs and the model; sampling is a call of its own.",
     articles="1§8.3", vllm="1114 GPUModelRunner.execute_model")
_row("runner.update_states", "R", "W", "step", "runner:GPUModelRunner.execute_model",
     "Finished requests leave their slots, new ones take slots, running ones get their new blocks.",
     articles="1§8.3", vllm="813 GPUModelRunner.update_requests")
_row("runner.prepare_inputs", "R", "W", "step", "runner:GPUModelRunner.execute_model",
     "The batch is laid out, decodes before prefills: token ids, positions, slot mapping, mapping from batch to slot.",
     articles="1§8.3", vllm="840 GPUModelRunner.prepare_inputs")
_row("model.forward", "R", "W", "step", "runner:GPUModelRunner.execute_model",
     "The forward pass, eager or as the replay of a captured graph.",
     articles="1§8.3", vllm="1324 GPUModelRunner.execute_model")
_row("dist.all_reduce", "M", "W", "call", "dist:GroupCoordinator.all_reduce",
     "A tensor is summed over the ranks of a group.",
     articles="2§4.4", vllm="641 GroupCoordinator.all_reduce", when="a group of more than one rank")
_row("dist.all_gather", "M", "W", "call", "dist:GroupCoordinator.all_gather",
     "The parts of a tensor are gathered from the ranks of a group.",
     articles="2§4.4", vllm="670 GroupCoordinator.all_gather", when="a group of more than one rank")
_row("dist.send", "M", "W", "call", "dist:GroupCoordinator.send_tensor_dict",
     "Hidden states go to the next pipeline stage, or sampled tokens from the last one to all others.",
     articles="2§4.4", vllm="998 GroupCoordinator.isend_tensor_dict", when="pipeline parallel")
_row("dist.recv", "M", "W", "call", "dist:GroupCoordinator.recv_tensor_dict",
     "Hidden states come from the previous pipeline stage, or sampled tokens from the last one.",
     articles="2§4.4", vllm="1093 GroupCoordinator.irecv_tensor_dict", when="pipeline parallel")
_row("runner.sample_tokens", "R", "W", "step", "runner:GPUModelRunner.sample_tokens",
     "The last pipeline stage samples the next tokens; the other stages receive them.",
     articles="1§8.3", vllm="1358 GPUModelRunner.sample_tokens")
_row("runner.apply_grammar", "R", "W", "step", "grammar:StructuredOutputsWorker.apply_grammar_bitmask",
     "Tokens that the grammar of a request does not allow are masked out of its logits.",
     articles="2§2.3.5", vllm="23 StructuredOutputsWorker.apply_grammar_bitmask", when="structured output")
_row("runner.propose_draft", "R", "W", "step", "speculator:Speculator.run",
     "The speculator proposes the tokens that the next step will verify.",
     articles="2§2.3.6", vllm="1466 GPUModelRunner.sample_tokens", when="speculative decoding")
_row("runner.postprocess", "R", "W", "step", "runner:GPUModelRunner.sample_tokens",
     "Counters, last tokens and output tokens of the requests advance on the device.",
     articles="1§8.3", vllm="1082 GPUModelRunner.postprocess_sampled")
_row("executor.execute_model", "R", "E", "step", "executor:Executor.execute_model",
     "The executor sends one scheduled batch to the workers.",
     articles="2§2.3.4", vllm="vllm/v1/executor/multiproc_executor.py:307 MultiprocExecutor.execute_model")
_row("executor.sample_tokens", "R", "E", "step", "executor:Executor.sample_tokens",
     "The executor has the tokens of the last batch sampled.",
     articles="2§2.3.5", vllm="vllm/v1/executor/multiproc_executor.py:319 MultiprocExecutor.sample_tokens")
_row("executor.take_draft_token_ids", "R", "E", "step", "executor:Executor.take_draft_token_ids",
     "The executor fetches the draft tokens of the last step.",
     articles="2§2.3.6", vllm="vllm/v1/executor/multiproc_executor.py:334 MultiprocExecutor.take_draft_token_ids",
     when="speculative decoding")
_row("executor.execute_dummy_batch", "R", "E", "call", "executor:Executor.execute_dummy_batch",
     "All workers run a batch without requests.",
     articles="2§2.3.10", vllm="vllm/v1/executor/multiproc_executor.py:331 MultiprocExecutor.execute_dummy_batch",
     when="execute_dummy_batch is called")
_row("executor.check_health", "R", "E", "call", "executor:Executor.check_health",
     "Every worker is asked whether it still answers.",
     articles="2§2.3.10", vllm="vllm/v1/executor/multiproc_executor.py:491 MultiprocExecutor.check_health",
     when="check_health is called")

# --- failure and shutdown --------------------------------------------------------------------------------------
_row("monitor.worker_died", "L", "E", "failure", "end:ExecutorResources.find_dead",
     "The monitor finds a worker dead: its rank, its exit code or signal, and the step it was in.",
     articles="2§2.3.2", vllm="282 MultiprocExecutor.start_worker_monitor.monitor_workers", when="a worker dies")
_row("executor.failure_callback", "L", "E", "failure", "mp:MultiprocExecutor.register_failure_callback",
     "Whoever registered for it is told that the executor has failed, at once when the failure came first.",
     articles="2§2.3.3", vllm="301 MultiprocExecutor.register_failure_callback", when="the executor fails")
_row("worker.exception", "L", "W", "failure", "proc:WorkerProc._report",
     "A method raised on this rank: type and traceback are sent to the caller as FAILURE.",
     articles="2§2.6.4", vllm="1000 WorkerProc.worker_busy_loop", when="a method raises on a worker")
_row("worker.parent_died", "L", "W", "failure", "death:DeathPipeMonitor._watch",
     "EOF on the death pipe: the parent is gone or asks to end, and the queues are shut down to wake the loop.",
     articles="2§2.4.7", vllm="785 WorkerProc.monitor_death_pipe.death_pipe_monitor", when="the death pipe closes")
_row("executor.shutdown", "L", "E", "engine_core", "end:ExecutorResources.shutdown",
     "The executor ends its workers and gives back what it took, once however often it is asked.",
     articles="2§2.3.9", vllm="456 MultiprocExecutor.shutdown")
_row("executor.close_death_writers", "L", "E", "engine_core", "end:ExecutorResources._end_workers",
     "The polite request: closing the death pipes tells each worker to end by itself.",
     articles="2§2.3.9", vllm="471 MultiprocExecutor.shutdown", when="multiprocess executor")
_row("executor.terminate_graceful", "L", "E", "engine_core", "end:ensure_worker_termination",
     "First level: the executor waits for workers to leave by themselves.",
     articles="2§2.3.8", vllm="430 MultiprocExecutor._ensure_worker_termination", when="multiprocess executor")
_row("executor.terminate_sigterm", "L", "E", "engine_core", "end:ensure_worker_termination",
     "Second level: workers that are left get SIGTERM.",
     articles="2§2.3.8", vllm="444 MultiprocExecutor._ensure_worker_termination",
     when="a worker outlives the polite request")
_row("executor.terminate_sigkill", "L", "E", "engine_core", "end:ensure_worker_termination",
     "Third level: workers that are still left get SIGKILL.",
     articles="2§2.3.8", vllm="454 MultiprocExecutor._ensure_worker_termination", when="a worker outlives SIGTERM")
_row("executor.close_message_queues", "L", "E", "engine_core", "end:ExecutorResources._end_workers",
     "The rings are closed and whoever waits on them is woken; their memory goes with the last process that has it mapped.",
     articles="2§2.3.9", vllm="481 MultiprocExecutor.shutdown", when="multiprocess executor")
_row("worker.shutdown", "L", "W", "worker", "proc:WorkerProc.shutdown",
     "The worker closes its queues, its runner and its groups.",
     articles="2§2.4.6", vllm="770 WorkerProc.shutdown")
_row("dist.destroy", "L", "W", "worker", "worker:Worker.shutdown",
     "The process groups are destroyed.",
     articles="2§2.4.6", vllm="vllm/distributed/parallel_state.py:2086 destroy_distributed_environment")
_row("engine_core.shutdown", "L", "EC", "run", "core:EngineCore.shutdown",
     "EngineCore ends: what became of the requests in flight, then the executor's shutdown.",
     articles="2§2.6.3", vllm="644 EngineCore.shutdown")
# fmt: on
