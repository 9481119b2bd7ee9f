"""Two handshakes that wait for each other.

Between the executor and its workers there is one broadcast ring, which the executor writes, and a response ring per
worker, which that worker writes. Before the first message, both sides of each ring call `wait_until_ready`. In it the
writer waits until all readers have attached; a reader waits until the writer has seen them all.

These are minivllm's real rings. All ends exist when the two functions below are called, one in the executor and one in
each worker. Change them so that everybody gets through. `limit_s` is for the whole handshake, however many rings there are.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor._init_executor, WorkerProc.worker_main)
Articles: part 2 §2.3.1, §2.4.8
"""

from minivllm.distributed.shm_broadcast import MessageQueue


def executor_handshake(broadcast: MessageQueue, responses: list[MessageQueue], limit_s: float) -> None:
    """The executor's part: it writes `broadcast` and reads `responses`, one per rank.

    Raises:
        TimeoutError: some worker did not come.
    """
    for response in responses:
        response.wait_until_ready(limit_s)
    broadcast.wait_until_ready(limit_s)


def worker_handshake(broadcast: MessageQueue, response: MessageQueue, limit_s: float) -> None:
    """The part of one worker: it reads `broadcast` and writes `response`."""
    broadcast.wait_until_ready(limit_s)
    response.wait_until_ready(limit_s)
