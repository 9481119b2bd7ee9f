"""Where to go in a run, as a reader writes it: a step number, a time, a step's name, or the first failure.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import re

from minivllm.exceptions import ConfigError
from minivllm.stepper.steps import Kind, Walk
from minivllm.tracing.catalogue import SPANS

_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,
    "\u03bcs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
}
_TIME = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|\u00b5s|\u03bcs|ms|s)")
# As failpoints name steps.
_NAME = re.compile(r"(?P<name>[a-z_.]+)(?:@rank(?P<rank>\d+))?(?:#(?P<nth>[1-9]\d*))?")


def find_position(walk: Walk, text: str, current: int = 0) -> int:
    """The index of a step.

    Args:
        text: `120` (steps count from 1), `1.5s` or `300ms` (since the start of the run), `+20ms` or `-1s` (from the
            current step), `worker.load_model@rank1` or `rpc.call#7` (where the first, or seventh, such span begins),
            `failure`, `first` or `last`.

    Raises:
        ConfigError: it is none of these, or there is no such step.
    """
    text = text.strip()
    if text == "failure":
        if walk.first_failure is None:
            raise ConfigError("nothing failed in this run")
        return walk.first_failure
    if text in ("first", "last"):
        return 0 if text == "first" else len(walk) - 1
    if text.isdigit():
        if not 1 <= int(text) <= len(walk):
            raise ConfigError(f"there is no step {text}; the run has steps 1 to {len(walk)}")
        return int(text) - 1
    named = _NAME.fullmatch(text)
    if named is not None and named["name"] in SPANS:
        return _find_named(walk, text, named)
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no step number, no time such as 1.5s or +300ms, no step of the catalogue, and not `failure`"
        )
    distance_ns = round(float(match[2]) * _UNITS_NS[match[3]])
    here_ns = walk[current].time_ns
    if match[1] == "-":
        return walk.at(here_ns - distance_ns)
    return walk.at(here_ns + distance_ns if match[1] else walk.run.zero_ns + distance_ns)


def names_a_span(text: str) -> bool:
    """Whether a position is one step by name; a number or a time is also a fine place to begin between steps."""
    named = _NAME.fullmatch(text.strip())
    return named is not None and named["name"] in SPANS


def _find_named(walk: Walk, text: str, named: re.Match[str]) -> int:
    rank = int(named["rank"]) if named["rank"] else None
    spans = walk.store.spans(named["name"], rank=rank)
    nth = int(named["nth"] or 1)
    if nth > len(spans):
        raise ConfigError(f"{text}: the run has {len(spans)} of them; `minivllm spans` lists the names")
    span = spans[nth - 1]
    found = walk.find(
        walk.at(span.start_ns) - 1, lambda step: step.span is span and step.kind is Kind.BEGIN, hidden=True
    )
    return found if found is not None else walk.at(span.start_ns)
