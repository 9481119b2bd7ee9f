"""Start-together: three workers that meet at a barrier, as ranks do in init_process_group.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from minivllm.learn import kit

RANKS = 3


def check_started_before_waited_for(module: Any) -> None:
    """All workers are started before any is waited for."""
    got = _start(module, limit_s=20.0, patience_s=2.5, last_first=False, never_ready=-1)
    if sorted(got) != [f"READY {rank}" for rank in range(RANKS)]:
        raise kit.Broken(f"start_workers returned {got}")


def check_any_order(module: Any) -> None:
    """Ranks may become ready in any order; what they sent is returned by rank."""
    got = _start(module, limit_s=20.0, patience_s=5, last_first=True, never_ready=-1)
    if got != [f"READY {rank}" for rank in range(RANKS)]:
        raise kit.Broken(f"with rank {RANKS - 1} ready first, start_workers returned {got}")


def check_deadline(module: Any) -> None:
    """A rank that never becomes ready is named when the time is over, and the time is for all ranks together."""
    limit_s = 1.0 * kit.slack()
    started = time.monotonic()
    try:
        got = _start(module, limit_s, patience_s=3 * limit_s, last_first=True, never_ready=1)
    except TimeoutError as error:
        if "1" not in str(error).replace(f"{limit_s}", ""):
            raise kit.Broken(f"rank 1 is missing, and the error does not say so: {error}") from None
        if time.monotonic() - started > 1.9 * limit_s:
            raise kit.Broken(
                f"the limit was {limit_s:.1f} s, and it took {time.monotonic() - started:.1f} s"
            ) from None
    else:
        raise kit.Broken(f"rank 1 never became ready, and start_workers returned {got}")


def _start(module: Any, limit_s: float, patience_s: float, last_first: bool, never_ready: int) -> list[str]:
    barrier = kit.context.Barrier(RANKS)
    pipes = [kit.context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [
        kit.context.Process(
            target=_worker,
            args=(
                rank,
                barrier,
                pipes[rank][1],
                0.1 * (RANKS - rank) if last_first else 0.0,
                rank == never_ready,
            ),
            daemon=True,
        )
        for rank in range(RANKS)
    ]
    try:
        return kit.within(
            patience_s,
            "start_workers",
            module.start_workers,
            processes,
            [reader for reader, _ in pipes],
            limit_s,
        )
    finally:
        kit.end(*[process for process in processes if process.pid is not None])


def _worker(rank: int, barrier: Any, ready: Connection, pause_s: float, never_ready: bool) -> None:
    barrier.wait()
    time.sleep(60 if never_ready else pause_s)
    ready.send(f"READY {rank}")
