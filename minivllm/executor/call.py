"""One RPC on its way, and the words of the protocol between executor and workers.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.ResponseStatus, get_response)
Articles: part 2 §2.3.7, §2.4.9

A request is `(number, method, args, kwargs, reply_rank, trace context)`, a response `(number, status, result)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from minivllm import tracing
from minivllm.exceptions import RemoteError

if TYPE_CHECKING:
    from minivllm.executor.future import FutureWrapper

# Plain numbers: pickling a member of an Enum costs more than the rest of the response.
SUCCESS: Final = 0
FAILURE: Final = 1  # counted on the status page, too
OUTPUT_FAILURE: Final = 2  # found by the output thread after the method had ended; not counted
SUCCESS_BY_VALUE: Final = 3  # the result as by_value.dumps gives it, since pickle could not take it

NO_RESPONSE: Final = object()


class PendingCall:
    """What the caller's side knows of one RPC.

    Attributes:
        method: name for messages.
        ranks: the ranks that reply.
        unique: one result is wanted, not a list.
        deadline: on the clock of deadlines; None: no limit.
        results: `[world_size]`, NO_RESPONSE where there is none (yet).
        error: what went wrong.
        done: the outcome is settled.
    """

    __slots__ = (
        "_aggregate",
        "_outcome",
        "deadline",
        "done",
        "error",
        "future",
        "method",
        "ranks",
        "results",
        "sequence",
        "timeout",
        "unique",
    )

    def __init__(
        self,
        method: str,
        ranks: tuple[int, ...],
        unique: bool,
        timeout: float | None,
        world_size: int,
        aggregate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.method = method
        self.ranks = ranks
        self.unique = unique
        self.timeout = timeout
        self.deadline = None if timeout is None else tracing.deadline_clock() + timeout
        self.results: list[Any] = [NO_RESPONSE] * world_size
        self.error: BaseException | None = None
        self.sequence = 0
        self.done = False
        self.future: FutureWrapper | None = None
        self._aggregate = aggregate
        self._outcome: Any = None

    def incomplete(self) -> bool:
        """Whether a response is missing."""
        return any(self.results[rank] is NO_RESPONSE for rank in self.ranks)

    def fail(self, error: BaseException) -> None:
        """Note an error. The first one counts, except that of several ranks' errors the lowest rank's does."""
        first = self.error
        if self.done:
            return
        if isinstance(first, RemoteError) and isinstance(error, RemoteError):
            if _importance(error) < _importance(first):
                first, error = error, first
            if sys.version_info >= (3, 11):
                first.add_note(f"rank {error.rank} failed, too: {error.type_name}: {error.remote_message}")
            self.error = first
        elif first is None or not isinstance(error, RemoteError):
            self.error = error

    def finish(self) -> None:
        """Settle the outcome: everything that will come has come."""
        if self.done:
            return
        if self.error is None:
            try:
                if self._aggregate is not None:
                    with tracing.span("rpc.aggregate", method=self.method):
                        self._outcome = self._aggregate(self.results)
                else:
                    self._outcome = self.results[self.ranks[0]] if self.unique else self.results
            except Exception as error:
                self.error = error
        self.done = True

    def outcome(self) -> Any:
        """The result of a call that is done.

        Raises:
            BaseException: what the call ended with.
        """
        if self.error is not None:
            raise self.error
        return self._outcome


def _importance(error: RemoteError) -> tuple[bool, int]:
    """Of several ranks that fail the lowest is reported; one that only noticed another's failure comes last."""
    return error.type_name.endswith(".CollectiveError"), error.rank
