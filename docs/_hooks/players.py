"""A recorded run to step through on a page: the steps of `minivllm step` as data, made at each build, and a player for them.

A block

    ```player
    run: tp2
    level: lifecycle
    ```

becomes a player (docs/assets/player.js). `from` and `count` choose a part of the run, `level` hides steps of higher levels.
A run or a step that does not exist fails the build. The data is a script and not a JSON file, since a page that was opened
from the file system may not fetch anything.
"""

from __future__ import annotations

import functools
import html
import json
import re

import languages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from timelines import RUNS

_BLOCK = re.compile(r"^```player\n(?P<body>.*?)^```$", re.M | re.S)
_KEYS = {"run", "level", "from", "count"}
CAPTIONS = {
    "en": "A recorded run, step by step; the same in your terminal: `{command}`",
    "zh": "逐步回放一次录制下来的运行；在终端里看同样的内容：`{command}`",
}
WITHOUT_SCRIPT = {
    "en": "This player needs JavaScript.",
    "zh": "此播放器需要 JavaScript。",
}


def files(config: MkDocsConfig, pages: Files) -> list[File]:
    """The data of every player on these pages, one file for each selection of steps."""
    wanted = {}
    for file in pages.documentation_pages():
        for match in _BLOCK.finditer(file.content_string):
            settings = _settings(match["body"], file.src_uri)
            wanted[_name(settings)] = settings
    return [
        File.generated(
            config,
            path,
            content=f"(window.minivllmRuns ??= {{}})[{json.dumps(path)}] = {_data(tuple(settings.items()))};\n",
        )
        for path, settings in wanted.items()
    ]


def expand(markdown: str, page: Page) -> str:
    """Replace every block by a player and the command that shows the same."""

    def block(match: re.Match[str]) -> str:
        settings = _settings(match["body"], page.file.src_uri)
        data = get_relative_url(_name(settings), page.url)
        player = get_relative_url("assets/player.js", page.url)
        language = languages.language(page)
        said = CAPTIONS[language].format(command=command(settings))
        return (
            f'<div class="player" data-player="{html.escape(_name(settings))}">{WITHOUT_SCRIPT[language]}</div>'
            f'<script defer src="{html.escape(data)}"></script><script defer src="{html.escape(player)}"></script>\n\n'
            f"<small>{said}</small>\n"
        )

    return _BLOCK.sub(block, markdown)


def command(settings: dict[str, str]) -> str:
    options = f" --level {settings['level']}" if "level" in settings else ""
    if "from" in settings:
        options += f" --at {settings['from']}"
    return f"minivllm step docs/runs/{settings['run']}{options}"


def _settings(body: str, where: str) -> dict[str, str]:
    settings = dict(line.split(": ", 1) for line in body.strip().splitlines())
    if "run" not in settings or not set(settings) <= _KEYS:
        raise PluginError(f"{where}: a player needs a run, and knows {sorted(_KEYS)}")
    if not (RUNS / settings["run"]).is_dir():
        raise PluginError(f"{where}: docs/runs/{settings['run']} does not exist (make docs-assets)")
    return settings


def _name(settings: dict[str, str]) -> str:
    parts = [settings[key] for key in ("run", "level", "from", "count") if key in settings]
    return f"assets/player/{re.sub(r'[^a-z0-9.-]+', '-', '-'.join(parts))}.js"


@functools.cache
def _data(items: tuple[tuple[str, str], ...]) -> str:
    from minivllm.stepper import Walk
    from minivllm.stepper.player import as_data
    from minivllm.stepper.positions import find_position
    from minivllm.trace_store import TraceStore
    from minivllm.tracing.catalogue import LEVEL_NAMES

    settings = dict(items)
    walk = Walk(TraceStore.open(RUNS / settings["run"]))
    walk.details = LEVEL_NAMES.index(settings.get("level", "message"))
    start = find_position(walk, settings["from"]) if "from" in settings else 0
    count = int(settings["count"]) if "count" in settings else None
    return json.dumps(as_data(walk, start, count), ensure_ascii=False, separators=(",", ":"))
