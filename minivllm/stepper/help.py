"""The page of help of the step-through, for any width.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from rich.text import Text

from minivllm.stepper.panels import legend
from minivllm.stepper.screen import wrap
from minivllm.timeline import theme

_LATE = """\
Why is a rank late? f goes to what went wrong or was held up, and says who waits for it. When nothing was, look for \
a process that waits: it says for whom, and what that one does."""
_KEYS = (
    ("n, right, down, space", "next step"),
    ("p, left, up, backspace", "previous step"),
    ("page down, page up", "ten steps on, back"),
    ("g, home / G, end", "first / last step"),
    ("r, R", "next, previous step of this (the marked) process"),
    ("0 … 9", "next step of the worker with this rank"),
    ("e, c", "next step of EngineCore, of the client"),
    ("o", "over: to the end of the span, and from its end to its begin"),
    ("u", "up: to the beginning of the span around this one"),
    ("f, F", "next, previous failure or failpoint"),
    (
        "/, \\",
        "search forward, backward: in names, processes, attributes, errors, and in what a step changes as the screen "
        "says it; an empty text repeats the last search, and after the last step comes the first",
    ),
    ("t", "go to a time (1.5s, +20ms), number (3,000) or name (rpc.call#7)"),
    ("l", "all steps, only rpc and lifecycle, only lifecycle"),
    ("enter", "everything about this step: attributes, traceback, queues"),
    ("q", "quit"),
)
_READING = (
    'One step is one recorded event: a span begins, ends or notes something. The picture shows the state right after it. "It '
    'will take" and "held" look ahead: the trace knows how long each span was going to last.',
    "The time beside a process says for how long it has been in the step, or in the wait, that is named with it.",
    "Rings have one letter per slot: . never written, w being written, W written and unread, r read by some, o read by all. "
    "Flags such as 1 01: the written flag, then one for each reader.",
)


def help_lines(columns: int, glyphs: theme.Glyphs) -> list[Text]:
    """The question that most have first, then the keys, then how to read the picture."""
    indent = max(len(keys) for keys, _ in _KEYS) + 2
    lines = [*wrap(Text(_LATE), columns), Text()]
    for keys, what in _KEYS:
        parts = wrap(Text(what), columns - indent)
        lines += [
            Text((keys if number == 0 else "").ljust(indent)).append_text(part)
            for number, part in enumerate(parts)
        ]
    for paragraph in (
        *_READING,
        f"Processes: {legend(glyphs)}. {glyphs.ellipsis} is cut off; Enter shows all.",
    ):
        lines += [Text(), *wrap(Text(paragraph), columns)]
    return lines
