"""The sending half of all RPCs: numbers calls and broadcasts them; the other half is responses.py.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor.collective_rpc)
Articles: part 2 §2.3.7, §4.2
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from minivllm.distributed.shm_broadcast import MessageQueue, MessageQueueClosed
from minivllm.executor.call import PendingCall
from minivllm.executor.rank_report import RankReport
from minivllm.executor.responses import Responses, release_if_owned
from minivllm.executor.status_page import StatusPage
from minivllm.tracing.deadlines import deadline_clock

# Method of a message that only states its number: sent after an interrupted one, which may or may not have gone out.
NO_METHOD = None

# Unread responses fill the response rings, and a worker at a full ring takes no further request.
_UNREAD_CALLS = 4


class RpcChannel:
    """All calls of one executor.

    It knows nothing of the executor object, so that futures and threads which hold the channel do not keep a
    forgotten executor alive.

    Invariants:
        1. Numbers are given and sent under one lock: the workers see them in order and without gaps.
        2. Nothing is sent while a rank may still be inside a call that failed on another rank: ranks that are not in
           step would match the wrong collectives.
        3. Whoever reads responses never asks for the sending lock.
    """

    def __init__(
        self,
        broadcast_mq: MessageQueue,
        response_mqs: Sequence[MessageQueue],
        page: StatusPage,
        find_dead: Callable[[float], bool],
        fail: Callable[[str], object],
        stuck_timeout_s: float,
    ) -> None:
        """
        Args:
            find_dead: waits at most so many seconds for a worker to die; True when one has, and the channel is closed.
            fail: declares the executor failed for a reason, and closes the channel.
            stuck_timeout_s: how long a rank may stay inside a call that has failed on another rank.
        """
        self._broadcast_mq = broadcast_mq
        self._find_dead = find_dead
        self._fail = fail
        self._stuck_timeout_s = stuck_timeout_s
        self.report = RankReport(page)
        self.responses = Responses(response_mqs, page, find_dead, self.report)
        self._send_lock = threading.RLock()
        self._sequence = 0
        self._unsure = False  # whether the last number has reached the workers
        self._watch_lock = threading.Lock()
        self._watched: SimpleQueue[PendingCall | None] | None = None
        broadcast_mq.on_wait = self._while_sending

    def submit(
        self,
        method: str | bytes,
        label: str,
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        reply_rank: int | None,
        aggregate: Callable[[list[Any]], Any] | None = None,
        context: bytes = b"",
    ) -> PendingCall:
        """Number a call and broadcast it.

        Args:
            label: the method's name for messages.
            reply_rank: the only rank that replies; None for all.
            context: trace context of the call.

        Raises:
            TimeoutError: not sent within the limit.
            ExecutorFailedError: nothing can be sent any more.
            Exception: the arguments cannot be pickled.
        """
        responses = self.responses
        responses.check_owner()
        ranks = responses.ranks
        call = PendingCall(
            label,
            ranks if reply_rank is None else (reply_rank,),
            reply_rank is not None,
            timeout,
            len(ranks),
            aggregate,
        )
        try:
            if not self._send_lock.acquire(blocking=False):
                self._await_turn(call)
            try:
                if responses.closed:
                    raise responses.error()
                if responses.suspect is not None:
                    self._await_suspect(call)
                if self._unsure:
                    self._send_number()
                if len(responses.pending) > _UNREAD_CALLS:
                    responses.try_drain()
                self._send(call, (method, args, kwargs, reply_rank, context))
            finally:
                self._send_lock.release()
        except MessageQueueClosed:
            raise responses.error() from None
        except BaseException:
            # An interrupt may have come after the lock was taken and before the inner block was entered.
            release_if_owned(self._send_lock)
            raise
        return call

    def _await_turn(self, call: PendingCall) -> None:
        deadline = call.deadline
        if deadline is None:
            self._send_lock.acquire()
            return
        while not self._send_lock.acquire(timeout=max(0.0, deadline - deadline_clock())):
            if deadline_clock() >= deadline:
                raise TimeoutError(
                    f"RPC {call.method} was not sent within {call.timeout} s: others are being sent"
                )

    def _send(self, call: PendingCall, request: tuple[Any, ...]) -> None:
        remaining = None
        if call.deadline is not None:
            remaining = call.deadline - deadline_clock()
            if remaining <= 0:
                raise TimeoutError(
                    f"RPC {call.method} was not sent: its limit of {call.timeout} s has passed"
                )
        self._sequence = call.sequence = number = self._sequence + 1
        responses = self.responses
        responses.expect(call)
        try:
            self._broadcast_mq.enqueue((number, *request), remaining)
        except MessageQueueClosed:
            responses.not_sent(call)
            raise
        except Exception as error:
            # Neither a pickling error nor a full ring leaves anything in the ring: the number is free again.
            responses.not_sent(call)
            self._sequence = number - 1
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"RPC {call.method} was not sent within {call.timeout} s: the ring is full; "
                    + self.report.ranks(number - 1)
                ) from None
            raise
        except BaseException:
            responses.not_sent(call)
            self._unsure = True
            raise
        if responses.closed:
            # close() may have looked at the pending calls before this one was among them.
            responses.forget(call)
            raise responses.error()

    def _send_number(self) -> None:
        """Tell the workers where the numbers stand, since they count along."""
        self._sequence += 1
        self._broadcast_mq.enqueue((self._sequence, NO_METHOD, (), None, None, b""))
        self._unsure = False

    def _await_suspect(self, call: PendingCall) -> None:
        """Invariant 2: wait until all ranks have left a call that failed on some, or give the executor up."""
        responses = self.responses
        assert responses.suspect is not None
        failed, since = responses.suspect
        while behind := responses.behind(failed.sequence):
            now = deadline_clock()
            if now - since > self._stuck_timeout_s:
                ranks = ", ".join(str(rank) for rank in behind)
                self._fail(
                    f"rank {ranks} did not come back from {failed.method} (seq {failed.sequence}) within "
                    f"{self._stuck_timeout_s:g} s after it had failed elsewhere: {failed.error}"
                )
            if responses.closed:
                raise responses.error()
            if call.deadline is not None and now > call.deadline:
                raise TimeoutError(
                    f"RPC {call.method} was not sent within {call.timeout} s: {self.report.ranks(failed.sequence)}"
                )
            self._find_dead(0.005)
        responses.suspect = None

    def _while_sending(self) -> None:
        """Called while the broadcast ring is full."""
        responses = self.responses
        if responses.closed or self._find_dead(0):
            raise MessageQueueClosed(responses.closed)
        responses.try_drain()
        if responses.on_wait is not None:
            responses.on_wait()

    # --- results -----------------------------------------------------------------------------------------------

    def result(self, call: PendingCall) -> Any:
        """Wait for a blocking call and give its outcome. A caller that is interrupted gives the call up."""
        try:
            self.responses.wait(call)
        except BaseException:
            release_if_owned(self.responses.lock)
            self.abandon(call)
            raise
        return call.outcome()

    def abandon(self, call: PendingCall) -> None:
        """Nobody wants this call's result any more; what still comes is dropped."""
        self.responses.give_up(call, RuntimeError(f"RPC {call.method} was given up"))

    def watch(self, call: PendingCall) -> None:
        """Finish `call` in a thread of the channel, since somebody wants to be told when it is done."""
        with self._watch_lock:
            if self._watched is None:
                self._watched = SimpleQueue()
                threading.Thread(
                    target=_take_watched,
                    args=(self.responses, self._watched),
                    name="minivllm-futures",
                    daemon=True,
                ).start()
            self._watched.put(call)

    def close(self, reason: str) -> None:
        """Nothing can be called any more: end all waits and all calls with `reason`. Again does nothing.

        From any thread and at any moment, signal handlers included: it waits for no lock of the channel.
        """
        if not self.responses.closed:
            self.responses.closed = reason
            self._broadcast_mq.shutdown(reason)
            self.responses.close(reason)
            if self._watched is not None:
                self._watched.put(None)


def _take_watched(responses: Responses, watched: SimpleQueue[PendingCall | None]) -> None:
    while (call := watched.get()) is not None:
        responses.wait(call)
        if call.future is not None:
            call.future.publish()
        del call
