"""What a failpoint holds up: for how long, until which step, and who waits for that process in the end.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.6
"""

from __future__ import annotations

from minivllm.stepper.history import History
from minivllm.stepper.state import RunState, thread_of
from minivllm.stepper.steps import Step, Walk
from minivllm.stepper.words import Words
from minivllm.timeline import text as words
from minivllm.trace_store import Process


class Holds:
    """Looks ahead from the steps in which failpoints act, once for each."""

    def __init__(self, walk: Walk, history: History, names: Words) -> None:
        self._walk = walk
        self._history = history
        self._words = names
        self._known: dict[int, list[str]] = {}

    def lines(self, step: Step) -> list[str]:
        """`held for 1.20 s, until step 125`, and `waiting for it then: …`; nothing if nothing is held up."""
        if step.index not in self._known:
            self._known[step.index] = self._look(step)
        return self._known[step.index]

    def _look(self, step: Step) -> list[str]:
        action = str(step.note.attributes.get("minivllm.action", "")) if step.note is not None else ""
        if not action.partition("=")[2].startswith(("sleep", "hang")):
            return []
        process, thread = step.span.process, thread_of(step.span)
        released = self._walk.find(
            step.index,
            lambda other: other.span.process is process and thread_of(other.span) == thread,
            hidden=True,
        )
        if released is None:
            return ["held to the end of the trace"]
        end = self._walk[released]
        length = words.duration(end.time_ns - step.time_ns)
        cut_off = " (its process ends there)" if end.ends and end.span.unfinished else ""
        lines = [f"held for {length}, until step {released + 1:,}{cut_off}"]
        waiting = self._waiting(self._history.at(released - 1), process)
        lines.append("waiting for it then: " + (", ".join(waiting) or "nobody"))
        return lines

    def _waiting(self, state: RunState, held: Process) -> list[str]:
        """Those that wait for it, directly or through others, the direct ones first, and since which step."""
        whom = {p: self._words.waits.on(state, p) for p in self._walk.store.processes()}
        found = [held]
        for at in found:
            found += [p for p, others in whom.items() if at in others and p not in found]
        return [self._since(state, process) for process in found[1:]]

    def _since(self, state: RunState, process: Process) -> str:
        began_ns = self._words.status(state, process).since_ns
        index = self._walk.find(
            self._walk.at(began_ns) - 1, lambda step: step.span.process is process, hidden=True
        )
        name = self._words.name(process)
        return f"{name} (since step {index + 1:,})" if began_ns and index is not None else name


def action_text(action: str) -> str:
    """`worker.load_model@rank1=sleep:1.2 (sleeps 1.2 s)`: a failpoint with its unit."""
    kind, _, seconds = action.partition("=")[2].partition(":")
    return f"{action} (sleeps {seconds} s)" if kind == "sleep" else action
