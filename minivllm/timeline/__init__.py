"""Timelines of a recorded run: which views there are, and how to build the ones that were asked for.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3, §2.4, §2.6
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from minivllm.timeline.run import Options
    from minivllm.timeline.view import View
    from minivllm.trace_store import TraceStore

VIEWS: Final = {
    "spawn": "who was started when, who was ready when, and where the parent waited",
    "init": "what each rank did until it could serve, and which rank waited for which",
    "rpc": "one broadcast and its responses",
    "step": "one engine step across processes",
    "pipeline": "the stages of a pipeline over several steps, and where they stand still",
    "async": "what EngineCore does while the workers compute",
    "future": "calls that did not block, from sending to asking for the result",
    "shutdown": "who was asked to end, and how long each took",
    "failure": "what broke, who noticed, and when",
}
# Views of which not every run has something to show.
SOMETIMES: Final = frozenset({"pipeline", "async", "future", "failure"})
# `async` is a keyword, and no module can be imported by that name in a statement.
_MODULES: Final = {"async": "overlap"}


def build_views(store: TraceStore, names: list[str], options: Options | None = None) -> list[View]:
    """Build views of one run.

    Args:
        names: keys of VIEWS; "all" stands for every view that this run has something for.

    Raises:
        ConfigError: the focus names nothing in this trace.
    """
    from minivllm.timeline.filters import apply
    from minivllm.timeline.run import Options, Run

    options = options or Options()
    run = Run(store, options)
    everything = "all" in names
    views: list[View] = []
    for name in VIEWS if everything else names:
        module = importlib.import_module(f"minivllm.timeline.{_MODULES.get(name, name)}")
        if everything and name in SOMETIMES and not module.applies(run):
            continue
        views.append(apply(module.build(run), options))
    return views
