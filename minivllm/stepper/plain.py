"""Steps as plain text, for pipes, files and pages of the documentation.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from minivllm.stepper.explain import attribute_text, verb
from minivllm.stepper.screen import Screen, wrap
from minivllm.stepper.source import place_of
from minivllm.stepper.steps import Kind
from minivllm.timeline import text as words
from minivllm.timeline import theme
from minivllm.timeline.run import step_label
from minivllm.tracing.catalogue import SPANS

INDENT = " " * 8


def picture(screen: Screen, index: int, columns: int, rows: int) -> list[Text]:
    """The whole screen of one step, without the line of keys."""
    return screen.picture(index, columns, rows, keys=False)


def sequence(screen: Screen, start: int, count: int, columns: int) -> Iterator[Text]:
    """`count` steps from `start` on that the walk shows, a few lines for each; the last line says what is left."""
    index: int | None = screen.walk.find(start - 1, lambda step: True)
    for _ in range(count):
        if index is None:
            return
        yield from _block(screen, index, columns)
        index = screen.walk.find(index, lambda step: True)
    if index is not None:
        yield Text(f"{len(screen.walk) - index:,} more steps: --from {index + 1}", theme.FAINT)


def _block(screen: Screen, index: int, columns: int) -> Iterator[Text]:
    walk, step = screen.walk, screen.walk[index]
    span = step.span
    actor = walk.run.actor(span.process)
    what = verb(step)
    if step.ends:
        what += f" after {words.duration(span.duration_ns)}"
    head = Text.assemble(
        f"{index + 1:6d}  {walk.run.at(step.time_ns) / 1e9:11.6f} s  ",
        (f"{actor.name:<11}", theme.color(actor.slot)),
        " ",
        (step_label(span), "bold"),
        f" {what}",
    )
    lines = [head]
    spec = SPANS.get(span.name)
    if spec is not None and step.kind is Kind.BEGIN:
        lines.append(Text(INDENT + spec.what))
        place = place_of(span)
        seen = [
            f"{place.path}:{place.line}" if place.line else place.path,
            ", ".join(spec.articles),
            spec.vllm,
        ]
        lines.append(Text(INDENT + "; ".join(filter(None, seen)), theme.FAINT))
    if step.failed:
        failpoint = screen.explainer.failpoint(step)
        said = failpoint or [(span.status_message or "failed").splitlines()[0]]
        lines += [Text(INDENT + line, theme.ERROR) for line in said]
    attributes = attribute_text(step)
    if attributes and step.ends:
        lines.append(Text(INDENT + attributes, theme.FAINT))
    for name, before, after in screen.explainer.changes(index):
        lines.append(Text(f"{INDENT}{name}: {before} → {after}"))
    for line in lines:
        for part in wrap(line, columns):
            yield screen.spell(part)
