"""The receiving half of all RPCs: takes responses off the queues and gives each to the call it belongs to.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (get_response in MultiprocExecutor.collective_rpc)
Articles: part 2 §2.3.7, §4.2

Deviation from vLLM: responses carry no number there, a rank that need not reply cannot report, and after an error or
a time-out the next call reads the responses of the previous one.
"""

from __future__ import annotations

import pickle
import threading
import time
from _thread import RLock
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from minivllm.distributed.shm_broadcast import MessageDecodeError, MessageQueue, MessageQueueClosed
from minivllm.distributed.wakeup import CROWDED_S, MOST_YIELDS
from minivllm.exceptions import ExecutorFailedError, RemoteError
from minivllm.executor.call import FAILURE, NO_RESPONSE, SUCCESS, SUCCESS_BY_VALUE, PendingCall
from minivllm.executor.rank_report import RankReport
from minivllm.executor.status_page import (
    DONE,
    FAILURE_MASK,
    LEAVE_S,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    StatusPage,
)
from minivllm.tracing.deadlines import Patience, deadline_clock
from minivllm.tracing.ended import write_ended
from minivllm.utils import ownership
from minivllm.utils.system_utils import yield_core

_SPIN_S = 0.0002
_FIRST_NAP_S = 0.00005
_LONGEST_NAP_S = 0.001
_LOOK_EVERY_S = 0.05
_SETTLE_S = 0.1
_LOST_S = 5.0
_monotonic = time.monotonic


class _CallFailed(Exception):
    """Leaves a wait for a response: the call that is waited for has failed on some rank."""


