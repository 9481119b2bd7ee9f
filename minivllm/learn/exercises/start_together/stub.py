"""This executor never comes up: each worker is started and waited for in turn.

A worker's `init_device` is a meeting: it returns when all ranks have joined the process group. Then the worker sends
READY through its ready pipe. The function below starts the workers and collects what they send.

Change it so that the executor comes up, takes READY in whatever order the ranks say it, and gives up in time when a
rank never says it.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor._init_executor, WorkerProc.wait_for_ready)
Articles: part 2 §2.3.1, §2.4.4
"""

from multiprocessing.connection import Connection
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
    messages = []
    for process, pipe in zip(processes, ready_pipes, strict=True):
        process.start()
        messages.append(pipe.recv())
    return messages
