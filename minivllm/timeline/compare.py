"""Two runs beside each other: the same views on axes of the same length, and the figures that differ.

vLLM 0.25.1: no counterpart
Articles: part 1 §6, part 2 §2.3.10
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from minivllm.timeline import build_views, intervals
from minivllm.timeline import text as words
from minivllm.timeline.batches import Batches, most_in_flight
from minivllm.timeline.overlap import working
from minivllm.timeline.run import Options, Run
from minivllm.timeline.view import View

if TYPE_CHECKING:
    from minivllm.trace_store import TraceStore


def compare(
    stores: tuple[TraceStore, TraceStore], labels: tuple[str, str], names: list[str], options: Options
) -> list[View]:
    """The figures first, then each view of both runs, one below the other.

    Args:
        labels: what the runs are called; must differ.
        names: views; "all" stands for every view that both runs have something for.
    """
    built = [{view.name: view for view in build_views(store, names, options)} for store in stores]
    views = [_figures([Run(store, options) for store in stores], labels)]
    for name in built[0]:
        if name not in built[1]:
            continue
        pair = [both[name] for both in built]
        length = max(view.end_ns - view.start_ns for view in pair)
        for view, label in zip(pair, labels, strict=True):
            view.title = f"{label}: {view.title}"
            # The same length on both axes, so that what looks longer took longer.
            view.end_ns = view.start_ns + length
            view.shorten = ""
        views += pair
    return views


def _figures(runs: list[Run], labels: tuple[str, str]) -> View:
    view = View("compare", f"{labels[0]} and {labels[1]}")
    for what, figure, show in (
        ("start-up", _start_up, words.duration),
        ("from the first request to the end of the last", _requests, words.duration),
        ("steps", _steps, lambda value: f"{value:.0f}"),
        ("batches in flight, at most", lambda run: float(most_in_flight(run)), lambda value: f"{value:.0f}"),
        ("model.forward, median over all ranks", _forward, words.duration),
        ("EngineCore's own work per step", _engine_work, words.duration),
        ("a worker computed, of its time from first to last step", _busy, lambda value: f"{value:.0%}"),
        ("spans that ended in an error", _errors, lambda value: f"{value:.0f}"),
    ):
        sentence = _sentence(what, [figure(run) for run in runs], labels, show)
        if sentence:
            view.explanation.append(sentence)
    return view


def _sentence(
    what: str, values: list[float | None], labels: tuple[str, str], show: Callable[[float], str]
) -> str:
    known = [(label, value) for label, value in zip(labels, values, strict=True) if value is not None]
    if not known or all(value == 0 for _, value in known):
        return ""
    text = f"{what}: " + ", ".join(f"{label} {show(value)}" for label, value in known)
    if len(known) == 2 and known[0][1] > 0 and known[1][1] > 0:
        ratio = known[1][1] / known[0][1]
        text += " (the same)" if 0.995 < ratio < 1.005 else f" ({ratio:.2f} times)"
    return text


def _start_up(run: Run) -> float | None:
    ready = run.first("engine_core.ready") or run.first("engine_core.init")
    return float(run.at(ready.end_ns)) if ready else None


def _requests(run: Run) -> float | None:
    return float(intervals.span_of([(s.start_ns, s.end_ns) for s in run.all("request")])) or None


def _steps(run: Run) -> float | None:
    return float(Batches.of(run).num_engine_steps) or None


def _forward(run: Run) -> float | None:
    spans = [s.end_ns - s.start_ns for s in run.all("model.forward") if s.get("step")]
    return float(median(spans)) if spans else None


def _engine_work(run: Run) -> float | None:
    steps = run.all("engine_core.step")
    return intervals.total(working(run, steps)) / len(steps) if steps else None


def _busy(run: Run) -> float | None:
    batches = Batches.of(run)
    shares = [
        intervals.total(busy) / max(intervals.span_of(busy), 1)
        for busy in (batches.busy(process) for process in batches.spans)
    ]
    return sum(shares) / len(shares) if shares else None


def _errors(run: Run) -> float | None:
    return float(sum(span.is_error for span in run.store.spans()))
