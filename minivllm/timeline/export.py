"""Views to the terminal, to SVG, to one self-contained HTML page and to JSON.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.segment import Segment

from minivllm.timeline import theme
from minivllm.timeline.render import Timeline
from minivllm.timeline.svg import FONT_FAMILY, to_svg
from minivllm.timeline.view import View

DEFAULT_PICTURE_WIDTH = 110


def print_views(console: Console, views: Sequence[View]) -> None:
    """Print views one below the other, in what the console's encoding and terminal can show."""
    glyphs = theme.glyphs_for(console.encoding)
    for i, view in enumerate(views):
        if i:
            console.print()
        console.print(Timeline(view, glyphs, styled=console.is_terminal))


def _lines(view: View, width: int) -> list[list[Segment]]:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
    )
    options = console.options.update(width=width)
    return console.render_lines(Timeline(view, exact=True), options, pad=False)


def views_to_svg(views: Sequence[View], width: int = DEFAULT_PICTURE_WIDTH) -> str:
    """All views in one picture, `width` cells wide."""
    lines: list[list[Segment]] = []
    for view in views:
        if lines:
            lines += [[], []]
        lines += _lines(view, width)
    title = " / ".join(view.title for view in views)
    return to_svg(lines, width, title, " ".join(s for view in views for s in view.explanation))


def views_to_html(views: Sequence[View], title: str, width: int = DEFAULT_PICTURE_WIDTH) -> str:
    """One page without any external reference: a picture and its sentences per view."""
    sections = []
    for view in views:
        picture = to_svg(_lines(_without_words(view), width), width, view.title, " ".join(view.explanation))
        sentences = "".join(f"<li>{escape(s)}</li>" for s in view.explanation)
        missing = "".join(f'<li class="missing">{escape(s)}</li>' for s in view.missing)
        sections.append(
            f'<section id="{escape(view.name)}"><h2>{escape(view.title)}</h2>'
            f"{picture if view.rows else ''}<ul>{sentences}{missing}</ul></section>"
        )
    return _PAGE.format(title=escape(title), font=FONT_FAMILY, sections="\n".join(sections))


def views_to_json(views: Sequence[View], run: dict[str, object]) -> str:
    """The data behind the pictures; times in nanoseconds since the start of the run."""
    return json.dumps({"run": run, "views": [view.to_json() for view in views]}, indent=1, ensure_ascii=False)


def _without_words(view: View) -> View:
    """The chart alone: on a page, title and sentences are text."""
    return View(
        name=view.name,
        title="",
        start_ns=view.start_ns,
        end_ns=view.end_ns,
        zero_ns=view.zero_ns,
        rows=view.rows,
        shorten=view.shorten,
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; font-family: {font}; }}
h2 {{ margin-top: 2.5rem; font-size: 1.15rem; }}
.missing {{ color: #c93c37; }}
</style>
</head>
<body>
<h1>{title}</h1>
{sections}
</body>
</html>
"""
