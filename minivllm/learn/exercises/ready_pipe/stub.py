"""A start that hangs when the child has much to say, and when it says nothing.

A child gets the writing end of a pipe, and sends one message through it: READY with a handle, or FAILED with its
traceback. Or it dies and sends nothing. The function below starts the child and returns the message.

Change it so that it returns in all these cases, and leaves nothing open.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.make_worker_process, wait_for_ready)
Articles: part 1 §3, part 2 §2.4.3, §2.4.4
"""

from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any


def run_child(context: SpawnContext, target: Callable[..., None], *args: Any) -> Any:
    """Run `target(writing_end, *args)` in a child and return the message that it sends.

    Raises:
        RuntimeError: the child ended without a message; the text has its exit code.
    """
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(writer, *args), daemon=True)
    process.start()
    process.join()
    return reader.recv()
