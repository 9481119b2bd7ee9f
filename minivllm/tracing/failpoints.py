"""Places where the reader can break the system: each span of the catalogue, by name, rank and occurrence.

vLLM 0.25.1: none
Articles: part 2 §2.6

MINIVLLM_FAILPOINTS="worker.load_model@rank1=kill; rpc.execute@rank0#3=raise; run@client=sleep:5"
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minivllm.exceptions import ConfigError
from minivllm.tracing.catalogue import SPANS
from minivllm.tracing.process import identity
from minivllm.tracing.spec import ENGINE_CORE, LEVEL_NAMES, WORKER, SpanSpec

_SPEC = re.compile(
    r"^(?P<span>[a-z_.]+)(?:@(?P<who>rank\d+|engine|client))?(?:\#(?P<nth>\d+|\*))?"
    r"=(?P<action>kill|raise|hang|exit:\d+|sleep:\d+(?:\.\d+)?)$"
)
SYNTAX = "span[@rankN|@engine|@client][#occurrence|#*]=kill|exit:N|raise|sleep:SECONDS|hang"


class FailpointError(RuntimeError):
    """Raised by a failpoint with the action `raise`."""


@dataclass(slots=True)
class Failpoint:
    """One parsed failpoint. `seen` counts the matching entries of its span in this process.

    Attributes:
        who: "rankN", "engine", "client", or "" for any process.
        nth: the occurrence at which it fires, from 1; 0 for every one.
    """

    text: str
    span: str
    who: str
    nth: int
    action: str
    argument: float
    seen: int = 0

    def due(self, spec: SpanSpec) -> bool:
        """Count this entry of the span if it is meant for this process, and say whether to act."""
        if self.who and self.who not in _names_of_this_process(spec):
            return False
        self.seen += 1
        return self.nth in (0, self.seen)


def _names_of_this_process(spec: SpanSpec) -> set[str]:
    """The names by which this process can be meant for this span.

    With fewer processes (InprocClient, UniProcExecutor) one stands in for those that would run this step.
    """
    role, rank = identity.role, identity.rank
    if role == WORKER:
        return {f"rank{rank}"}
    names = {"engine" if role == ENGINE_CORE else "client"}
    if role not in spec.process:
        names.add("engine" if ENGINE_CORE in spec.process else "rank0")
    return names


def parse(text: str) -> dict[str, list[Failpoint]]:
    """Parse the value of MINIVLLM_FAILPOINTS into failpoints by span name.

    Raises:
        ConfigError: a part has another form than SYNTAX, or names a span that the catalogue does not have.
    """
    failpoints: dict[str, list[Failpoint]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _SPEC.match(re.sub(r"\s*([=@#:])\s*", r"\1", part))
        if match is None:
            raise ConfigError(f"MINIVLLM_FAILPOINTS: {part!r} is not of the form {SYNTAX}")
        if match["span"] not in SPANS:
            raise ConfigError(
                f"MINIVLLM_FAILPOINTS: {match['span']!r} is not a span (`minivllm spans` lists them)"
            )
        nth = match["nth"] or "1"
        if nth == "0":
            raise ConfigError(f"MINIVLLM_FAILPOINTS: {part!r}: occurrences count from 1")
        action, _, argument = match["action"].partition(":")
        failpoints.setdefault(match["span"], []).append(
            Failpoint(
                text=part,
                span=match["span"],
                who=match["who"] or "",
                nth=0 if nth == "*" else int(nth),
                action=action,
                argument=float(argument or 0),
            )
        )
    return failpoints


def check_ranks(text: str, world_size: int) -> None:
    """Raises ConfigError when the value of MINIVLLM_FAILPOINTS names a rank that a run with so many has not."""
    for failpoint in (one for several in parse(text).values() for one in several):
        rank = failpoint.who.removeprefix("rank")
        if rank.isdigit() and int(rank) >= world_size:
            ranks = "rank 0 only" if world_size == 1 else f"ranks 0 to {world_size - 1}"
            raise ConfigError(f"MINIVLLM_FAILPOINTS: {failpoint.text!r} can never act: the run has {ranks}")


def never_reached(text: str, trace_dir: str, level: str) -> list[str]:
    """The failpoints that acted nowhere in a recorded run; none when another one ended a process or raised before them.

    Args:
        level: of the trace. Where it does not record a failpoint's step, nothing can be said of it.
    """
    recorded = [
        one
        for several in parse(text).values()
        for one in several
        if SPANS[one.span].level <= LEVEL_NAMES.index(level)
    ]
    missing = {one.text: one.text.encode() for one in recorded}
    for path in Path(trace_dir).iterdir():
        if missing and path.is_file():
            content = path.read_bytes()
            missing = {name: said for name, said in missing.items() if said not in content}
    if any(one.action != "sleep" and one.text not in missing for one in recorded):
        return []
    return list(missing)


def act(failpoint: Failpoint, save_trace: Callable[[], None]) -> None:
    """Do what the failpoint says. save_trace writes finished spans and journals open ones before the process ends.

    Raises:
        FailpointError: the action is `raise`.
    """
    if failpoint.action == "sleep":
        time.sleep(failpoint.argument)
    elif failpoint.action == "raise":
        raise FailpointError(f"failpoint {failpoint.text}")
    elif failpoint.action == "hang":
        while True:
            time.sleep(3600)
    else:
        save_trace()
        if failpoint.action == "exit":
            os._exit(int(failpoint.argument))
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # SIGKILL is delivered before this returns
