"""Outputs of several steps travel together, and nothing of them is lost, doubled or late."""

from __future__ import annotations

import pytest

from minivllm.engine import EngineCoreLogprobs, EngineCoreOutput, FinishReason, held_outputs
from minivllm.engine.held_outputs import HeldOutputs


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldOutputs:
    """Time is no reason to send anything."""
    monkeypatch.setattr(held_outputs, "HOLD_S", 3600.0)
    return HeldOutputs()


def test_they_wait_until_a_request_has_ended(held: HeldOutputs) -> None:
    assert held.add([EngineCoreOutput("a", [1]), EngineCoreOutput("b", [5])]) == []
    assert held.add([EngineCoreOutput("b", [6, 7])]) == []
    end = EngineCoreOutput("a", [2], FinishReason.STOP, stop_reason=2, ended_by_grammar=True)
    a, b = held.add([end, EngineCoreOutput("b", [8])])
    assert a == EngineCoreOutput("a", [1, 2], FinishReason.STOP, stop_reason=2, ended_by_grammar=True)
    assert b == EngineCoreOutput("b", [5, 6, 7, 8])
    assert held.take() == []


def test_they_do_not_wait_for_long(held: HeldOutputs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held.add([EngineCoreOutput("a", [1])]) == []
    monkeypatch.setattr(held_outputs, "HOLD_S", 0.0)
    assert held.add([EngineCoreOutput("a", [2])]) == [EngineCoreOutput("a", [1, 2])]
    # The first of a lot has waited for no time at all, which is as long as they may.
    assert held.add([EngineCoreOutput("a", [3])]) == [EngineCoreOutput("a", [3])]
    assert held.add([]) == []


def test_a_watched_request_lets_nobody_wait(held: HeldOutputs) -> None:
    held.add([EngineCoreOutput("a", [1])])
    held.watch("b")
    assert held.add([EngineCoreOutput("a", [2])]) == []
    assert [o.request_id for o in held.add([EngineCoreOutput("b", [9])])] == ["a", "b"]
    held.forget(["b", "unknown"])
    assert held.add([EngineCoreOutput("b", [9])]) == []
    held.watch("b")
    assert len(held.add([EngineCoreOutput("b", [9], FinishReason.LENGTH)])) == 1
    assert held.add([EngineCoreOutput("b", [9])]) == [], (
        "an id may come again, for a request without stop strings"
    )


def test_log_probabilities_are_joined(held: HeldOutputs) -> None:
    def rows(first: int, last: int) -> EngineCoreLogprobs:
        return EngineCoreLogprobs(
            [[i, i + 1] for i in range(first, last)],
            [[-float(i), -9.0] for i in range(first, last)],
            list(range(first, last)),
        )

    for first, last in ((0, 2), (2, 3)):
        assert held.add([EngineCoreOutput("a", [], prompt_logprobs=rows(first, last))]) == []
    assert held.add([EngineCoreOutput("a", [3], logprobs=rows(3, 4), prompt_logprobs=rows(3, 5))]) == []
    assert held.add([EngineCoreOutput("a", [4, 5], logprobs=rows(4, 6))]) == []
    (a,) = held.take()
    assert a == EngineCoreOutput("a", [3, 4, 5], logprobs=rows(3, 6), prompt_logprobs=rows(0, 5))
