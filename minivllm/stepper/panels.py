"""The upper panels of the picture: processes, pipes and queues; and the source line with its why.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from minivllm.stepper.rings import Slot
from minivllm.stepper.source import Place, place_of
from minivllm.stepper.state import RunState
from minivllm.timeline import text as words
from minivllm.timeline import theme
from minivllm.trace_store import Process

if TYPE_CHECKING:
    from minivllm.stepper.screen import Screen

_FAINT = Style(color=theme.FAINT)
_ERROR = Style(color=theme.ERROR, bold=True)
MARKS = {
    "not started": ("·", "."),
    "starting": ("▹", ">"),
    "working": ("▶", ">"),
    "waiting": ("‖", "~"),
    "idle": ("○", "o"),
    "ending": ("▽", "v"),
    "ended": ("□", "-"),
    "dead": ("✖", "X"),
}


def left_panel(screen: Screen, state: RunState, index: int, columns: int, rows: int) -> list[Text]:
    """Processes with two lines each if there is room for that, then queues, futures and pipes."""
    current = screen.walk[index].span.process
    processes = screen.walk.store.processes()
    queues = _queue_lines(screen, state, columns)
    from minivllm.stepper.screen import wrap

    pipes = [
        part
        for name, text in screen.words.pipe_groups(state).items()
        for part in wrap(Text.assemble((f"{name}: ", _FAINT), text), columns)
    ]
    has_news = any(p.ready != "closed" or p.death == "EOF" for p in state.pipes.values())
    below = [*pipes, *queues] if has_news else [*queues, *pipes]
    # As much about each process as fits, and some room for the queues.
    for for_current, for_others in ((3, 3), (3, 2), (3, 1), (2, 1), (2, 0), (1, 0), (0, 0)):
        lines = []
        for process in processes:
            is_current = process is current
            more_lines = for_current if is_current else for_others
            lines += _process_lines(screen, state, process, is_current, columns, more_lines)
        if len(lines) + min(len(below), 4) <= rows:
            break
    room = rows - len(lines)
    if len(below) > room:
        below = [*below[: max(0, room - 1)], Text(f"{len(below) - room + 1} more lines: Enter", _FAINT)]
    return (lines + below)[:rows]


def _process_lines(
    screen: Screen, state: RunState, process: Process, is_current: bool, columns: int, more_lines: int
) -> list[Text]:
    """The process and for how long it has been at it, then what it does; or both in one line."""
    from minivllm.stepper.screen import wrap

    status = screen.words.status(state, process)
    actor = screen.walk.run.actor(process)
    mark = MARKS[status.kind][0 if screen.glyphs is theme.UNICODE else 1]
    style = Style(color=theme.color(actor.slot), bold=True, reverse=is_current)
    is_dead = status.kind == "dead"
    first = Text.assemble((mark + " ", _ERROR if is_dead else ""), (actor.name, style), " ")
    text = status.text if more_lines or not status.note else f"{status.text}, {status.note}"
    if not more_lines:
        first.append(text, _ERROR if is_dead else Style())
        return [first]
    if status.since_ns and status.kind not in ("not started", "ended", "dead"):
        first.append(f"for {words.duration(state.time_ns - status.since_ns)}", _FAINT)
    others = [
        f"thread {s.attributes.get('thread.name', '?')}: {s.name}" for s in state.other_threads(process)
    ]
    what = screen.spell(Text("    " + "; ".join(filter(None, (text, status.note, status.detail, *others)))))
    what.stylize(_ERROR if is_dead else Style())
    lines = wrap(what, columns)
    if len(lines) > more_lines:
        lines = lines[:more_lines]
        lines[-1].truncate(columns - 1, overflow="crop")
        lines[-1].append("…")
    return [first, *lines]


def _queue_lines(screen: Screen, state: RunState, columns: int) -> list[Text]:
    if not state.facts.channels:
        return [Text("queues: not recorded; --trace-level message does", _FAINT)]
    lines: list[Text] = []
    broadcast = state.facts.channels.broadcast
    width = max((len(queue) for queue in state.rings), default=0)
    for queue in sorted(state.rings, key=lambda queue: (queue != broadcast, queue)):
        slots = state.rings[queue]
        strip = Text.assemble((f"{queue:{width}} ", "bold"), "".join(slot_letter(slot) for slot in slots))
        lines.append(strip)
        for number, slot in enumerate(slots):
            if slot.writing or not slot.is_free:
                lines.append(Text(f"  slot {number}: {screen.words.slot(slot)}"))
    futures = screen.words.futures(state)
    if futures:
        lines.append(Text.assemble(("futures ", "bold"), futures))
    return lines


def slot_letter(slot: Slot) -> str:
    """`.` never written, `o` read by all, `w` being written, `W` unread, `r` read by some."""
    if slot.writing:
        return "w"
    if slot.message is None:
        return "."
    if slot.is_free:
        return "o"
    return "r" if any(slot.read) else "W"


def right_panel(screen: Screen, index: int, columns: int, rows: int) -> list[Text]:
    """The source around the line that emitted a step, and below it why it is there."""
    return source_panel(place_of(screen.walk[index].span), columns, rows)


def source_line(screen: Screen, index: int) -> Text:
    """The same in one line: the place, and the code that stands there."""
    place = place_of(screen.walk[index].span)
    if not place.line:
        return Text(f"{place.path}: {place.note}" if place.path else place.note, _FAINT)
    note = f"  ({place.note})" if place.note else ""
    text = Text.assemble(
        (f"{place.path}:{place.line}  ", "bold"), (place.lines[place.line - 1].strip(), "italic")
    )
    return text.append(note, _FAINT)


def source_panel(place: Place, columns: int, rows: int) -> list[Text]:
    """The source around a line, and below it why it is there."""
    from minivllm.stepper.screen import wrap

    title = Text.assemble((f"{place.path}:{place.line}" if place.line else place.path, "bold"))
    if title.cell_len > columns:
        short = place.path.removeprefix("minivllm/")
        title = Text(("…" + f"{short}:{place.line}"[-(columns - 1) :]), "bold")
    lines = [title, Text(place.function, _FAINT)]
    if place.note:
        lines += wrap(Text(place.note, _FAINT), columns)
    why = wrap(Text.assemble(("why: ", "bold"), place.why), columns) if place.why else []
    if not place.lines:
        return (lines + why)[:rows]
    room = rows - len(lines)
    why_rows = min(len(why), max(2, room * 2 // 5))
    if why_rows < len(why):
        why = why[:why_rows]
        why[-1].truncate(columns - 1, overflow="crop")
        why[-1].append("…")
    source_rows = max(1, room - why_rows)
    # More of what follows than of what came before: the body of the span begins at the line.
    first = max(1, min(place.line - source_rows // 3, len(place.lines) - source_rows + 1))
    shown = place.lines[first - 1 : first - 1 + source_rows]
    margin = min((len(t) - len(t.lstrip()) for t in shown if t.strip()), default=0)
    digits = len(str(first + source_rows))
    for number, line in enumerate(shown, first):
        here = number == place.line
        text = Text.assemble((f"{'>' if here else ' '}{number:{digits}d} ", "bold" if here else _FAINT))
        comment = line.lstrip().startswith("#")
        text.append(line[margin:], "bold" if here else Style(italic=True) if comment else Style())
        lines.append(text)
    return lines + why


def legend(glyphs: theme.Glyphs) -> str:
    """The marks of the processes and what they mean."""
    column = 0 if glyphs is theme.UNICODE else 1
    return ", ".join(f"{marks[column]} {kind}" for kind, marks in MARKS.items())