class Responses:
    """Responses of all ranks to all calls of one executor.

    One thread at a time reads (`lock`), whichever wants a result. Calls are finished in their order.

    Invariants:
        1. A response is matched by its number, never by its place in the queue: what is left of a call that timed
           out, failed or was interrupted is dropped when it arrives, and cannot answer a later call.
        2. A call has ended when every rank has finished it (status page), whoever was asked to reply. So a failure on
           any rank reaches the caller of this call.
        3. Every wait ends at its deadline, when a worker dies, and when the executor is shut down.

    Attributes:
        closed: why nothing can be called any more; "" while it can.
        suspect: a call that failed while other ranks stayed inside it, and when that was.
        on_wait: called about every 50 ms while a wait lasts.
    """

    def __init__(
        self,
        queues: Sequence[MessageQueue],
        page: StatusPage,
        find_dead: Callable[[float], bool],
        report: RankReport,
    ) -> None:
        """
        Args:
            find_dead: waits at most so many seconds for a worker to die; True when one has, and `close` was called.
        """
        self._queues = tuple(queues)
        self._words = page.words
        self._done_index = tuple(page.index(rank, DONE) for rank in range(page.world_size))
        self._is_ending = page.is_ending
        self._find_dead = find_dead
        self._report = report
        self._owner = ownership.Owner()
        self.lock = threading.RLock()
        self.ranks = tuple(range(page.world_size))
        self.pending: deque[PendingCall] = deque()  # oldest first
        self._in_flight: dict[int, PendingCall] = {}
        report.in_flight = self._in_flight
        # Numbers that each rank is to answer, for a response whose own number cannot be read.
        self._asked: tuple[deque[int], ...] = tuple(deque() for _ in self.ranks)
        self._failures = [0] * page.world_size  # failures of each rank that have been read
        self._waiting: tuple[int, PendingCall] | None = None
        self.closed = ""
        self.suspect: tuple[PendingCall, float] | None = None
        self.on_wait: Callable[[], None] | None = None
        for queue in queues:
            queue.on_wait = self._while_receiving

    def error(self) -> ExecutorFailedError:
        """What a call gets after `close`; a new object each time, since each is raised with its own traceback."""
        return ExecutorFailedError(self.closed or "the executor is being shut down")

    def check_owner(self) -> None:
        """Raises ExecutorFailedError in a forked child, which would take the responses away from its parent."""
        if self._owner.generation != ownership.generation:
            raise ExecutorFailedError(self._owner.refusal("executor"))

    def expect(self, call: PendingCall) -> None:
        """Enter a call before it is sent: its response may be there before the sending has returned."""
        number = call.sequence
        self._in_flight[number] = call
        self.pending.append(call)
        for rank in call.ranks:
            self._asked[rank].append(number)

    def not_sent(self, call: PendingCall) -> None:
        """Undo `expect`."""
        self.forget(call)
        for rank in call.ranks:
            _remove(self._asked[rank], call.sequence)

    def forget(self, call: PendingCall) -> None:
        """Whatever still comes for this call is dropped."""
        self._in_flight.pop(call.sequence, None)
        _remove(self.pending, call)

    # --- waiting -----------------------------------------------------------------------------------------------

    def wait(self, call: PendingCall, limit: float | None = None) -> int:
        """Return when `call` is done, having finished older calls first.

        Args:
            limit: deadline_clock() after which not to wait any longer, besides the call's own deadline.

        Returns:
            how many older calls were finished on the way.

        Raises:
            TimeoutError: `limit` has passed. (A call whose own deadline passes is done, and its outcome an error.)
        """
        drained = 0
        if self._owner.generation != ownership.generation:
            self.check_owner()
        while not call.done:
            stop = call.deadline if limit is None else _earlier(call.deadline, limit)
            if not self.lock.acquire(timeout=-1 if stop is None else max(0.0, stop - deadline_clock())):
                self._expire(call, limit)
                continue
            try:
                oldest = self._oldest()
                if call.done:
                    break
                if oldest is None:
                    call.fail(self.error())
                    call.finish()
                    break
                if not self._complete(oldest, _earlier(oldest.deadline, stop)):
                    self._expire(oldest, None)
                    self._expire(call, limit)
            finally:
                self.lock.release()
            # Outside the lock: the future's callbacks may make calls of their own.
            if oldest is not call and oldest.done:
                drained += 1
                if oldest.future is not None:
                    oldest.future.publish()
        return drained

    def _oldest(self) -> PendingCall | None:
        while True:
            try:
                oldest = self.pending[0]
            except IndexError:
                return None
            if not oldest.done:
                return oldest
            _remove(self.pending, oldest)

    def _expire(self, call: PendingCall, limit: float | None) -> None:
        """End a call whose deadline has passed; raise when it was only `limit`."""
        now = deadline_clock()
        if call.done:
            return
        if call.deadline is not None and now >= call.deadline:
            self.give_up(call, TimeoutError(self._report.timeout(call)))
        elif limit is not None and now >= limit:
            raise TimeoutError(f"RPC {call.method} (seq {call.sequence}) has not ended yet")

    def _complete(self, call: PendingCall, stop: float | None) -> bool:
        """Collect what is missing of one call and finish it; False when `stop` came first."""
        results, number = call.results, call.sequence
        try:
            if call.error is not None:
                raise _CallFailed
            # The workers need the core more than this thread, which can only poll.
            yield_core()
            for rank in call.ranks:
                if results[rank] is NO_RESPONSE and not self._receive(rank, call, stop):
                    return False
            words, failures = self._words, self._failures
            for rank, index in enumerate(self._done_index):
                word = words[index]
                if (word & SEQUENCE_MASK < number or word >> SEQUENCE_BITS != failures[rank]) and not (
                    self._await_finished(rank, call, stop)
                ):
                    return False
            if call.error is not None:
                raise _CallFailed
        except _CallFailed:
            # A call that another thread has given up is done, and says nothing about the ranks.
            if not call.done and not self._settle(call):
                call.fail(self.error())
        except MessageQueueClosed:
            call.fail(self.error())
        self.forget(call)
        call.finish()
        return True

    def _receive(self, rank: int, call: PendingCall, stop: float | None) -> bool:
        """Take responses of one rank until its response to `call` is there; False when `stop` came first.

        Raises:
            _CallFailed: the call has failed, here or on another rank.
        """
        queue, results = self._queues[rank], call.results
        self._waiting = rank, call
        try:
            while True:
                try:
                    response = queue.dequeue(None if stop is None else max(0.0, stop - deadline_clock()))
                except TimeoutError:
                    return False
                except MessageDecodeError as error:
                    self._take_undecodable(rank, error)
                else:
                    self._take(rank, response)
                if call.error is not None:
                    raise _CallFailed
                if results[rank] is not NO_RESPONSE or call.done:
                    return True
        finally:
            self._waiting = None

    def _await_finished(self, rank: int, call: PendingCall, stop: float | None) -> bool:
        """Invariant 2: wait until a rank has finished `call`, and take its failures; False when `stop` came first."""
        index, words = self._done_index[rank], self._words
        started = now = _monotonic()
        patience = Patience(_LOST_S)
        nap_s, look_at, yields = _FIRST_NAP_S, 0.0, MOST_YIELDS
        while True:
            word = words[index]
            if word >> SEQUENCE_BITS != self._failures[rank]:
                # Announced: the message is there or will be in a moment (with async scheduling a thread sends it).
                self._drain(rank)
                if patience.left() < 0:
                    # Only an exception raised into the middle of a dequeue, such as KeyboardInterrupt, can lose it.
                    self._failures[rank] = word >> SEQUENCE_BITS
            elif word & SEQUENCE_MASK >= call.sequence:
                return True
            if call.error is not None:
                raise _CallFailed
            if self.closed:
                raise MessageQueueClosed(self.closed)
            now = _monotonic()
            if stop is not None and deadline_clock() >= stop:
                return False
            if yields and now - started < _SPIN_S:
                yield_core()
                if _monotonic() - now > CROWDED_S:
                    yields -= 1
                continue
            if now >= look_at:
                look_at = now + _LOOK_EVERY_S
                self._look_around(call)
            write_ended()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _while_receiving(self) -> None:
        """Called by a response queue about every 50 ms while it waits."""
        if self._waiting is not None:
            rank, call = self._waiting
            self._look_around(call, besides=rank)

    def _look_around(self, call: PendingCall, besides: int = -1) -> None:
        """While one rank is waited for: read what the others have sent, and leave the wait if the call has failed."""
        for rank in self.ranks:
            if rank != besides:
                self._drain(rank)
        if self.on_wait is not None:
            self.on_wait()
        if call.error is not None:
            raise _CallFailed
        # The monitor is quicker, where there is one.
        if self._find_dead(0):
            raise MessageQueueClosed(self.closed)

    # --- taking responses --------------------------------------------------------------------------------------

    def _take(self, rank: int, response: tuple[int, int, Any]) -> None:
        """Invariant 1: give a response to its call, or drop it."""
        number, status, result = response
        asked = self._asked[rank]
        while asked and asked[0] <= number:
            earlier = asked.popleft()
            if earlier != number and (lost := self._in_flight.get(earlier)) is not None:
                # Only an exception raised into the middle of a dequeue, such as KeyboardInterrupt, can lose one.
                lost.fail(
                    RuntimeError(f"the response of rank {rank} to {lost.method} was lost in an interrupt")
                )
        if status == FAILURE:
            self._failures[rank] = (self._failures[rank] + 1) & FAILURE_MASK
        call = self._in_flight.get(number)
        if call is None:
            return
        if status == SUCCESS:
            call.results[rank] = result
        elif status == SUCCESS_BY_VALUE:
            try:
                call.results[rank] = pickle.loads(result)
            except Exception as error:
                _fail_undecodable(call, rank, error)
        else:
            call.fail(RemoteError(rank, call.method, *result))

    def _take_undecodable(self, rank: int, error: MessageDecodeError) -> None:
        """A response that cannot be unpickled here is consumed, and was the oldest that this rank was asked for."""
        if not self._asked[rank]:
            raise error
        call = self._in_flight.get(self._asked[rank].popleft())
        if call is not None:
            _fail_undecodable(call, rank, error)

    def _drain(self, rank: int) -> None:
        """Take what a rank has sent so far, without waiting."""
        queue, index = self._queues[rank], self._done_index[rank]
        try:
            while self._asked[rank] or self._words[index] >> SEQUENCE_BITS != self._failures[rank]:
                # A KeyboardInterrupt that comes now must not come with "during handling of" a time-out of ours.
                if not queue.has_message():
                    return
                try:
                    response = queue.dequeue(0)
                except MessageDecodeError as error:
                    self._take_undecodable(rank, error)
                else:
                    self._take(rank, response)
        except TimeoutError:
            pass  # a large one that is still being written

    def try_drain(self) -> None:
        """Read whatever is there, unless another thread is reading anyway."""
        if self.lock.acquire(blocking=False):
            try:
                for rank in self.ranks:
                    self._drain(rank)
            except MessageQueueClosed:
                pass  # whoever waits or sends next finds out
            finally:
                self.lock.release()

    def _settle(self, call: PendingCall) -> bool:
        """After a failure: give the other ranks a moment, so that the error which is raised is the one that matters.

        A rank that fails because another one has died, or is about to (SIGTERM, sys.exit() in a method: its clean-up
        takes a while), is an effect; the death is the cause. And of several ranks that fail, the lowest is reported,
        with the others named. False: a worker has died.
        """
        until = _monotonic() + _SETTLE_S
        try:
            while True:
                for rank in self.ranks:
                    self._drain(rank)
                behind = self.behind(call.sequence)
                # In this order: a failure that comes between the two looks has been announced by now.
                settled = not behind and self._has_all_failures()
                if self._find_dead(0 if settled else 0.001):
                    return False
                if settled:
                    return True
                leaving = any(map(self._is_ending, behind))
                if _monotonic() > until + (LEAVE_S if leaving else 0):
                    # Once more: this thread may have been kept from looking for as long as it wanted to wait.
                    for rank in self.ranks:
                        self._drain(rank)
                    if behind:
                        self._report.remember(call)
                        self.suspect = call, deadline_clock()
                    return True
        except MessageQueueClosed:
            return False

    def _has_all_failures(self) -> bool:
        """Whether every failure that a rank has announced has been taken from its ring."""
        words, failures = self._words, self._failures
        return all(
            words[index] >> SEQUENCE_BITS == failures[rank] for rank, index in enumerate(self._done_index)
        )

    def behind(self, number: int) -> list[int]:
        """Ranks that have not finished the call of that number."""
        return [
            rank for rank, index in enumerate(self._done_index) if self._words[index] & SEQUENCE_MASK < number
        ]

    # --- without waiting ---------------------------------------------------------------------------------------

    def poll(self, call: PendingCall) -> None:
        """Finish calls up to `call` as far as this is possible without waiting."""
        if self.closed or self._owner.generation != ownership.generation:
            return
        if not self.lock.acquire(blocking=False):
            return
        finished = []
        try:
            while not call.done and (oldest := self._oldest()) is not None:
                for rank in self.ranks:
                    self._drain(rank)
                if oldest.error is not None or not (oldest.incomplete() or self.behind(oldest.sequence)):
                    self._complete(oldest, deadline_clock())
                self._expire(oldest, None)
                if not oldest.done:
                    break
                finished.append(oldest)
        except MessageQueueClosed:
            pass
        finally:
            self.lock.release()
        for done in finished:
            if done.future is not None:
                done.future.publish()

    def give_up(self, call: PendingCall, error: BaseException) -> None:
        """End a call with an error whatever the ranks still do about it."""
        self._report.remember(call)
        self.forget(call)
        call.fail(error)
        call.finish()

    def close(self, reason: str) -> None:
        """End all waits and all calls with `reason`, from any thread or signal handler: waits for no lock."""
        self.closed = reason
        for queue in self._queues:
            queue.shutdown(reason)
        ended = []
        while self.pending:
            try:
                ended.append(self.pending.popleft())
            except IndexError:
                break
            ended[-1].fail(self.error())
            ended[-1].finish()
        # After all are done: a callback of one may ask for the result of another.
        for call in ended:
            if call.future is not None:
                call.future.publish()


def release_if_owned(lock: RLock) -> None:
    """Give a lock back that this thread may hold.

    An exception from a signal handler can come after a lock was taken and before the block that would release it.
    """
    while lock._is_owned():  # type: ignore[attr-defined]
        lock.release()


def _earlier(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _fail_undecodable(call: PendingCall, rank: int, error: Exception) -> None:
    failure = RuntimeError(f"the result of {call.method} on rank {rank} cannot be unpickled here: {error}")
    failure.__cause__ = error
    call.fail(failure)


def _remove(queue: deque[Any], item: Any) -> None:
    try:
        queue.remove(item)
    except ValueError:
        pass
