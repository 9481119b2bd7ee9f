"""Where to go in a run, as a reader writes it: a step number, a time, a step's name, or the first failure.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import difflib
import re

from minivllm.exceptions import ConfigError
from minivllm.stepper.steps import Kind, Walk
from minivllm.timeline import text as words
from minivllm.tracing.catalogue import LEVEL_NAMES, SPANS

_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,
    "\u03bcs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
}
_NUMBER = re.compile(r"\d+|\d{1,3}(?:,\d{3})+")
_TIME = re.compile(r"([+-]?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)\s*(ns|us|\u00b5s|\u03bcs|ms|s)")
# As failpoints name steps.
_SUFFIX = re.compile(r"(?P<name>[A-Za-z_.]+)(?P<suffix>(?:[@#]\w*)*)")
_NAME = re.compile(r"(?P<name>[a-z_.]+)(?:@rank(?P<rank>\d+))?(?:#(?P<nth>[1-9]\d*))?")


def find_position(walk: Walk, text: str, current: int = 0) -> int:
    """The index of a step.

    Args:
        text: `120` or `3,120` (steps count from 1), `1.5s` or `300ms` (since the start of the run), `+20ms` or `-1s` (from the
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
    if _NUMBER.fullmatch(text):
        number = int(text.replace(",", ""))
        if not 1 <= number <= len(walk):
            raise ConfigError(f"there is no step {text}; the run has steps 1 to {len(walk):,}")
        return number - 1
    named = _NAME.fullmatch(text)
    if named is not None and named["name"] in SPANS:
        return _find_named(walk, text, named)
    time_ns = _time_ns(walk, text, current)
    if time_ns is None:
        raise ConfigError(f"{text!r} {_what_is_wrong(text)}")
    return walk.at(time_ns)


def remark(walk: Walk, text: str, current: int = 0) -> str:
    """What the reader should know about a position that was found; mostly nothing.

    Args:
        current: the step that was shown before.
    """
    time_ns = _time_ns(walk, text.strip(), current)
    if time_ns is not None and time_ns > walk[len(walk) - 1].time_ns:
        end_ns = walk.run.at(walk[len(walk) - 1].time_ns)
        return f"the run ends at {words.instant(end_ns)}; this is its last step"
    return ""


def hidden_remark(walk: Walk, index: int) -> str:
    """That a step is of a level that the walk does not show; "" if it is shown."""
    step = walk[index]
    if walk.is_shown(step):
        return ""
    level = LEVEL_NAMES[SPANS[step.span.name].level]
    return f"this step is of level {level}, which is hidden now"


def _time_ns(walk: Walk, text: str, current: int) -> int | None:
    """The absolute time that a text means; None if it is no time."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    distance_ns = round(float(match[2].replace(",", "")) * _UNITS_NS[match[3]])
    if not match[1]:
        return walk.run.zero_ns + distance_ns
    return walk[current].time_ns + (-distance_ns if match[1] == "-" else distance_ns)


def _what_is_wrong(text: str) -> str:
    """Why a text is no position, and what was probably meant."""
    found = _SUFFIX.fullmatch(text)
    name = found["name"] if found else ""
    if found is not None and name in SPANS:
        if re.search(r"#0*(@|$)", found["suffix"]):
            return f"counts from 1: {name}#1 is the first"
        swapped = re.fullmatch(r"(#\d+)(@rank\d+)", found["suffix"])
        if swapped is not None:
            return f"has the rank last; write {name}{swapped[2]}{swapped[1]}"
        return f"is no step; a rank and a number are written as in {name}@rank1#2"
    near = difflib.get_close_matches(name, SPANS, n=3, cutoff=0.7)
    if near:
        return f"is no step of the catalogue; near it: {', '.join(near)}"
    return "is no step number, no time such as 1.5s or +300ms, no step of the catalogue, and not `failure`"


def names_a_span(text: str) -> bool:
    """Whether a position is one step by name; a number or a time is also a fine place to begin between steps."""
    named = _NAME.fullmatch(text.strip())
    return named is not None and named["name"] in SPANS


def _why_not_there(walk: Walk, name: str, rank: int | None, count: int) -> str:
    """What a run has of a step, where it has fewer of it than was asked for."""
    everywhere = walk.store.spans(name)
    if rank is not None and not count:
        workers = sorted({p.rank for p in walk.store.processes() if p.rank is not None})
        if rank not in workers:
            return f"the run has {words.ranks(workers)}" if workers else "the run has no worker processes"
        if everywhere:
            return f"rank {rank} has no {name}, but other processes have {len(everywhere):,}"
    if not everywhere:
        return f"the run has no {name}"
    where = f"rank {rank}" if rank is not None else "the run"
    return f"{where} has {words.count(count, 'such step')}"


def _find_named(walk: Walk, text: str, named: re.Match[str]) -> int:
    rank = int(named["rank"]) if named["rank"] else None
    spans = walk.store.spans(named["name"], rank=rank)
    nth = int(named["nth"] or 1)
    if nth > len(spans):
        raise ConfigError(f"{text}: {_why_not_there(walk, named['name'], rank, len(spans))}")
    span = spans[nth - 1]
    found = walk.find(
        walk.at(span.start_ns) - 1, lambda step: step.span is span and step.kind is Kind.BEGIN, hidden=True
    )
    return found if found is not None else walk.at(span.start_ns)
