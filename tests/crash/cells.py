"""The cells of the crash matrix: every lifecycle and rpc step of a TP=2 run, on every process that has it.

A test compares this table with what a run emits, so a new step cannot be forgotten.
"""

from __future__ import annotations

from minivllm.trace_store import TraceStore
from minivllm.tracing.catalogue import SPANS
from minivllm.tracing.spec import RPC
from tests.crash.harness import Cell

# Steps in the order of a run. Those of the second list of workers need a model; the others do with a light worker.
_CLIENT = "run engine_core.spawn engine_core.ready request"
_ENGINE = """
    engine_core.init executor.init executor.parallel_sizes executor.set_worker_envs executor.distributed_init_method
    executor.create_broadcast_mq executor.spawn_workers executor.make_worker_process worker.process
    executor.wait_for_ready executor.connect_response_mq executor.start_worker_monitor executor.collect_response_mqs
    executor.mq_handshake executor.post_init engine_core.init_kv_caches rpc.call rpc.await_responses
    engine_core.init_scheduler engine_core.step scheduler.schedule executor.execute_model executor.sample_tokens
    future.result scheduler.update_from_output
"""
_ENGINE_STOP = """
    engine_core.shutdown executor.shutdown executor.close_death_writers executor.terminate_graceful
    executor.close_message_queues
"""
_WORKER = """
    worker.bootstrap worker.main worker.install_signal_handlers worker.monitor_death_pipe worker.init worker.init_worker
    worker.set_process_title worker.init_message_queues worker.enable_envs_cache worker.send_ready worker.mq_handshake
    worker.busy_loop rpc.execute rpc.handle_output rpc.enqueue_output
"""
_WORKER_STOP = "worker.parent_died worker.shutdown"
_MODEL = """
    worker.init_device device.bind dist.rendezvous dist.init_process_group dist.new_group dist.init_communicator
    device.memory_snapshot runner.select runner.init worker.load_model model.initialize model.load_weights
    runner.init_model_state worker.get_kv_cache_spec worker.determine_available_memory runner.profile_run
    runner.initialize_kv_cache runner.warm_up runner.execute_model runner.update_states runner.prepare_inputs
    model.forward runner.sample_tokens runner.postprocess runner.capture_model
"""
_MODEL_STOP = "dist.destroy"


# On rank 0 these die in the warm-up, where they come first; on rank 1 in the middle of decoding.
_IN_EVERY_STEP = """
    rpc.execute runner.execute_model runner.update_states runner.prepare_inputs model.forward runner.sample_tokens
    runner.postprocess
"""
_DECODING = 8


def _cells(spans: str, who: tuple[str, ...], light: bool, stop: bool = False) -> list[Cell]:
    return [
        Cell(
            span,
            process,
            "stop" if stop else "up",
            light,
            nth=_DECODING if process == "rank1" and span in _IN_EVERY_STEP.split() else 1,
        )
        for span in spans.split()
        for process in who
    ]


_WORKERS = ("rank0", "rank1")
CELLS: list[Cell] = [
    *_cells(_CLIENT, ("client",), light=True),
    *_cells(_ENGINE, ("engine",), light=True),
    *_cells(_ENGINE_STOP, ("engine",), light=True, stop=True),
    *_cells(_WORKER, _WORKERS, light=True),
    *_cells(_WORKER_STOP, _WORKERS, light=True, stop=True),
    *_cells(_MODEL, _WORKERS, light=False),
    *_cells(_MODEL_STOP, _WORKERS, light=False, stop=True),
]


def _spread() -> list[Cell]:
    """All of the client's, every second one of EngineCore's, each light step of the workers on one rank in turn, and
    every eighth step that needs a model."""
    client = [cell for cell in CELLS if cell.who == "client"]
    engine = [cell for cell in CELLS if cell.who == "engine"][::2]
    workers = [cell for cell in CELLS if cell.who in _WORKERS]
    steps = {
        light: list(dict.fromkeys(c.span for c in workers if c.light is light)) for light in (True, False)
    }
    on_rank = {span: f"rank{index % 2}" for light in steps for index, span in enumerate(steps[light])}
    chosen = {*steps[True], *steps[False][1::8]}
    return [*client, *engine, *(c for c in workers if c.span in chosen and c.who == on_rank[c.span])]


SPREAD: list[Cell] = _spread()


def emitted(store: TraceStore) -> set[tuple[str, str]]:
    """(span, process) of every lifecycle and rpc span of a run that its own process emitted."""
    found = set()
    for span in store.spans():
        role = span.process.role
        who = f"rank{span.process.rank}" if role == "worker" else {"engine_core": "engine"}.get(role, role)
        if SPANS[span.name].level <= RPC:
            found.add((span.name, who))
    return found
