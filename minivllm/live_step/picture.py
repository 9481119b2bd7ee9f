"""One picture of a live step-through: the processes on the left, the source of the marked one's step on the right.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from minivllm.live_step.server import Halt, Peer, Server
from minivllm.live_step.words import since, status
from minivllm.stepper.panels import MARKS, source_panel
from minivllm.stepper.screen import MIN_COLUMNS, MIN_ROWS, Layout, fit, wrap
from minivllm.timeline import theme
from minivllm.tracing.catalogue import SPANS

KEYS = "n next step  0…9 e c step of that process  a all  r runs on  g go, all run on  s stop again  ? help  q quit"
KEYS_SHORT = "n next  0…9 e c that process  a all  r g run on  s stop  ? help  q quit"
_FAINT = Style(color=theme.FAINT)
_ERROR = Style(color=theme.ERROR, bold=True)


def picture(
    server: Server,
    marked: Peer | None,
    encoding: str,
    columns: int,
    rows: int,
    message: str = "",
    output: str = "",
    keys: bool = True,
) -> list[Text]:
    """Exactly `rows` lines of at most `columns` cells.

    Args:
        message: shown in the last line instead of the keys.
        output: the last line that the run has printed.
        keys: whether there is a last line for keys and messages.
    """
    if columns < MIN_COLUMNS or rows < MIN_ROWS:
        return fit(
            [Text(f"{columns}x{rows} is too small: {MIN_COLUMNS}x{MIN_ROWS} at least")],
            columns,
            rows,
            encoding,
        )
    at = marked.at if marked is not None else None
    below = [part for line in _explanation(marked, at) for part in wrap(line, columns)]
    if output:
        below.append(Text.assemble(("the run says ", _FAINT), output))
    layout = Layout(columns, rows - (1 if keys else 0), len(below))
    left = _processes(server, marked, encoding, layout.left_columns, layout.body_rows)
    right = source_panel(at.place, layout.right_columns, layout.body_rows) if at is not None else []
    lines = fit(
        layout.put_together(_headline(server, marked), left, right, below, encoding),
        columns,
        rows - (1 if keys else 0),
        encoding,
    )
    if keys:
        text = message or (KEYS if len(KEYS) <= columns else KEYS_SHORT)
        lines += fit([Text(text, Style(reverse=True) if message else _FAINT)], columns, 1, encoding)
    return lines


def _headline(server: Server, marked: Peer | None) -> Text:
    alive = [peer for peer in server.peers if not peer.ended]
    stopped = [peer for peer in alive if peer.halts]
    text = Text.assemble(("live", "bold"), f"  {len(stopped)} of {len(alive)} processes stopped")
    if marked is not None and (at := marked.at) is not None:
        verb = "before" if marked.halts else "in"
        text.append("   ")
        text.append(marked.name, f"{theme.color(marked.slot)} bold")
        text.append(f" {verb} {at.span}")
    return text


def _processes(server: Server, marked: Peer | None, encoding: str, columns: int, rows: int) -> list[Text]:
    for lines_each in (3, 2, 1, 0):
        lines = [
            line
            for peer in server.in_order
            for line in _process(server, peer, peer is marked, encoding, columns, lines_each)
        ]
        if len(lines) <= rows:
            break
    return lines[:rows]


def _process(
    server: Server, peer: Peer, is_marked: bool, encoding: str, columns: int, more_lines: int
) -> list[Text]:
    now = status(server, peer)
    mark = MARKS[now.kind][0 if theme.glyphs_for(encoding) is theme.UNICODE else 1]
    is_dead = now.kind == "dead"
    style = Style(color=theme.color(peer.slot), bold=True, reverse=is_marked)
    first = Text.assemble((mark + " ", _ERROR if is_dead else ""), (peer.name, style), " ")
    if not more_lines:
        first.append(now.text, _ERROR if is_dead else Style())
        return [first]
    first.append(f"pid {peer.pid}", _FAINT)
    if (at := peer.at) is not None and not peer.ended:
        first.append(f"  {since(at)}", _FAINT)
    if peer.free and not peer.ended:
        first.append("  runs on", _FAINT)
    what = Text("    " + "; ".join(filter(None, (now.text, now.note))))
    if is_dead:
        what.stylize(_ERROR)
    lines = wrap(what, columns)
    if len(lines) > more_lines:
        lines = lines[:more_lines]
        lines[-1].truncate(columns - 1, overflow="crop")
        lines[-1].append("…")
    return [first, *lines]


def _explanation(marked: Peer | None, at: Halt | None) -> list[Text]:
    if marked is None or at is None:
        return []
    lines = []
    spec = SPANS.get(at.span)
    if spec is not None:
        lines.append(Text.assemble((at.span, "bold"), f"  {spec.what}"))
    if at.around:
        lines.append(Text.assemble(("within ", _FAINT), " > ".join(at.around)))
    if at.attributes:
        values = "  ".join(f"{key}={value}" for key, value in at.attributes.items())
        lines.append(Text(values, _FAINT))
    if spec is not None:
        lines.append(
            Text.assemble(
                ("articles ", _FAINT),
                ", ".join(spec.articles) or "no section",
                ("  vLLM 0.25.1 ", _FAINT),
                spec.vllm or "no counterpart",
            )
        )
    return lines
