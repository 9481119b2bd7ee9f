"""Steps of a recorded run on a page, as `minivllm step --print` prints them, made at each build.

A block

    ```steps
    run: slow-device
    at: failure
    ```

becomes the picture of that step; with `from` and `count` instead of `at` it becomes a sequence of steps. `level` hides
steps, `rows` is the height of a picture. A run or a step that does not exist fails the build.
"""

from __future__ import annotations

import re

import languages
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page
from timelines import RUNS

COLUMNS = 88
CAPTIONS = {
    "en": "A recorded run; the same: `{command}`",
    "zh": "一次录制下来的运行；看同样的内容：`{command}`",
}
_BLOCK = re.compile(r"^```steps\n(?P<body>.*?)^```$", re.M | re.S)
_KEYS = {"run", "at", "from", "count", "level", "rows"}


def expand(markdown: str, page: Page) -> str:
    """Replace every block of steps by their text and the command that prints the same."""

    def block(match: re.Match[str]) -> str:
        settings = dict(line.split(": ", 1) for line in match["body"].strip().splitlines())
        if "run" not in settings or not set(settings) <= _KEYS:
            raise PluginError(f"{page.file.src_uri}: steps need a run, and know {sorted(_KEYS)}")
        if not (RUNS / settings["run"]).is_dir():
            raise PluginError(
                f"{page.file.src_uri}: docs/runs/{settings['run']} does not exist (make docs-assets)"
            )
        text = "\n".join(line.rstrip() for line in lines(settings))
        said = CAPTIONS[languages.language(page)].format(command=command(settings))
        return f"```text\n{text}\n```\n\n<small>{said}</small>\n"

    return _BLOCK.sub(block, markdown)


def lines(settings: dict[str, str]) -> list[str]:
    from minivllm.stepper import Walk, plain
    from minivllm.stepper.positions import find_position
    from minivllm.stepper.screen import Screen
    from minivllm.trace_store import TraceStore
    from minivllm.tracing.catalogue import LEVEL_NAMES

    walk = Walk(TraceStore.open(RUNS / settings["run"]))
    walk.details = LEVEL_NAMES.index(settings.get("level", "message"))
    screen = Screen(walk, "utf-8")
    if "at" in settings:
        index = find_position(walk, settings["at"])
        found = plain.picture(screen, index, COLUMNS, int(settings.get("rows", "30")))
    else:
        index = find_position(walk, settings.get("from", "1"))
        found = list(plain.sequence(screen, index, int(settings.get("count", "5")), COLUMNS))
    return [line.plain for line in found]


def command(settings: dict[str, str]) -> str:
    options = "".join(
        f" --{key} {settings[key]}" for key in ("level", "at", "from", "count") if key in settings
    )
    return f"minivllm step docs/runs/{settings['run']} --print{options}"
