"""Synthetic traces: OTLP/JSON files as the processes of a run write them, with times that a test chooses.

`write_run` lays down a TP=n run in which every number is known: rank r is started 20 ms after rank r - 1,
each rank has its own bootstrap time, rank n - 1 is the slowest. Times are milliseconds on the run's clock.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minivllm.trace_store import TraceStore

EPOCH_NS = 1_800_000_000_000_000_000
MS = 1_000_000


class Tracer:
    """Writes the file of one process."""

    def __init__(
        self, run: Run, role: str, rank: int | None, pid: int, service: str, parent_pid: int
    ) -> None:
        self.run, self.role, self.rank, self.pid = run, role, rank, pid
        self.spans: list[dict[str, Any]] = []
        self.open: list[dict[str, Any]] = []
        self.resource = {
            "service.namespace": "minivllm",
            "service.name": service,
            "process.pid": pid,
            "process.parent_pid": parent_pid,
            "minivllm.role": role,
        }
        if rank is not None:
            self.resource["minivllm.rank"] = rank

    def span(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        parent: str = "",
        *,
        events: Sequence[tuple[str, float, dict[str, Any]]] = (),
        links: Iterable[str] = (),
        kind: int = 1,
        error: str = "",
        unfinished: bool = False,
        **attributes: Any,
    ) -> str:
        """Record a span and return its id; an unfinished one is left in the start journal only."""
        span_id = f"{self.run.next_id():016x}"
        (self.open if unfinished else self.spans).append(
            {
                "traceId": self.run.trace_id,
                "spanId": span_id,
                **({"parentSpanId": parent} if parent else {}),
                "name": name,
                "kind": kind,
                "startTimeUnixNano": str(EPOCH_NS + round(start_ms * MS)),
                **({} if unfinished else {"endTimeUnixNano": str(EPOCH_NS + round(end_ms * MS))}),
                "attributes": _attributes({_prefixed(k): v for k, v in attributes.items()}),
                "events": [
                    {
                        "name": event,
                        "timeUnixNano": str(EPOCH_NS + round(at_ms * MS)),
                        "attributes": _attributes({_prefixed(k): v for k, v in values.items()}),
                    }
                    for event, at_ms, values in events
                ],
                "links": [{"traceId": self.run.trace_id, "spanId": link} for link in links],
                "status": {"code": 2, "message": error} if error else {"code": 0},
            }
        )
        return span_id


class Run:
    """The directory of one run."""

    def __init__(self, directory: Path, trace_id: str = "5" * 32) -> None:
        self.directory, self.trace_id = directory, trace_id
        self._ids = 0
        self.tracers: list[Tracer] = []

    def next_id(self) -> int:
        self._ids += 1
        return 0xA000000000000000 + self._ids

    def process(self, role: str, rank: int | None, pid: int, service: str, parent_pid: int = 1) -> Tracer:
        tracer = Tracer(self, role, rank, pid, service, parent_pid)
        self.tracers.append(tracer)
        return tracer

    def write(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        for tracer in self.tracers:
            line = {
                "resourceSpans": [
                    {
                        "resource": {"attributes": _attributes(tracer.resource)},
                        "scopeSpans": [{"scope": {"name": "minivllm"}, "spans": tracer.spans}],
                    }
                ]
            }
            stem = self.directory / f"{tracer.role}-{tracer.pid}"
            stem.with_suffix(".jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
            if tracer.open:
                journal = [
                    {"resource": line["resourceSpans"][0]["resource"]},
                    *({"span": s} for s in tracer.open),
                ]
                text = "".join(json.dumps(entry) + "\n" for entry in journal)
                stem.with_suffix(".journal.jsonl").write_text(text, encoding="utf-8")
        return self.directory


def _prefixed(name: str) -> str:
    return name.replace("__", ".") if "__" in name else f"minivllm.{name}"


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    def value(v: Any) -> dict[str, Any]:
        if isinstance(v, bool):
            return {"boolValue": v}
        if isinstance(v, int):
            return {"intValue": str(v)}
        if isinstance(v, float):
            return {"doubleValue": v}
        if isinstance(v, (list, tuple)):
            return {"arrayValue": {"values": [value(x) for x in v]}}
        return {"stringValue": str(v)}

    return [{"key": k, "value": value(v)} for k, v in values.items()]


def write_run(
    directory: Path,
    *,
    tp: int = 2,
    steps: int = 9,
    level: str = "message",
    started_late: bool = False,
    dies: int | None = None,
) -> Path:
    """A run of `tp` workers and `steps` decode steps.

    Args:
        level: spans above this level are left out.
        started_late: the last worker is started after the parent began to wait (the invariant broken).
        dies: this rank is killed in worker.load_model.
    """
    run = Run(directory)
    client = run.process("client", None, 100, "minivllm.client")
    core = run.process("engine_core", None, 101, "minivllm.engine_core", 100)
    workers = [run.process("worker", r, 200 + r, f"minivllm.worker.tp{r}", 101) for r in range(tp)]
    rpc, message = level in ("rpc", "message"), level == "message"
    end = 3000.0 + 10 * steps + 200

    root = client.span(
        "run", 0, end, tensor_parallel_size=tp, trace_level=level, device="cpu", backend="gloo"
    )
    client.span("engine_core.spawn", 2, 12, root, pid=101)
    client.span("engine_core.ready", 12, 2900, root)

    init = core.span("engine_core.init", 200, 2890, root)
    executor = core.span("executor.init", 210, 2500, init)
    core.span("executor.create_broadcast_mq", 220, 225, executor, n_reader=tp)
    spawn_at = [310.0 + 20 * r for r in range(tp)]
    spawned = spawn_at[-1] + 12
    spawn = core.span("executor.spawn_workers", 300, spawned, executor)
    if started_late:
        spawn_at[-1] = spawned + 100
    make = [
        core.span("executor.make_worker_process", at, at + 10, spawn, rank=r, pid=200 + r)
        for r, at in enumerate(spawn_at)
    ]
    main_at = [at + 900 + 100 * r for r, at in enumerate(spawn_at)]
    ready_at = [2200.0 + 12 * r for r in range(tp)]
    wait_at = spawned + 2
    core.span(
        "executor.wait_for_ready",
        wait_at,
        ready_at[-1] + 1,
        executor,
        events=[("ready", at + 0.5, {"rank": r}) for r, at in enumerate(ready_at) if r != dies],
    )
    core.span("executor.mq_handshake", ready_at[-1] + 4, ready_at[-1] + 20, executor)
    meet = main_at[-1] + 50
    busy: list[str] = []
    for r, w in enumerate(workers):
        w.span("worker.bootstrap", spawn_at[r] + 1, main_at[r], make[r], rank=r)
        main = w.span("worker.main", main_at[r], end - 20, make[r], rank=r)
        wi = w.span("worker.init", main_at[r] + 5, ready_at[r], main, rank=r)
        device = w.span("worker.init_device", main_at[r] + 10, meet + 130, wi, rank=r)
        w.span("device.bind", main_at[r] + 10, main_at[r] + 12, device, rank=r)
        w.span("dist.rendezvous", main_at[r] + 20, meet + 5, device, rank=r)
        w.span("dist.init_process_group", meet + 5 + r, meet + 40, device, rank=r)
        for i, group in enumerate(("world", "tp", "pp")):
            w.span("dist.new_group", meet + 40 + 10 * i, meet + 48 + 10 * i, device, rank=r, group=group)
        w.span("dist.init_communicator", meet + 80, meet + 95, device, rank=r, group="tp")
        w.span("runner.init", meet + 100, meet + 120, device, rank=r)
        load = w.span(
            "worker.load_model",
            meet + 135,
            meet + 300,
            wi,
            rank=r,
            unfinished=r == dies,
        )
        if r == dies:
            continue
        w.span("model.initialize", meet + 136, meet + 200, load, rank=r)
        w.span("model.load_weights", meet + 200, meet + 298, load, rank=r, bytes=3_000_000)
        w.span("worker.init_message_queues", meet + 310, meet + 315, wi, rank=r)
        w.span("worker.send_ready", ready_at[r] - 1, ready_at[r], main, rank=r)
        w.span("worker.mq_handshake", ready_at[r] + 1, ready_at[-1] + 18, main, rank=r)
        loop = w.span("worker.busy_loop", ready_at[-1] + 19, end - 30, main, rank=r)
        busy.append(loop)
        w.span("worker.get_kv_cache_spec", 2510, 2512, loop, rank=r)
        profile = w.span("worker.determine_available_memory", 2520, 2700 + 10 * r, loop, rank=r)
        w.span("runner.profile_run", 2525, 2690 + 10 * r, profile, rank=r)
        w.span("runner.initialize_kv_cache", 2720, 2760, loop, rank=r)
        w.span("runner.warm_up", 2770, 2870, loop, rank=r)
    if dies is not None:
        died = meet + 300
        core.span(
            "worker.process",
            spawn_at[dies],
            died + 1,
            executor,
            rank=dies,
            process__pid=200 + dies,
            process__exit__code=-9,
            ended="was killed by SIGKILL",
            error="was killed by SIGKILL",
        )
        core.span(
            "monitor.worker_died", died + 2, died + 3, executor, rank=dies, exitcode=-9, error="was killed"
        )
        core.span("executor.failure_callback", died + 4, died + 5, executor)
        core.span("executor.shutdown", died + 6, died + 60, executor)
        return run.write()

    for n in range(steps if rpc else 0):
        at = 3000.0 + 10 * n
        step = core.span("engine_core.step", at, at + 8, root, step=n)
        core.span("scheduler.schedule", at + 0.1, at + 0.4, step, num_tokens=3 if n else 30, num_reqs=3)
        execute = core.span("executor.execute_model", at + 0.5, at + 7, step)
        call = core.span(
            "rpc.call",
            at + 0.6,
            at + 6.9,
            execute,
            kind=3,
            rpc__method="execute_model",
            seq=10 + n,
            blocking=True,
        )
        enqueue = ""
        if message:
            enqueue = core.span(
                "mq.enqueue", at + 0.7, at + 0.8, call, kind=4, queue="rpc_broadcast", slot=n % 10, bytes=612
            )
        answers = core.span("rpc.await_responses", at + 0.9, at + 6.8, call)
        for r, w in enumerate(workers):
            if message:
                w.span(
                    "mq.dequeue",
                    at - 2,
                    at + 0.9 + 0.05 * r,
                    busy[r],
                    kind=3,
                    links=[enqueue],
                    queue="rpc_broadcast",
                    slot=n % 10,
                    rank=r,
                )
            ex = w.span(
                "rpc.execute",
                at + 1 + 0.05 * r,
                at + 6 + 0.3 * r,
                call,
                kind=2,
                rpc__method="execute_model",
                rank=r,
            )
            model = w.span("runner.execute_model", at + 1.1 + 0.05 * r, at + 5.9 + 0.3 * r, ex, rank=r)
            w.span("runner.update_states", at + 1.2, at + 1.5, model, rank=r)
            w.span("runner.prepare_inputs", at + 1.5, at + 2, model, rank=r)
            w.span("model.forward", at + 2, at + 5.8 + 0.3 * r, model, rank=r)
            if r == 0:
                reply = w.span("rpc.enqueue_output", at + 6.1, at + 6.3, busy[r], rank=r)
                if message:
                    sent = w.span(
                        "mq.enqueue",
                        at + 6.15,
                        at + 6.25,
                        reply,
                        kind=4,
                        queue="response_0",
                        slot=n % 10,
                        bytes=90,
                        rank=r,
                    )
                    core.span(
                        "mq.dequeue",
                        at + 0.95,
                        at + 6.4,
                        answers,
                        kind=3,
                        links=[sent],
                        queue="response_0",
                        slot=n % 10,
                    )
        core.span("scheduler.update_from_output", at + 7.2, at + 7.8, step)
    stop = core.span("executor.shutdown", end - 60, end - 5, root)
    core.span("executor.close_death_writers", end - 59, end - 58, stop)
    core.span("executor.terminate_graceful", end - 58, end - 10, stop)
    for r, w in enumerate(workers):
        w.span("worker.shutdown", end - 40, end - 25, root, rank=r)
    return run.write()


@functools.cache
def large_run() -> Path:
    """A run of 100,000 spans (decode steps without end); gone with the session's temporary files."""
    return write_run(Path(tempfile.mkdtemp(prefix="large-")) / "trace", steps=5000)


def json_s() -> float:
    """Processor time in which json would read the large run: a limit for this machine, and for what else it does just now.

    Measured on a fifth of it. Seconds on a machine that does nothing else are in tests/benchmarks/bench_spans.py.
    """
    text = _fifth_as_json()
    gc.disable()
    begin = time.process_time()
    try:
        json.loads(text)
        return 5 * (time.process_time() - begin)
    finally:
        gc.enable()


@functools.cache
def _fifth_as_json() -> bytes | str:
    return TraceStore.open(
        write_run(Path(tempfile.mkdtemp(prefix="fifth-")) / "trace", steps=1000)
    ).encode_otlp()


if __name__ == "__main__":
    import sys

    write_run(Path(sys.argv[1]), steps=int(os.environ.get("STEPS", "9")))
