"""The parent's end of all RPCs: numbers them, sends them, and gives every response to the call it belongs to.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor.collective_rpc, get_response)
Articles: part 2 §2.3.7, §4.2

Invariants:
    1. A response is matched by its sequence number, never by its place in the queue: what is left of a call that
       timed out, failed or was interrupted is dropped when it arrives, and cannot answer a later call.
    2. A call has ended when every rank has finished it (status page), whoever was asked to reply. So a failure on
       any rank reaches the caller of this call.
    3. Nothing is sent while a rank may still be inside a call that failed on another rank: ranks that are not in
       step would match the wrong collectives.
    4. Every wait ends at its deadline, when the executor fails, and when it is shut down.

Deviation from vLLM: responses carry no number there, a rank that need not reply cannot report, and after an error or
a time-out the next call reads the responses of the previous one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from minivllm.distributed.shm_broadcast import MessageQueue, MessageQueueClosed
from minivllm.exceptions import ExecutorFailedError, RemoteError
from minivllm.executor.call import FAILURE, NO_RESPONSE, OUTPUT_FAILURE, SUCCESS, PendingCall
from minivllm.executor.status_page import DONE, FAILURE_MASK, SEQUENCE_BITS, SEQUENCE_MASK, StatusPage

# Method of a message that only states its number: sent after an interrupted one, which may or may not have gone out.
NO_METHOD = None

_SPIN_S = 0.0002
_FIRST_NAP_S = 0.00005
_LONGEST_NAP_S = 0.001
_SETTLE_S = 0.1
_LOST_S = 5.0
_REMEMBERED_CALLS = 256
_monotonic = time.monotonic


class _CallFailed(Exception):
    """Leaves a wait for a response: the call that is waited for has failed on another rank."""


class RpcChannel:
    """All calls of one executor.

    It knows nothing of the executor object, so that futures and threads which hold the channel do not keep a
    forgotten executor alive.

    Two locks: `_send_lock` is held while a call gets its number and is written, `_receive_lock` by the one thread
    that reads responses. Whoever holds the second never asks for the first.
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
        self._response_mqs = tuple(response_mqs)
        self._words = page.words
        self._page = page
        self._done_index = tuple(page.index(rank, DONE) for rank in range(page.world_size))
        self._ranks = tuple(range(page.world_size))
        self._find_dead = find_dead
        self._fail = fail
        self._stuck_timeout_s = stuck_timeout_s
        self.on_wait: Callable[[], None] | None = None

        self._send_lock = threading.Lock()
        self._sequence = 0
        self._unsure = False  # whether the last number has reached the workers
        self._suspect: tuple[PendingCall, float] | None = None  # a failed call, and when it failed

        self._receive_lock = threading.Lock()
        self._pending: deque[PendingCall] = deque()  # oldest first
        self._in_flight: dict[int, PendingCall] = {}
        self._asked: tuple[deque[int], ...] = tuple(
            deque() for _ in self._ranks
        )  # numbers each rank is to answer
        self._failures = [0] * page.world_size  # failures of each rank that have been read
        self._waiting: tuple[int, PendingCall] | None = None
        self._methods: dict[int, str] = {}  # of calls that were given up, for messages

        self._watch_lock = threading.Lock()
        self._watched: SimpleQueue[PendingCall | None] | None = None
        self._closed = ""

        broadcast_mq.on_wait = self._while_sending
        for queue in response_mqs:
            queue.on_wait = self._while_receiving

    # --- sending -----------------------------------------------------------------------------------------------

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
        ranks = self._ranks if reply_rank is None else (reply_rank,)
        call = PendingCall(label, ranks, reply_rank is not None, timeout, len(self._ranks), aggregate)
        deadline = call.deadline
        if deadline is not None and timeout is not None and timeout <= 0:
            raise TimeoutError(f"RPC {label} was not sent: its time limit of {timeout} s has passed already")
        if not self._send_lock.acquire(timeout=_remaining(deadline)):
            raise TimeoutError(f"RPC {label} was not sent within {timeout} s: other calls are being sent")
        try:
            if self._closed:
                raise self.error()
            if self._suspect is not None:
                self._await_suspect(call)
            if self._unsure:
                self._send_number()
            # Unread responses fill the response rings, and a worker at a full ring takes no further request.
            if len(self._pending) > 4:
                self._try_drain()
            self._send(call, (method, args, kwargs, reply_rank, context))
            if self._closed:
                # close() may have looked at the pending calls before this one was among them.
                self._forget(call)
                raise self.error()
        finally:
            self._send_lock.release()
        return call

    def _send(self, call: PendingCall, request: tuple[Any, ...]) -> None:
        self._sequence = number = self._sequence + 1
        call.sequence = number
        # Entered before it is sent: the response may be there before enqueue returns.
        self._in_flight[number] = call
        self._pending.append(call)
        for rank in call.ranks:
            self._asked[rank].append(number)
        try:
            deadline = call.deadline
            self._broadcast_mq.enqueue(
                (number, *request), None if deadline is None else max(0.0, deadline - _monotonic())
            )
        except BaseException as error:
            self._forget(call)
            for rank in call.ranks:
                _remove(self._asked[rank], number)
            if isinstance(error, MessageQueueClosed):
                raise self.error() from None
            if not isinstance(error, Exception):
                self._unsure = True
                raise
            # Neither a pickling error nor a full ring leaves anything in the ring: the number is free again.
            self._sequence = number - 1
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"RPC {call.method} was not sent within {call.timeout} s: the ring is full; "
                    + self._describe_ranks(number - 1)
                ) from None
            raise

    def _send_number(self) -> None:
        """Tell the workers where the numbers stand, since they count along."""
        self._sequence += 1
        self._broadcast_mq.enqueue((self._sequence, NO_METHOD, (), None, None, b""))
        self._unsure = False

    def _await_suspect(self, call: PendingCall) -> None:
        """Invariant 3: wait until all ranks have left a call that failed on some, or give the executor up."""
        assert self._suspect is not None
        failed, since = self._suspect
        while behind := self._behind(failed.sequence):
            now = _monotonic()
            if now - since > self._stuck_timeout_s:
                ranks = ", ".join(str(rank) for rank in behind)
                self._fail(
                    f"rank {ranks} did not come back from {failed.method} (seq {failed.sequence}) within "
                    f"{self._stuck_timeout_s:g} s after it had failed elsewhere: {failed.error}"
                )
            if self._closed:
                raise self.error()
            if call.deadline is not None and now > call.deadline:
                raise TimeoutError(
                    f"RPC {call.method} was not sent within {call.timeout} s: {self._describe_ranks(failed.sequence)}"
                )
            self._find_dead(0.005)
        self._suspect = None

    def _while_sending(self) -> None:
        """Called while the broadcast ring is full."""
        if self._closed or self._find_dead(0):
            raise MessageQueueClosed(self._closed)
        self._try_drain()
        if self.on_wait is not None:
            self.on_wait()

    def result(self, call: PendingCall) -> Any:
        """Wait for a blocking call and give its outcome. A caller that is interrupted gives the call up."""
        try:
            self.wait(call)
        except BaseException:
            self.abandon(call)
            raise
        return call.outcome()

    # --- receiving ---------------------------------------------------------------------------------------------

    def wait(self, call: PendingCall, limit: float | None = None) -> int:
        """Return when `call` is done, having finished older calls first.

        Args:
            limit: time.monotonic() after which not to wait any longer, besides the call's own deadline.

        Returns:
            how many older calls were finished on the way.

        Raises:
            TimeoutError: `limit` has passed. (A call whose own deadline passes is done, and its outcome an error.)
        """
        drained = 0
        while not call.done:
            stop = call.deadline if limit is None else _earlier(call.deadline, limit)
            if not self._receive_lock.acquire(timeout=_remaining(stop)):
                self._expire(call, limit)
                continue
            oldest = None
            try:
                if call.done:
                    break
                oldest = self._oldest()
                if oldest is None:
                    call.fail(self.error())
                    break
                if not self._complete(oldest, _earlier(oldest.deadline, stop)):
                    self._expire(oldest, None)
                    self._expire(call, limit)
            finally:
                self._receive_lock.release()
            # Outside the lock: the future's callbacks may make calls of their own.
            if oldest.done and oldest is not call:
                drained += 1
                if oldest.future is not None:
                    oldest.future.publish()
        return drained

    def _oldest(self) -> PendingCall | None:
        while True:
            try:
                oldest = self._pending[0]
            except IndexError:
                return None
            if not oldest.done:
                return oldest
            _remove(self._pending, oldest)

    def _expire(self, call: PendingCall, limit: float | None) -> None:
        """End a call whose deadline has passed; raise when it was only `limit`."""
        now = _monotonic()
        if call.done:
            return
        if call.deadline is not None and now >= call.deadline:
            self._give_up(call, TimeoutError(self._describe_timeout(call)))
        elif limit is not None and now >= limit:
            raise TimeoutError(f"RPC {call.method} (seq {call.sequence}) has not ended yet")

    def _complete(self, call: PendingCall, stop: float | None) -> bool:
        """Collect what is missing of one call and finish it; False when `stop` came first."""
        results, number = call.results, call.sequence
        try:
            if call.error is not None:
                raise _CallFailed
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
        self._forget(call)
        call.finish()
        return True

    def _receive(self, rank: int, call: PendingCall, stop: float | None) -> bool:
        """Take responses of one rank until its response to `call` is there; False when `stop` came first.

        Raises:
            _CallFailed: the call has failed, here or on another rank.
        """
        queue = self._response_mqs[rank]
        while True:
            self._waiting = rank, call
            try:
                response = queue.dequeue(None if stop is None else max(0.0, stop - _monotonic()))
            except TimeoutError:
                return False
            except (_CallFailed, MessageQueueClosed):
                raise
            except Exception as error:
                self._take_undecodable(rank, error)
            else:
                self._take(rank, response)
            finally:
                self._waiting = None
            if call.error is not None:
                raise _CallFailed
            if call.done or call.results[rank] is not NO_RESPONSE:
                return True

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
        else:
            assert status in (FAILURE, OUTPUT_FAILURE)
            call.fail(RemoteError(rank, call.method, *result))

    def _take_undecodable(self, rank: int, error: Exception) -> None:
        """A response that cannot be unpickled here: the queue has released it, and it was the oldest one asked for."""
        if not self._asked[rank]:
            raise error
        call = self._in_flight.get(self._asked[rank].popleft())
        if call is not None:
            failure = RuntimeError(
                f"the result of {call.method} on rank {rank} cannot be unpickled here: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            call.fail(failure)

    def _await_finished(self, rank: int, call: PendingCall, stop: float | None) -> bool:
        """Invariant 2: wait until a rank has finished `call`, and take its failures; False when `stop` came first."""
        index, words = self._done_index[rank], self._words
        started = now = _monotonic()
        spin_until, nap_s, look_at = started + _SPIN_S, _FIRST_NAP_S, 0.0
        while True:
            word = words[index]
            if word >> SEQUENCE_BITS != self._failures[rank]:
                # Announced: the message is there or will be in a moment (with async scheduling a thread sends it).
                self._drain(rank)
                if now - started > _LOST_S:
                    # Only an exception raised into the middle of a dequeue, such as KeyboardInterrupt, can lose it.
                    self._failures[rank] = word >> SEQUENCE_BITS
            elif word & SEQUENCE_MASK >= call.sequence:
                return True
            if call.error is not None:
                raise _CallFailed
            if self._closed:
                raise MessageQueueClosed(self._closed)
            now = _monotonic()
            if stop is not None and now >= stop:
                return False
            if now < spin_until:
                os.sched_yield()
                continue
            if now >= look_at:
                look_at = now + 0.05
                self._look_around(call)
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _while_receiving(self) -> None:
        """Called by a response queue about every 50 ms while it waits."""
        if self._waiting is not None:
            rank, call = self._waiting
            self._look_around(call, besides=rank)

    def _look_around(self, call: PendingCall, besides: int = -1) -> None:
        """While one rank is waited for: read what the others have sent, and leave the wait if the call has failed."""
        for rank in self._ranks:
            if rank != besides:
                self._drain(rank)
        if self.on_wait is not None:
            self.on_wait()
        if call.error is not None:
            raise _CallFailed
        # The monitor is quicker, where there is one.
        if self._find_dead(0):
            raise MessageQueueClosed(self._closed)

    def _drain(self, rank: int) -> None:
        """Take what a rank has sent so far, without waiting."""
        waiting, self._waiting = self._waiting, None
        queue = self._response_mqs[rank]
        try:
            while (
                self._asked[rank]
                or self._words[self._done_index[rank]] >> SEQUENCE_BITS != self._failures[rank]
            ):
                try:
                    response = queue.dequeue(0)
                except TimeoutError:
                    return
                except MessageQueueClosed:
                    raise
                except Exception as error:
                    self._take_undecodable(rank, error)
                else:
                    self._take(rank, response)
        finally:
            self._waiting = waiting

    def _try_drain(self) -> None:
        """Read whatever is there, unless another thread is reading anyway."""
        if self._receive_lock.acquire(blocking=False):
            try:
                for rank in self._ranks:
                    self._drain(rank)
            finally:
                self._receive_lock.release()

    def _settle(self, call: PendingCall) -> bool:
        """After a failure: give the other ranks a moment, so that the error which is raised is the one that matters.

        A rank that fails because another one has died is an effect; the death is the cause. And of several ranks
        that fail, the lowest is reported, with the others named. False: a worker has died.
        """
        until = _monotonic() + _SETTLE_S
        try:
            while True:
                for rank in self._ranks:
                    self._drain(rank)
                if not self._behind(call.sequence):
                    return True
                if self._find_dead(0.001):
                    return False
                if _monotonic() > until:
                    self._remember(call)
                    self._suspect = call, _monotonic()
                    return True
        except MessageQueueClosed:
            return False

    def _behind(self, number: int) -> list[int]:
        """Ranks that have not finished the call of that number."""
        return [
            rank for rank, index in enumerate(self._done_index) if self._words[index] & SEQUENCE_MASK < number
        ]

    # --- giving up ---------------------------------------------------------------------------------------------

    def poll(self, call: PendingCall) -> None:
        """Finish calls up to `call` as far as this is possible without waiting."""
        if self._closed or not self._receive_lock.acquire(blocking=False):
            return
        finished = []
        try:
            while not call.done and (oldest := self._oldest()) is not None:
                for rank in self._ranks:
                    self._drain(rank)
                if oldest.error is None and (oldest.incomplete() or self._behind(oldest.sequence)):
                    break
                self._complete(oldest, _monotonic())
                finished.append(oldest)
        except MessageQueueClosed:
            pass
        finally:
            self._receive_lock.release()
        for done in finished:
            if done.future is not None:
                done.future.publish()

    def abandon(self, call: PendingCall) -> None:
        """Nobody wants this call's result any more; what still comes is dropped."""
        self._give_up(call, RuntimeError(f"RPC {call.method} was given up"))

    def _remember(self, call: PendingCall) -> None:
        """A rank may still be at this call when nobody waits for it any more."""
        if len(self._methods) >= _REMEMBERED_CALLS:
            self._methods.pop(next(iter(self._methods)))
        self._methods[call.sequence] = call.method

    def _give_up(self, call: PendingCall, error: BaseException) -> None:
        self._remember(call)
        self._forget(call)
        call.fail(error)
        call.finish()

    def _forget(self, call: PendingCall) -> None:
        self._in_flight.pop(call.sequence, None)
        _remove(self._pending, call)

    def close(self, reason: str) -> bool:
        """Nothing can be called any more: end all waits and all calls with `reason`. False when closed already.

        From any thread and at any moment, signal handlers included: it waits for no lock of the channel.
        """
        if self._closed:
            return False
        self._closed = reason
        self._broadcast_mq.shutdown()
        for queue in self._response_mqs:
            queue.shutdown()
        while self._pending:
            try:
                call = self._pending.popleft()
            except IndexError:
                break
            call.fail(self.error())
            call.finish()
            if call.future is not None:
                call.future.publish()
        if self._watched is not None:
            self._watched.put(None)
        return True

    def error(self) -> ExecutorFailedError:
        """What a call gets after close(); a new object each time, since each is raised with its own traceback."""
        return ExecutorFailedError(self._closed)

    # --- futures that nobody waits for -------------------------------------------------------------------------

    def watch(self, call: PendingCall) -> None:
        """Finish `call` in a thread of the channel, since somebody wants to be told when it is done."""
        with self._watch_lock:
            if self._watched is None:
                self._watched = SimpleQueue()
                threading.Thread(
                    target=self._take_watched, args=(self._watched,), name="minivllm-futures", daemon=True
                ).start()
            self._watched.put(call)

    def _take_watched(self, watched: SimpleQueue[PendingCall | None]) -> None:
        while (call := watched.get()) is not None:
            self.wait(call)
            if call.future is not None:
                call.future.publish()
            del call

    # --- words -------------------------------------------------------------------------------------------------

    def method_of(self, number: int) -> str:
        """Name of the method that a sequence number stands for, as far as it is still known."""
        call = self._in_flight.get(number)
        return call.method if call is not None else self._methods.get(number, "an earlier call")

    def _describe_timeout(self, call: PendingCall) -> str:
        return (
            f"RPC {call.method} (seq {call.sequence}) timed out after {call.timeout:g} s: "
            + self._describe_ranks(call.sequence, call)
        )

    def _describe_ranks(self, number: int, call: PendingCall | None = None) -> str:
        """Which ranks have answered or finished call `number`, and what the others are doing."""
        done, missing = [], []
        for rank in self._ranks:
            status = self._page.status(rank)
            unanswered = call is not None and rank in call.ranks and call.results[rank] is NO_RESPONSE
            if status.finished >= number and not unanswered:
                done.append(str(rank))
                continue
            if status.executing:
                doing = f"executing {self.method_of(status.executing)} (seq {status.executing})"
            else:
                doing = "executing nothing"
            missing.append(f"rank {rank} (pid {status.pid}, in {status.step}, {doing})")
        return f"missing: {', '.join(missing) or 'none'}; finished: rank {', '.join(done) or 'none'}"


def _remaining(deadline: float | None) -> float:
    """For Lock.acquire: seconds left, -1 for no limit."""
    return -1 if deadline is None else max(0.0, deadline - _monotonic())


def _earlier(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _remove(queue: deque[Any], item: Any) -> None:
    try:
        queue.remove(item)
    except ValueError:
        pass
