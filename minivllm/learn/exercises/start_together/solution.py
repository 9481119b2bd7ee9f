"""All workers are started before any is waited for, and all pipes are waited for at once.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor._init_executor, WorkerProc.wait_for_ready)
Articles: part 2 §2.3.1, §2.4.4
"""

import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess


def start_workers(processes: list[BaseProcess], ready_pipes: list[Connection], limit_s: float) -> list[str]:
    """Start all workers and return what they sent, by rank.

    Args:
        processes: one per rank, not started yet.
        ready_pipes: the reading end of each worker's ready pipe.
        limit_s: seconds for all of them together.

    Raises:
        TimeoutError: some rank was not ready in time; the text names the ranks that are missing ("rank 1").
    """
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.start()
    missing: dict[object, int] = {pipe: rank for rank, pipe in enumerate(ready_pipes)}
    messages: dict[int, str] = {}
    while missing:
        ready = wait([pipe for pipe in ready_pipes if pipe in missing], deadline - time.monotonic())
        if not ready:
            names = ", ".join(f"rank {rank}" for rank in missing.values())
            raise TimeoutError(f"not ready after {limit_s} s: {names}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            messages[missing.pop(pipe)] = pipe.recv()
    return [messages[rank] for rank in sorted(messages)]
