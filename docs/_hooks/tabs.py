"""The real output of a walkthrough on its page, in a tab for the CPU and one for GPUs.

A block

    ```walkthrough
    03_spawn
    ```

becomes what the script printed when it was recorded, docs/outputs/03_spawn.json. A script that was never recorded fails the
build; `make docs-assets ARGS=03_spawn` records it.

The GPU tab says that there is nothing until something is: `make docs-assets ARGS="--device cuda"` on a GPU host leaves output and
trace in minivllm/assets/traces/<gpu>/03_spawn/. With a second line `gpu: graphs init`, the tab also shows the view `init` of the
trace `graphs` there, which the GPU tests record (tests/gpu/run.sh).
"""

from __future__ import annotations

import re

import outputs
import timelines
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page
from outputs import OUTPUTS, ROOT, Output

GPU_TRACES = ROOT / "minivllm" / "assets" / "traces"
_BLOCK = re.compile(r"^```walkthrough\n(?P<name>\w+)\n(?:gpu: (?P<trace>[\w-]+) (?P<view>\w+)\n)?```$", re.M)
# What Markdown makes of the line by which `expand` holds a picture's place.
_PLACE = re.compile(r"<p>picture-of (?P<what>output|view) (?P<path>\S+)(?: (?P<view>\w+))?</p>")

TEXTS = {
    "en": {
        "none": "No run on a GPU has been recorded yet.",
        "where": "Recorded on {machine}.",
        "measured": " What is in colour differs from run to run.",
    },
    "zh": {
        "none": "还没有在 GPU 上录制的运行。",
        "where": "录制环境：{machine}。",
        "measured": "彩色的内容每次运行都不同。",
    },
}


def expand(markdown: str, page: Page) -> str:
    """Replace every walkthrough block by two tabs with places for pictures, which `fill` puts in."""
    texts = TEXTS["zh" if page.file.src_uri.endswith(".zh.md") else "en"]

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        path = OUTPUTS / f"{name}.json"
        if not path.is_file():
            raise PluginError(
                f"{page.file.src_uri}: {path.relative_to(ROOT)} does not exist (make docs-assets ARGS={name})"
            )
        gpu = []
        for directory in sorted(GPU_TRACES.glob("*/")):
            if (directory / name / "output.json").is_file():
                gpu += _shown(directory / name / "output.json", texts)
            if match["trace"] and (directory / match["trace"]).is_dir():
                place = (directory / match["trace"]).relative_to(ROOT)
                gpu += [f"picture-of view {place} {match['view']}", f"<small>{directory.name}</small>"]
        return _tab("CPU", _shown(path, texts)) + _tab("GPU", gpu or [texts["none"]])

    return _BLOCK.sub(block, markdown)


def _shown(path: outputs.Path, texts: dict[str, str]) -> list[str]:
    output = Output.read(path)
    caption = f"`{output.command}`<br>{texts['where'].format(machine=output.machine)}"
    if output.measured:
        caption += texts["measured"]
    return [f"picture-of output {path.relative_to(ROOT)}", f"<small>{caption}</small>"]


def _tab(title: str, paragraphs: list[str]) -> str:
    return f'=== "{title}"\n\n' + "".join(f"    {paragraph}\n\n" for paragraph in paragraphs)


def fill(html: str) -> str:
    """Put the pictures where `expand` has left their places."""

    def picture(match: re.Match[str]) -> str:
        path = ROOT / match["path"]
        if match["what"] == "view":
            return f'<div class="timeline">{timelines.picture_of(path, {"view": match["view"]})}</div>'
        unique_id = "output-" + re.sub(r"\W", "-", match["path"])
        return f'<div class="terminal" tabindex="0">{outputs.svg(Output.read(path), unique_id)}</div>'

    return _PLACE.sub(picture, html)
