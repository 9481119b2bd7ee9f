"""Batches of a run by the number of their step: who computed which one when. Shared by views of several batches.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3.10
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.exceptions import ConfigError
from minivllm.timeline.intervals import Interval
from minivllm.timeline.run import Run
from minivllm.trace_store import Process, Span

_COMPUTING = ("model.forward", "runner.sample_tokens")
# So many steps fit into one picture with a bar each that can still be told apart.
SHOWN = 6


@dataclass(slots=True)
class Batches:
    """Attributes:
    spans: worker process → step → its forward pass and its sampling, absolute times.
    stage_of: worker process → pipeline stage.
    steps: all steps that had a batch, in order.
    num_engine_steps: all steps, also those that had none: the last one mostly tells the workers who has ended.
    """

    spans: dict[Process, dict[int, list[Span]]] = field(default_factory=dict)
    stage_of: dict[Process, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    num_engine_steps: int = 0

    @classmethod
    def of(cls, run: Run) -> Batches:
        batches = cls()
        steps: set[int] = set()
        for name in _COMPUTING:
            for span in run.all(name):
                step = span.get("step")
                # Steps of the warm-up have number 0.
                if step:
                    batches.spans.setdefault(span.process, {}).setdefault(int(step), []).append(span)
                    batches.stage_of[span.process] = int(span.get("pp_rank") or 0)
                    steps.add(int(step))
        batches.steps = sorted(steps)
        batches.num_engine_steps = max([*engine_steps(run), *batches.steps[-1:]], default=0)
        return batches

    @property
    def num_stages(self) -> int:
        return 1 + max(self.stage_of.values(), default=0)

    def first_of_stage(self, run: Run) -> list[Process]:
        """One process per stage, the first by rank among those to be shown."""
        found: dict[int, Process] = {}
        for process in run.workers:
            if process in self.spans:
                found.setdefault(self.stage_of[process], process)
        return [found[stage] for stage in sorted(found)]

    def busy(self, process: Process, steps: set[int] | None = None) -> list[Interval]:
        """When a process computed."""
        return [
            (span.start_ns, span.end_ns)
            for step, spans in self.spans[process].items()
            if steps is None or step in steps
            for span in spans
        ]

    def title(self, shown: list[int]) -> str:
        """Which steps these are; an engine step without a batch has a number, too."""
        first, last = shown[0], shown[-1]
        if self.steps[-1] - self.steps[0] + 1 == len(self.steps):
            return f"Steps {first} to {last} of {self.num_engine_steps}"
        part = (
            f"{len(shown)} of the {len(self.steps)}" if len(shown) < len(self.steps) else f"all {len(shown)}"
        )
        return f"Steps {first} to {last} ({part} that had a batch)"

    def shown(self, run: Run) -> list[int]:
        """The steps to show: from the one that the reader asked for, or from the middle of the run."""
        focus = run.options.focus
        first = max(0, len(self.steps) // 2 - SHOWN // 2)
        if focus is not None:
            if not focus.isdigit() or int(focus) not in self.steps:
                raise ConfigError(
                    f"--focus {focus}: no such step in this trace; steps are numbered {self.steps[0]} to "
                    f"{self.steps[-1]}"
                )
            first = self.steps.index(int(focus))
        return self.steps[first : first + SHOWN]


def engine_steps(run: Run) -> dict[int, Span]:
    """EngineCore's steps by their numbers, which the scheduler counts from 1: what everything about steps is counted by.

    A step in which the scheduler is not asked, since it has no request, has none.
    """
    numbers = {span.parent_span_id: span.get("step") for span in run.all("scheduler.schedule")}
    steps = run.all("engine_core.step")
    found = {int(n): step for step in steps if (n := numbers.get(step.span_id))}
    # A trace that lacks the scheduler's word.
    return found or dict(enumerate(steps, 1))


def most_in_flight(run: Run) -> int:
    """How many batches were under way at once, at most; 1 without a batch queue."""
    return max([1, *(int(span.get("in_flight") or 1) for span in run.all("engine_core.step"))])


def queue_size(run: Run) -> int:
    """Batches that the engine may have in flight."""
    span = run.first("engine_core.init_scheduler")
    return int((span.get("batch_queue_size") if span else None) or 1)
