"""The result of a non-blocking RPC: a Future that takes its response from the queues when somebody wants it.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (FutureWrapper)
Articles: part 2 §2.1, §4.2
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from minivllm import tracing
from minivllm.executor.responses import release_if_owned

if TYPE_CHECKING:
    from minivllm.executor.call import PendingCall
    from minivllm.executor.rpc import RpcChannel


class _Waiters(list[Any]):
    """The list in which concurrent.futures.wait() and as_completed() enter themselves; tells when they do."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        self._on_wait()


class FutureWrapper(Future[Any]):
    """Responses are taken in the order of the calls: whoever waits for this result drains the older futures first.

    Nobody runs in the background for result(), which reads the queues in the caller's thread and so costs no
    hand-off. Only when somebody wants to be told without asking (add_done_callback, concurrent.futures.wait) does
    one thread of the channel take the responses.

    Deviation from vLLM: result(timeout) works, any number of threads may wait, callbacks and wait() fire, and
    done() tells the truth. There the shared deque has no lock and nothing happens before result() is called.
    """

    def __init__(self, channel: RpcChannel, call: PendingCall) -> None:
        super().__init__()
        self._channel = channel
        self._call = call
        self._waiters = _Waiters(self._watch)
        call.future = self

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the response, draining older futures first.

        Raises:
            TimeoutError: `timeout` seconds have passed; the call goes on and may be asked again.
            CancelledError: the future was cancelled.
            Exception: what the call itself ended with.
        """
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call ended with, None when it has a result. Waits like result()."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if not self._call.done:
            limit = None if timeout is None else tracing.deadline_clock() + timeout
            responses = self._channel.responses
            attributes = {"method": self._call.method, "seq": self._call.sequence}
            with tracing.hot_span("future.result", attributes):
                try:
                    attributes["drained"] = responses.wait(self._call, limit)
                except BaseException:
                    release_if_owned(responses.lock)
                    raise
        self.publish()

    def publish(self) -> None:
        """Hand the outcome of the finished call to this future; again, or after cancel(), does nothing."""
        if super().done():
            return
        with suppress(InvalidStateError):
            try:
                outcome = self._call.outcome()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(outcome)

    def done(self) -> bool:
        """Whether a result, an error or a cancellation is there; looks into the queues, and does not wait."""
        if not super().done():
            self._channel.responses.poll(self._call)
            if self._call.done:
                self.publish()
        return super().done()

    def cancel(self) -> bool:
        """Give the result up: the workers still run the method, and their responses are dropped on arrival."""
        cancelled = super().cancel()
        if cancelled:
            self._channel.abandon(self._call)
        return cancelled

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call `fn` with this future as soon as it is done, in whichever thread notices."""
        super().add_done_callback(fn)
        self._watch()

    def _watch(self) -> None:
        if not self._call.done:
            self._channel.watch(self._call)
