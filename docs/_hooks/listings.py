"""MkDocs hook: source listings of API pages stay out of the search index.

Search is for names and docstrings; with the listings in it, the index is more than twice as large, and every common name finds a
hundred functions that use it. Besides, the search plugin's parser takes a fifth of the build for them.
"""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LISTING = re.compile(r'<details class="mkdocstrings-source">.*?</details>', re.S)
_MARK = re.compile(r"<!-- listing (\d+) -->")

_taken: dict[str, list[str]] = {}


@event_priority(-100)
def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Take the listings out, after everybody who changes a page's content; the search plugin comes next."""
    listings = _taken[page.file.src_uri] = []

    def take(found: re.Match[str]) -> str:
        listings.append(found[0])
        return f"<!-- listing {len(listings) - 1} -->"

    return _LISTING.sub(take, html)


@event_priority(100)
def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Put them back, before everybody who changes a finished page."""
    listings = _taken.pop(page.file.src_uri, [])
    return _MARK.sub(lambda found: listings[int(found[1])], output) if listings else output
