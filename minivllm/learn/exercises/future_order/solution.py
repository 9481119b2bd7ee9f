"""Who waits for a result takes the answers of all older calls first, and puts each where it belongs.

One lock covers taking the oldest future and reading its answer. Without it two threads could take two futures and then
read the pipe in the other order. vLLM's FutureWrapper has no such lock.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (FutureWrapper)
Articles: part 2 §2.1, §3.8, §4.2
"""

import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import Any


class Future:
    """The answer to one call."""

    def __init__(self, client: "Client") -> None:
        self.client = client
        self.answer: tuple[str, Any] | None = None

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            RuntimeError: the call failed in the worker; the text is the worker's.
        """
        client = self.client
        with client.reading:
            while self.answer is None:
                client.waiting.popleft().answer = client.connection.recv()
        status, value = self.answer
        if status == "failed":
            raise RuntimeError(value)
        return value


class Client:
    """Sends calls to one worker.

    Attributes:
        waiting: futures without an answer, oldest first.
        reading: held by the thread that takes answers.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.waiting: deque[Future] = deque()
        self.reading = threading.Lock()
        self.sending = threading.Lock()

    def call(self, method: str, *args: Any) -> Future:
        future = Future(self)
        # The order of the deque is that of the pipe.
        with self.sending:
            self.connection.send((method, args))
            self.waiting.append(future)
        return future
