"""Where to go in a run, as a reader writes it: a step number, a time, or the first failure.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import re

from minivllm.exceptions import ConfigError
from minivllm.stepper.steps import Walk

_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,
    "\u03bcs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
}
_TIME = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|\u00b5s|\u03bcs|ms|s)")


def find_position(walk: Walk, text: str, current: int = 0) -> int:
    """The index of a step.

    Args:
        text: `120` (steps count from 1), `1.5s` or `300ms` (since the start of the run), `+20ms` or `-1s` (from the
            current step), `failure`, `first` or `last`.

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
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is no step number, no time such as 1.5s or +300ms, and not `failure`")
    distance_ns = round(float(match[2]) * _UNITS_NS[match[3]])
    here_ns = walk[current].time_ns
    if match[1] == "-":
        return walk.at(here_ns - distance_ns)
    return walk.at(here_ns + distance_ns if match[1] else walk.run.zero_ns + distance_ns)
