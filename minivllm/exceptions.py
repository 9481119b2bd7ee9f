"""The errors that a user of minivllm can meet, each saying what happened, where, and what to do.

vLLM 0.25.1: vllm/v1/engine/exceptions.py (EngineDeadError), vllm/exceptions.py (VLLMValidationError)
Articles: part 2 §2.6.4
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot work. Raised in the caller before any process starts; the CLI exits with code 2."""


class RequestError(ValueError):
    """A request that cannot be served (too long, empty, bad sampling argument). Other requests go on."""


class EngineDeadError(RuntimeError):
    """The engine has failed for good; the text carries the first cause (rank, step, signal or traceback)."""


class ExecutorFailedError(RuntimeError):
    """A worker died or the executor was shut down: no further RPC is possible on this executor."""


class WorkerStartupError(ExecutorFailedError):
    """A worker did not become ready; the text names its rank, the step it was in, and carries its traceback."""


class WorkerStartupTimeout(WorkerStartupError, TimeoutError):
    """Not all workers became ready in time; the text names those that are missing and the step each is in."""


class WorkerConfigError(WorkerStartupError, ConfigError):
    """A worker met a setting or a checkpoint that cannot work; the CLI exits with code 2, as with one process."""


class MessageQueueClosed(RuntimeError):
    """The queue was shut down, or the wait was cancelled; the text is the reason that was given for it."""


class MessageDecodeError(RuntimeError):
    """A message that could not be unpickled (see the cause). It is consumed: the next dequeue gets the next one."""


class RemoteError(RuntimeError):
    """A method raised on a worker. The text names rank, method, type and message, and carries the remote traceback.

    Attributes:
        rank: global rank of the worker that raised.
        method: name of the method that was called.
        type_name: qualified name of the remote exception's type.
        remote_message: the remote exception's message, or a note that it has none.
        remote_traceback: the traceback as formatted in the worker.
    """

    def __init__(
        self, rank: int, method: str, type_name: str, remote_message: str, remote_traceback: str
    ) -> None:
        self.rank = rank
        self.method = method
        self.type_name = type_name
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        super().__init__(
            f"worker rank {rank} raised {type_name} in {method}: {remote_message}\n"
            f"--- traceback on rank {rank} ---\n{remote_traceback.rstrip()}"
        )

    def __reduce__(self) -> tuple[type[RemoteError], tuple[int, str, str, str, str]]:
        # The default would call __init__ with the composed message only.
        return (
            type(self),
            (self.rank, self.method, self.type_name, self.remote_message, self.remote_traceback),
        )
