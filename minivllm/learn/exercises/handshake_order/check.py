"""Handshake-order: an executor and two workers with minivllm's own rings.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from minivllm.distributed.shm_broadcast import Handle, MessageQueue
from minivllm.learn import kit

RANKS = 2
SLOT_BYTES = 4096
SLOTS = 2


def check_all_get_through(module: Any) -> None:
    """Executor and workers shake hands in an order in which nobody waits for somebody who waits for him."""
    with _workers(module, [5.0 * kit.slack()] * RANKS) as (broadcast, responses, pipes):
        try:
            module.executor_handshake(broadcast, responses, 2.0 * kit.slack())
        except TimeoutError as error:
            raise kit.Broken(
                f"the executor waits for the workers, and they wait for the executor: {error}"
            ) from None
        broadcast.enqueue("hello", timeout=2 * kit.slack())
        for rank, response in enumerate(responses):
            said = pipes[rank].recv() if pipes[rank].poll(2 * kit.slack()) else "nothing"
            if said != "through":
                raise kit.Broken(f"rank {rank} is not through: {said}")
            answer = response.dequeue(timeout=2 * kit.slack())
            if answer != ("hello", rank):
                raise kit.Broken(f"rank {rank} answered {answer!r} to the first message")


def check_one_deadline(module: Any) -> None:
    """The limit is for the whole handshake, not for each ring."""
    limit_s = 0.6 * kit.slack()
    # Rank 0 comes late, within the limit; rank 1 never comes.
    with _workers(module, [5.0 * kit.slack(), 0.0], delays_s=[0.7 * limit_s, 0.0]) as (
        broadcast,
        responses,
        _,
    ):
        started = time.monotonic()
        try:
            module.executor_handshake(broadcast, responses, limit_s)
        except TimeoutError:
            took_s = time.monotonic() - started
            if took_s > 1.45 * limit_s:
                raise kit.Broken(f"the limit was {limit_s:.2f} s, and it took {took_s:.2f} s") from None
        else:
            raise kit.Broken("rank 1 never came, and executor_handshake returned")


@contextmanager
def _workers(
    module: Any, limits_s: list[float], delays_s: list[float] | None = None
) -> Iterator[tuple[MessageQueue, list[MessageQueue], list[Connection]]]:
    """Broadcast ring, response rings and a pipe per rank; all ends are attached. A worker with limit 0 never shakes hands."""
    broadcast = MessageQueue(
        RANKS, RANKS, max_chunk_bytes=SLOT_BYTES, max_chunks=SLOTS, name="broadcast ring"
    )
    pipes = [kit.context.Pipe() for _ in range(RANKS)]
    processes = [
        kit.start(
            _worker,
            module.worker_handshake,
            broadcast.export_handle(),
            rank,
            limit_s,
            (delays_s or [0.0] * RANKS)[rank],
            pipe[1],
        )
        for rank, (limit_s, pipe) in enumerate(zip(limits_s, pipes, strict=True))
    ]
    ours = [pipe[0] for pipe in pipes]
    responses = []
    try:
        for rank, pipe in enumerate(ours):
            if not pipe.poll(10 * kit.slack()):
                raise kit.Broken(f"rank {rank} did not start")
            responses.append(MessageQueue.create_from_handle(pipe.recv(), 0))
        for pipe in ours:
            pipe.send("go")
        yield broadcast, responses, ours
    finally:
        kit.end(*processes)
        for queue in (broadcast, *responses):
            queue.shutdown()


def _worker(
    handshake: Any, handle: Handle, rank: int, limit_s: float, delay_s: float, pipe: Connection
) -> None:
    broadcast = MessageQueue.create_from_handle(handle, rank)
    response = MessageQueue(
        1, 1, max_chunk_bytes=SLOT_BYTES, max_chunks=SLOTS, name=f"response ring of rank {rank}"
    )
    pipe.send(response.export_handle())
    pipe.recv()
    time.sleep(delay_s if limit_s else 60)
    try:
        handshake(broadcast, response, limit_s)
    except TimeoutError as error:
        pipe.send(str(error))
        return
    pipe.send("through")
    response.enqueue((broadcast.dequeue(timeout=10), rank), timeout=10)
    time.sleep(60)
