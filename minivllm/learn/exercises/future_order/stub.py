"""FutureWrapper out of order: the second future gets the first answer.

One worker executes calls one after the other and answers each through a pipe, in that order. Answers carry no number.
`call` returns a future at once; `result` waits for the answer.

Change the two classes so that every future gets its own answer, whatever the order in which results are asked for, and
from whichever thread. Nobody but them reads from the connection.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (FutureWrapper)
Articles: part 2 §2.1, §3.8, §4.2
"""

from multiprocessing.connection import Connection
from typing import Any


class Future:
    """The answer to one call."""

    def __init__(self, client: "Client") -> None:
        self.client = client

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            RuntimeError: the call failed in the worker; the text is the worker's.
        """
        status, value = self.client.connection.recv()
        if status == "failed":
            raise RuntimeError(value)
        return value


class Client:
    """Sends calls to one worker."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def call(self, method: str, *args: Any) -> Future:
        self.connection.send((method, args))
        return Future(self)
