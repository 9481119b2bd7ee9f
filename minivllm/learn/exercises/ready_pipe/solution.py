"""Read first, then wait for the end; and no writing end in the parent.

A writer blocks when the pipe is full, so a parent that joins before it reads waits for a child that waits for it. And
the parent's own copy of the writing end would keep the pipe open when the child is gone.

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
    with reader:
        process = context.Process(target=target, args=(writer, *args), daemon=True)
        with writer:
            process.start()
        try:
            return reader.recv()
        except EOFError:
            process.join()
            raise RuntimeError(
                f"the child ended with exit code {process.exitcode} before it was ready"
            ) from None
        finally:
            process.join()
