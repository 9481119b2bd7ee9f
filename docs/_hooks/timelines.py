"""Timelines on a page, drawn from a recorded run at each build.

A block

    ```timeline
    run: tp2
    view: rpc
    focus: 7
    ```

becomes a picture of that view of the run in docs/runs/. Keys: run, view, and optionally focus, rank, from, to, min
(the options of `minivllm timeline`). A run or view that does not exist fails the build.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import languages
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "docs" / "runs"
_BLOCK = re.compile(r"^```timeline\n(?P<body>.*?)^```$", re.M | re.S)
_KEYS = {"run", "view", "focus", "rank", "from", "to", "min"}


def expand(markdown: str, page: Page) -> str:
    """Replace every timeline block by its picture and the command that shows the same in a terminal."""

    def block(match: re.Match[str]) -> str:
        settings = dict(line.split(": ", 1) for line in match["body"].strip().splitlines())
        if not {"run", "view"} <= set(settings) <= _KEYS:
            raise PluginError(
                f"{page.file.src_uri}: a timeline needs run and view, and knows {sorted(_KEYS)}"
            )
        if not (RUNS / settings["run"]).is_dir():
            raise PluginError(
                f"{page.file.src_uri}: docs/runs/{settings['run']} does not exist (make docs-assets)"
            )
        return f'<div class="timeline">{picture(settings)}</div>\n\n{caption(settings, languages.language(page))}'

    return _BLOCK.sub(block, markdown)


def picture(settings: dict[str, str]) -> str:
    return picture_of(RUNS / settings["run"], settings)


def picture_of(trace: Path, settings: dict[str, str]) -> str:
    """The SVG of one view, on one line, so that Markdown leaves it alone."""
    return _drawn(trace, tuple(settings.items()))


@functools.cache  # a page in two languages shows the same picture twice
def _drawn(trace: Path, items: tuple[tuple[str, str], ...]) -> str:
    settings = dict(items)
    from minivllm.timeline import build_views
    from minivllm.timeline.export import views_to_svg
    from minivllm.timeline.run import Options
    from minivllm.trace_store import TraceStore

    options = Options(
        focus=settings.get("focus"),
        ranks=frozenset(int(rank) for rank in settings["rank"].split(",")) if "rank" in settings else None,
        from_ns=_ns(settings.get("from")),
        to_ns=_ns(settings.get("to")),
        min_duration_ns=_ns(settings.get("min")) or 0,
    )
    store = TraceStore.open(trace)
    return views_to_svg(build_views(store, [settings["view"]], options), 104).replace("\n", "")


CAPTIONS = {
    "en": "A recorded run; the same in your terminal: `{command}`",
    "zh": "一次录制下来的运行；在终端里看同样的内容：`{command}`",
}


def caption(settings: dict[str, str], language: str) -> str:
    names = {"from": "--from", "to": "--to", "min": "--min-duration"}
    more = "".join(
        f" {names.get(key, '--' + key)} {value}"
        for key, value in settings.items()
        if key not in ("run", "view")
    )
    command = f"minivllm timeline docs/runs/{settings['run']} --view {settings['view']}{more}"
    return f"<small>{CAPTIONS[language].format(command=command)}</small>\n"


def _ns(text: str | None) -> int | None:
    if text is None:
        return None
    number, unit = re.fullmatch(r"([\d.]+)(s|ms|us)", text).groups()  # type: ignore[union-attr]
    return round(float(number) * {"s": 1e9, "ms": 1e6, "us": 1e3}[unit])
