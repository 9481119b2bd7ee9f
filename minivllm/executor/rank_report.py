"""Saying what the ranks are doing about a call: which have finished it, and where the others are.

vLLM 0.25.1: none ("RPC call to execute_model timed out." is all that is said)
Articles: part 2 §2.3.7
"""

from __future__ import annotations

from collections.abc import Mapping

from minivllm.executor.call import NO_RESPONSE, PendingCall
from minivllm.executor.status_page import StatusPage

_REMEMBERED_CALLS = 256


class RankReport:
    """Puts the status page into words, with the names of the methods that the numbers stand for."""

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._given_up: dict[int, str] = {}
        self.in_flight: Mapping[int, PendingCall] = {}

    def remember(self, call: PendingCall) -> None:
        """A rank may still be at this call when nobody waits for it any more."""
        if len(self._given_up) >= _REMEMBERED_CALLS:
            self._given_up.pop(next(iter(self._given_up)))
        self._given_up[call.sequence] = call.method

    def method_of(self, number: int) -> str:
        """Name of the method that a sequence number stands for, as far as it is still known."""
        call = self.in_flight.get(number)
        return call.method if call is not None else self._given_up.get(number, "an earlier call")

    def timeout(self, call: PendingCall) -> str:
        """Text of the error for a call whose limit has passed."""
        return f"RPC {call.method} (seq {call.sequence}) timed out after {call.timeout:g} s: " + self.ranks(
            call.sequence, call
        )

    def ranks(self, number: int, call: PendingCall | None = None) -> str:
        """Which ranks have finished call `number` (and answered `call`), and what the others are doing."""
        finished, missing = [], []
        for rank in range(self._page.world_size):
            status = self._page.status(rank)
            unanswered = call is not None and rank in call.ranks and call.results[rank] is NO_RESPONSE
            if status.finished >= number and not unanswered:
                finished.append(str(rank))
                continue
            doing = "executing nothing"
            if status.executing:
                doing = f"executing {self.method_of(status.executing)} (seq {status.executing})"
            missing.append(f"rank {rank} (pid {status.pid}, in {status.step}, {doing})")
        return f"missing: {', '.join(missing) or 'none'}; finished: rank {', '.join(finished) or 'none'}"
