"""The same order on both sides: the broadcast ring, then the response rings.

With response rings first, the executor begins as a reader and waits for each worker's step as a writer; each worker
begins as a reader, too, and waits for the executor's. As soon as one side begins as a writer, which waits for nobody's
step, the circle is open. One order on both sides is the simple way to be sure of that.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor._init_executor, WorkerProc.worker_main)
Articles: part 2 §2.3.1, §2.4.8
"""

import time

from minivllm.distributed.shm_broadcast import MessageQueue


def executor_handshake(broadcast: MessageQueue, responses: list[MessageQueue], limit_s: float) -> None:
    """The executor's part: it writes `broadcast` and reads `responses`, one per rank.

    Raises:
        TimeoutError: some worker did not come.
    """
    deadline = time.monotonic() + limit_s
    for queue in (broadcast, *responses):
        queue.wait_until_ready(deadline - time.monotonic())


def worker_handshake(broadcast: MessageQueue, response: MessageQueue, limit_s: float) -> None:
    """The part of one worker: it reads `broadcast` and writes `response`."""
    deadline = time.monotonic() + limit_s
    for queue in (broadcast, response):
        queue.wait_until_ready(deadline - time.monotonic())
