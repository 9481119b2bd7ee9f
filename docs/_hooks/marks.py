"""Short links on the pages that consist of them: `@9` is the tour's ninth chapter, `@mq.enqueue` a step of the catalogue.

A chapter or a step that does not exist fails the build.
"""

from __future__ import annotations

import re

import coverage
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.structure.pages import Page

PAGES = ("reference/errata.md", "reference/glossary.md")
LABEL = "chapter&nbsp;{}"
_MARK = re.compile(r"(?<![\w`/])@(\d+|[a-z_]+(?:\.[a-z_]+)?)")


def expand(markdown: str, page: Page) -> str:
    """Replace the marks on the pages that may have them."""
    if page.file.src_uri not in PAGES:
        return markdown
    return resolve(markdown, page.file)


def resolve(markdown: str, file: File) -> str:
    from minivllm.tracing import catalogue

    def link(match: re.Match[str]) -> str:
        mark = match[1]
        if mark.isdigit():
            # In a column of chapters the number is enough.
            label = "{}" if markdown[: match.start()].endswith("| ") else LABEL
            return chapter(int(mark), "../tour/", file.src_uri, label)
        if mark not in catalogue.SPANS:
            raise PluginError(f"{file.src_uri}: there is no step {mark}")
        return f"[`{mark}`](spans.md#{mark})"

    return _MARK.sub(link, markdown)


def chapter(number: int, tour: str, page: str, label: str = LABEL) -> str:
    """A link to a chapter, or its number where it has not been written yet."""
    text = label.format(number)
    if number not in coverage.CHAPTERS:
        raise PluginError(f"{page}: the tour has no chapter {number}")
    for one in coverage.chapters():
        if one.number == number and not one.path.name.endswith(".zh.md"):
            return f"[{text}]({tour}{one.path.name})"
    return text
