"""Outputs on their way to the client: those that can wait travel together.

vLLM 0.25.1: vllm/v1/engine/core.py (EngineCoreProc.process_output_sockets)
Articles: part 1 intro

Deviation from vLLM: there the outputs of each step leave at once, as a server shows them to its users. Here nobody
sees a token before its request has ended, and a message wakes three threads in two processes, on cores that the workers need.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from minivllm.engine import EngineCoreLogprobs, EngineCoreOutput

HOLD_S = 0.02


class HeldOutputs:
    """Keeps the outputs of steps until the client has a use for them.

    They leave as soon as a request has ended, when one is watched (the client looks for stop strings in its text and may
    end it), and at the latest with the first step that ends HOLD_S or more after the first of them came.
    """

    def __init__(self) -> None:
        self._held: dict[str, EngineCoreOutput] = {}
        self._watched: set[str] = set()
        self._since = 0.0

    def watch(self, request_id: str) -> None:
        """The client wants each token of this request as soon as it is there."""
        self._watched.add(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """The client has taken these requests back."""
        self._watched.difference_update(request_ids)

    def add(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Take what a step brought; returns what is to be sent now, one output per request."""
        held, watched = self._held, self._watched
        now = monotonic()
        if not held:
            self._since = now
        wanted = now - self._since >= HOLD_S
        for output in outputs:
            request_id = output.request_id
            earlier = held.get(request_id)
            if earlier is None:
                held[request_id] = output
            else:
                _append(earlier, output)
            if output.finish_reason is not None:
                watched.discard(request_id)
                wanted = True
            elif watched and request_id in watched:
                wanted = True
        return self.take() if wanted else []

    def take(self) -> list[EngineCoreOutput]:
        """All that is held, which is to be sent now."""
        outputs = list(self._held.values())
        self._held.clear()
        return outputs


def _append(earlier: EngineCoreOutput, output: EngineCoreOutput) -> None:
    earlier.new_token_ids += output.new_token_ids
    earlier.finish_reason = output.finish_reason
    earlier.stop_reason = output.stop_reason
    earlier.error = output.error
    earlier.ended_by_grammar = output.ended_by_grammar
    if output.logprobs is not None or output.prompt_logprobs is not None:
        earlier.logprobs = _joined(earlier.logprobs, output.logprobs)
        earlier.prompt_logprobs = _joined(earlier.prompt_logprobs, output.prompt_logprobs)


def _joined(
    earlier: EngineCoreLogprobs | None, later: EngineCoreLogprobs | None
) -> EngineCoreLogprobs | None:
    if earlier is None or later is None:
        return earlier or later
    earlier.token_ids += later.token_ids
    earlier.logprobs += later.logprobs
    earlier.ranks += later.ranks
    return earlier
