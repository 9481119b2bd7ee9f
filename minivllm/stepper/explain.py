"""The sentences about one step: what happened, what it changed, what the catalogue says, where else to read.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from typing import Any

from rich.style import Style
from rich.text import Text

from minivllm.stepper.history import History
from minivllm.stepper.holds import Holds, action_text
from minivllm.stepper.steps import Kind, Step, Walk
from minivllm.stepper.words import Words
from minivllm.timeline import text as words
from minivllm.timeline import theme
from minivllm.timeline.run import step_label
from minivllm.trace_store import Span
from minivllm.tracing.catalogue import SPANS

_FAINT = Style(color=theme.FAINT)
_ERROR = Style(color=theme.ERROR, bold=True)
# Said elsewhere on the screen.
_HIDDEN = ("code.", "thread.id", "rpc.system.name")


class Explainer:
    """Says what happens in a step; remembers the last summary, since steps are mostly taken one by one."""

    def __init__(self, walk: Walk, history: History, names: Words) -> None:
        self._walk = walk
        self._history = history
        self._words = names
        self._holds = Holds(walk, history, names)
        self._last: tuple[int, dict[str, str]] | None = None

    def changes(self, index: int) -> list[tuple[str, str, str]]:
        before = (
            self._last[1]
            if self._last is not None and self._last[0] == index - 1
            else self._words.summary(self._history.at(index - 1))
        )
        after = self._words.summary(self._history.at(index))
        self._last = (index, after)
        return self._words.changes(before, after)

    def lines(self, index: int, full: bool = False, place: Text | None = None) -> list[Text]:
        """Lines to be wrapped, what answers questions first.

        Args:
            full: with tracebacks and every attribute.
            place: where the step was emitted, if that is not to be seen elsewhere.
        """
        step = self._walk[index]
        spec = SPANS.get(step.span.name)
        lines = [self.event(step)]
        if step.ends and step.span.is_error:
            message = step.span.status_message or "failed"
            lines.append(Text(message if full else message.splitlines()[0], _ERROR))
        failpoint = self.failpoint(step)
        if failpoint:
            lines.append(Text(failpoint[0], _ERROR))
            lines += [Text(line, "bold") for line in failpoint[1:]]
        state = self._history.at(index)
        status = self._words.status(state, step.span.process)
        if status.detail:
            whom = status.note or status.text
            chain = self._words.chain(state, step.span.process)
            lines.append(Text(f"{self._words.name(step.span.process)} {whom}; {chain}", "bold"))
        if spec is not None:
            lines.append(Text(spec.what))
        if place is not None:
            lines.append(place)
        for what, before, after in self.changes(index):
            lines.append(Text.assemble((f"{what}: ", "bold"), f"{before} → {after}"))
        if spec is not None:
            articles = ", ".join(spec.articles) or "no section"
            lines.append(
                Text.assemble(
                    ("articles ", _FAINT), articles, ("  vLLM 0.25.1 ", _FAINT), spec.vllm or "no counterpart"
                )
            )
            if full:
                lines.append(Text(f"emitted by {spec.method}; {spec.when or 'in each run'}", _FAINT))
        attributes = attribute_text(step, full)
        if attributes:
            lines.append(Text(attributes, _FAINT))
        if full:
            lines += _exception_lines(step.span)
        return lines

    def failpoint(self, step: Step) -> list[str]:
        """What breaks the run in this step, and what it holds up; empty for all other steps."""
        if step.note is None or step.note.name != "failpoint":
            return []
        action = action_text(str(step.note.attributes.get("minivllm.action", "")))
        return [f"MINIVLLM_FAILPOINTS breaks the run here: {action}", *self._holds.lines(step)]

    def event(self, step: Step) -> Text:
        """What happens, in one sentence."""
        span = step.span
        name = self._words.name(span.process)
        text = Text.assemble(
            (step_label(span), "bold"), " ", verb(step), " on ", (name, theme_color(self._walk, span))
        )
        thread = span.attributes.get("thread.name", "MainThread")
        if thread != "MainThread":
            text.append(f", thread {thread}", _FAINT)
        if step.kind is Kind.WRITTEN:
            text.append(": the message is there for all readers")
        elif step.kind is Kind.BEGIN:
            text.append(f"; it will take {words.duration(span.duration_ns)}", _FAINT)
            if span.unfinished:
                text.append(" and never finish", _ERROR)
        elif step.ends:
            text.append(f" after {words.duration(span.duration_ns)}")
        return text


def headline(walk: Walk, names: Words, index: int, columns: int) -> Text:
    """Which step of how many, when, and how long since the step before."""
    step = walk[index]
    at = walk.run.at(step.time_ns)
    left = f"step {index + 1:,} of {len(walk):,}"
    gap = step.time_ns - walk[index - 1].time_ns if index else 0
    name = names.name(step.span.process)
    later = f"  {words.duration(gap)} later" if index else ""
    fixed = len(left) + len(f"   {at / 1e9:.6f} s   {name} {step.span.name}")
    text = Text.assemble(
        (left, "bold"),
        f"   {at / 1e9:.6f} s",
        (later if fixed + len(later) <= columns else "", _FAINT),
        "   ",
        (name, theme_color(walk, step.span) + " bold"),
        f" {step.span.name}",
    )
    share = index / max(1, len(walk) - 1)
    room = columns - text.cell_len - 7
    if room >= 10:
        done = round(share * min(room, 30))
        text.append("  " + "━" * done, theme.color(theme.ENGINE_CORE_SLOT))
        text.append("─" * (min(room, 30) - done), _FAINT)
        text.append(f" {share:.0%}", _FAINT)
    return text


def theme_color(walk: Walk, span: Span) -> str:
    return theme.color(walk.run.actor(span.process).slot)


def verb(step: Step) -> str:
    """What the span does in this step: `begins`, `meets a failpoint`, `fails` …"""
    if step.kind is Kind.BEGIN:
        return "begins"
    if step.kind is Kind.WRITTEN:
        return "sets the written flag"
    if step.note is not None and step.note.name == "failpoint":
        return "meets a failpoint"
    if step.note is not None:
        said = ", ".join(f"{short(key)} {value}" for key, value in step.note.attributes.items())
        return f"notes {step.note.name}" + (f" ({said})" if said else "")
    if step.span.unfinished:
        return "is cut off"
    return "fails" if step.span.is_error else "ends"


def short(name: str) -> str:
    return name.removeprefix("minivllm.")


def attribute_text(step: Step, full: bool = False) -> str:
    """`seq=5 rpc.method=execute_model …`. What a span sets when it ends is shown from its begin on."""
    parts = []
    for key, value in step.span.attributes.items():
        if key.startswith(_HIDDEN) and not full:
            continue
        if key == "thread.name" and (value == "MainThread" or not full):
            continue
        text = _value(key, value)
        # The value says its unit.
        name = short(key).removesuffix("_ns") if text != str(value) else short(key)
        parts.append(f"{name}={text if full or len(text) <= 60 else text[:57] + '…'}")
    return ("\n" if full else "  ").join(parts)


def _value(key: str, value: Any) -> str:
    if key.endswith("_ns") and isinstance(value, int):
        return words.duration(value)
    return str(value)


def _exception_lines(span: Span) -> list[Text]:
    lines = []
    for event in span.events:
        if event.name == "exception":
            lines.append(Text())
            trace = str(event.attributes.get("exception.stacktrace", ""))
            lines += [Text(line, _FAINT) for line in trace.splitlines()]
    return lines
