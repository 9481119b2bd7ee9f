"""MkDocs hook: links to files of the repository lead, on the site, to the pages that are generated from them.

So a page can be read in the repository as well, where there are no such pages.
"""

from __future__ import annotations

import re

from mkdocs.structure.pages import Page

# The page on what stands in a file or directory.
PAGES = {
    "minivllm": "reference/map.md",
    "minivllm/cli": "reference/commands.md",
    "minivllm/envs.py": "reference/environment.md",
    "minivllm/tracing/catalogue_rows.py": "reference/spans.md",
}
_LINK = re.compile(r"\]\(((?:\.\./)*)\.\./(minivllm[\w/.]*)\)")


def expand(markdown: str, page: Page) -> str:
    return _LINK.sub(lambda link: f"]({link[1]}{PAGES[link[2]]})", markdown)
