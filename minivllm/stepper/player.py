"""A walk as plain data, for the player on the documentation's pages: the same steps, states and sources.

vLLM 0.25.1: no counterpart
Articles: –

State is kept as texts by key; a step holds what it changes, with the text before and after, so that a player can go
both ways. Texts stand in one table and are referred to by number.
"""

from __future__ import annotations

from typing import Any

from minivllm.stepper.explain import Explainer, attribute_text
from minivllm.stepper.history import History
from minivllm.stepper.panels import slot_letter
from minivllm.stepper.source import Place, place_of
from minivllm.stepper.state import RunState
from minivllm.stepper.steps import Step, Walk
from minivllm.stepper.words import Words
from minivllm.timeline import theme
from minivllm.tracing.catalogue import SPANS

_LINES_BEFORE, _LINES_AFTER = 4, 9
SEPARATOR = "\t"


class _Table:
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, value: Any = None) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(key if value is None else value)
        return self._numbers[key]


def as_data(walk: Walk, start: int = 0, count: int | None = None) -> dict[str, Any]:
    """The shown steps from `start` on, as JSON can hold them.

    Args:
        count: how many; None takes all.

    Returns:
        processes (name, colour), texts, places (file, line, source around it, why), the state before the first step,
        and the steps.
    """
    words, history = Words(walk.run), History(walk)
    explainer = Explainer(walk, history, words)
    texts, places = _Table(), _Table()
    chosen: list[int] = []
    index = walk.find(start - 1, lambda step: True)
    while index is not None and (count is None or len(chosen) < count):
        chosen.append(index)
        index = walk.find(index, lambda step: True)
    processes = walk.store.processes()
    before = _state(walk, words, history.at(chosen[0] - 1))
    first = {key: texts.number(text) for key, text in before.items()}
    steps = []
    for index in chosen:
        step = walk[index]
        after = _state(walk, words, history.at(index))
        place = place_of(step.span)
        steps.append(
            {
                "index": index + 1,
                "time": f"{walk.run.at(step.time_ns) / 1e9:.6f} s",
                "process": processes.index(step.span.process),
                "place": places.number((place.path, place.line, place.function), _place(place)),
                "failed": step.failed,
                **_said(explainer, step, texts),
                "changes": [
                    [key, texts.number(before.get(key, "")), texts.number(after.get(key, ""))]
                    for key in dict.fromkeys([*before, *after])
                    if before.get(key) != after.get(key)
                ],
            }
        )
        before = after
    return {
        "total": len(walk),
        "processes": [
            {"name": walk.run.actor(process).name, "color": theme.color(walk.run.actor(process).slot)}
            for process in processes
        ],
        "texts": texts.values,
        "places": places.values,
        "before": first,
        "steps": steps,
    }


def _said(explainer: Explainer, step: Step, texts: _Table) -> dict[str, Any]:
    spec = SPANS.get(step.span.name)
    error = ""
    if step.failed:
        error = (
            "; ".join(explainer.failpoint(step))
            if step.note is not None
            else (step.span.status_message or "failed").splitlines()[0]
        )
    return {
        "name": step.span.name,
        "event": explainer.event(step).plain,
        "what": texts.number(spec.what if spec is not None else ""),
        "articles": texts.number(", ".join(spec.articles) if spec is not None else ""),
        "vllm": texts.number(spec.vllm if spec is not None else ""),
        "error": texts.number(error),
        "attributes": attribute_text(step) if step.ends else "",
    }


def _place(place: Place) -> dict[str, Any]:
    first = max(1, place.line - _LINES_BEFORE)
    shown = place.lines[first - 1 : place.line + _LINES_AFTER]
    margin = min((len(line) - len(line.lstrip()) for line in shown if line.strip()), default=0)
    return {
        "path": place.path,
        "line": place.line,
        "function": place.function,
        "first": first,
        "lines": [line[margin:] for line in shown],
        "why": place.why,
        "note": place.note,
    }


def _state(walk: Walk, words: Words, state: RunState) -> dict[str, str]:
    """Everything that can change: "p0" a process, "r<queue>\\t3" a slot, "pipes …", "futures"."""
    found = {}
    for number, process in enumerate(walk.store.processes()):
        status = words.status(state, process)
        parts = (status.kind, status.text, status.note, status.detail)
        found[f"p{number}"] = SEPARATOR.join(parts)
    for queue, slots in state.rings.items():
        for number, slot in enumerate(slots):
            what = words.slot(slot) if slot.writing or not slot.is_free else ""
            found[f"r{queue}{SEPARATOR}{number}"] = SEPARATOR.join((slot_letter(slot), what))
    found |= words.pipe_groups(state)
    futures = words.futures(state)
    if futures:
        found["futures"] = futures
    return found
