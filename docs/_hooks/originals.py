"""The page "Where the original breaks", and parts of it in chapters, from docs/originals.json.

In a chapter, a block

    ```original
    7
    ```

becomes what the scene with this number printed on vLLM and on minivllm.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import marks
import symbols
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "originals.json"
PAGE = "reference/where-the-original-breaks.md"
COLUMNS = 88
_BLOCK = re.compile(r"^```original\n(?P<number>\d+)\n```$", re.M)


@dataclass(frozen=True)
class Obligation:
    """One row of the data.

    Attributes:
        scene: what was done.
        vllm, minivllm: what happens in `short`, `what` and why, and what was `printed`; vLLM's `evidence` (measured, or
            read from the code), `where` it is and what `later` versions do; minivllm's `source` (file:definition) and
            `tests`.
    """

    number: int
    title: str
    chapter: int
    scene: str
    vllm: dict[str, Any]
    minivllm: dict[str, Any]

    @property
    def anchor(self) -> str:
        return f"obligation-{self.number}"


def data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return loaded


def obligations() -> list[Obligation]:
    return [Obligation(**row) for row in data()["obligations"]]


def page() -> str:
    meta = data()
    rows = obligations()
    lines = [
        "# Where the original breaks",
        "",
        "Twenty-one things that one may expect of an executor over several processes, each of which has hurt users of vLLM or stands in its",
        "code waiting to: what vLLM 0.25.1 does, what minivllm does, and the test that keeps it so.",
        "",
        "This is no verdict on vLLM, which runs more models on more devices than anything else, and whose executor is used by people who",
        "seldom meet these corners. It is what one learns most from: each is a few lines, most are sensible, and they break where two of",
        "them meet.",
        "",
        "## How it was measured",
        "",
        "* **The same scenes on both**, `tests/originals/scenes.py`: real executors with two real worker processes, which have no model; in the",
        "  last one the whole engine, with the bundled model.",
        "  `python tests/originals/scenes.py minivllm 7` shows one; with `vllm` instead, in an environment that has vLLM 0.25.1, it shows",
        "  the same on the real one. A CPU is enough. What is printed below is what came out.",
        f"* **Versions:** {meta['versions']['vllm']}; {meta['versions']['minivllm']}.",
        f"* **Machine:** {meta['machine']}; other work ran on it at the same time. Recorded {meta['recorded']}.",
        "* Each engine uses its default start method: vLLM's library fork, minivllm spawn.",
        "* All scenes were run on both engines. What is said about 0.33.0 was not run for this page: it comes from its source and from an earlier",
        "  run of such scenes; and where a sentence says that something was not run, it was read from the code.",
        "",
        "| | obligation | vLLM 0.25.1 | minivllm | chapter |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.number} | [{row.title}](#{row.anchor}) | {row.vllm['short']} | {row.minivllm['short']} "
            f"| {marks.chapter(row.chapter, '../tour/', PAGE, '{}')} |"
        )
    for row in rows:
        lines += ["", f"## {row.number} {row.title} {{ #{row.anchor} }}", "", row.scene, "", *_both(row)]
        lines += [
            "**In vLLM** "
            + f"({', '.join(_where(place) for place in row.vllm['where'])}): {row.vllm['what']} *{row.vllm['later']}*",
            "",
            f"**Here** ({', '.join(_source(place) for place in row.minivllm['source'])}): {row.minivllm['what']}",
            "",
            "Kept by " + ", ".join(f"`{test}`" for test in row.minivllm["tests"]) + ".",
        ]
    return "\n".join(lines) + "\n"


def _both(row: Obligation) -> list[str]:
    if row.vllm["evidence"] == "read":
        left = ["*Read from the code, not run.*", ""]
    else:
        left = _printed("vLLM 0.25.1", row.vllm["printed"])
    return [*left, *_printed("minivllm", row.minivllm["printed"])]


def _printed(title: str, text: str) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_long_words=False) or [""]
    return [f'```text title="{title}"', *lines, "```", ""]


def _where(place: str) -> str:
    return f"`{place}`"


def _source(place: str) -> str:
    path, _, name = place.partition(":")
    if symbols.code_of(path, name, with_docstring=True) is None:
        raise PluginError(f"{DATA.name}: {path} defines no {name}")
    module = path.removesuffix(".py").replace("/", ".")
    return f"[`{path.removeprefix('minivllm/')}`, `{name}`](api/{module}.md)"


def expand(markdown: str, page: Page) -> str:
    """Replace every block that names an obligation by what both engines printed."""
    rows = {row.number: row for row in obligations()}

    def block(match: re.Match[str]) -> str:
        number = int(match["number"])
        if number not in rows:
            raise PluginError(f"{page.file.src_uri}: there is no obligation {number}")
        return "\n".join(_both(rows[number])).rstrip("\n")

    return _BLOCK.sub(block, markdown)
