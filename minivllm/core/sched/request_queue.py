"""Requests that wait for their first, or after a preemption for their next, step.

vLLM 0.25.1: vllm/v1/core/sched/request_queue.py (FCFSRequestQueue)
Articles: part 1 §2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from minivllm.core.request import Request


class FCFSRequestQueue(deque[Request]):
    """First come, first served; a preempted request goes to the front, as it came before all that wait."""

    def add_request(self, request: Request) -> None:
        self.append(request)

    def peek_request(self) -> Request:
        return self[0]

    def pop_request(self) -> Request:
        return self.popleft()

    def prepend_request(self, request: Request) -> None:
        self.appendleft(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(map(id, requests))
        kept = [request for request in self if id(request) not in gone]
        self.clear()
        self.extend(kept)
