"""MkDocs hook: two languages on one site, where mkdocs-static-i18n leaves something to decide.

A page with a `.zh.md` beside it is in both languages. All others (reference, API, guides, measurements) are in English and
are built once; Chinese pages and their navigation link to them. Both languages have the same anchors on a page, and
each has a search index of its own: the Chinese one knows the Chinese pages and those that are in English only.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jieba
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

SUFFIX = ".zh.md"
NAMES = {"en": "English", "zh": "简体中文"}
# Words are separated by white space and punctuation of either kind; the search plugin puts U+200B between Chinese words.
SEPARATOR = {
    "en": r"[\s\u200b\-]+",
    "zh": r"[\s\u200b\u3000\-,.:;!?()\[\]\"“”、。，．：；？！（）《》…—→·]+",
}

# The pages of the English build, which comes first, by source path.
_english: dict[str, File] = {}

_FENCE = re.compile(r"^ *(```+)")
_HEADING = re.compile(r"^#{1,6} .*")


def language(page: Page) -> str:
    return "zh" if page.file.src_uri.endswith(SUFFIX) else "en"


def headings(markdown: str) -> Iterator[int]:
    """Numbers of the lines that are headings, those in code left out."""
    fence = ""
    for number, line in enumerate(markdown.split("\n")):
        if found := _FENCE.match(line):
            if not fence:
                fence = found[1]
            elif found[1] == fence:
                fence = ""
        elif not fence and _HEADING.match(line):
            yield number


class EnglishOnly(File):
    """A page that is built with the English ones; here it is something to link to."""

    def __init__(self, english: File) -> None:
        super().__init__(
            english.src_uri, None, english.dest_dir, english.use_directory_urls, dest_uri=english.dest_uri
        )

    def is_documentation_page(self) -> bool:
        return False

    def copy_file(self, dirty: bool = False) -> None:
        pass


def _building(config: MkDocsConfig) -> str:
    return config.plugins["i18n"].current_language or "en"  # type: ignore[attr-defined]


@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """No API page is built in Chinese; an empty inventory would replace the one of the English build."""
    config.plugins["mkdocstrings"].config.enabled = _building(config) == "en"  # type: ignore[attr-defined]
    jieba.setLogLevel(logging.WARNING)
    return config


@event_priority(-300)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """After the plugin has chosen the files of a language, and the generated pages have been added."""
    if _building(config) == "en":
        _english.update({file.src_uri: file for file in files.documentation_pages()})
    else:
        for file in files.documentation_pages():
            if not file.src_uri.endswith(SUFFIX):
                files.remove(file)
                files.append(EnglishOnly(_english[file.src_uri]))
    # A site map needs the site's address, which a site that is read from anywhere does not have.
    config.plugins["i18n"].i18n_files_per_language = {}  # type: ignore[attr-defined]
    return files


@event_priority(-300)
def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Pages in English only have the titles and anchors that they got when they were built."""
    for page in nav.pages:
        if isinstance(page.file, EnglishOnly):
            english = _english[page.file.src_uri].page
            assert english is not None
            page.title = page.title or english.title
            page.present_anchor_ids = english.present_anchor_ids
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give Chinese headings the anchors of the English ones, so that a link to a section is right in both languages."""
    if language(page) == "en":
        return markdown
    english = _english[page.file.src_uri.removesuffix(SUFFIX) + ".md"].page
    assert english is not None
    anchors = [link.id for link in _flat(english.toc)]
    lines = markdown.split("\n")
    numbers = list(headings(markdown))
    if len(anchors) == len(numbers):  # else a translation is behind, which is for the test to say
        for number, anchor in zip(numbers, anchors, strict=True):
            lines[number] += f" {{ #{anchor} }}"
    return "\n".join(lines)


def _flat(links: Any) -> Iterator[AnchorLink]:
    for link in links:
        yield link
        yield from _flat(link.children)


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> None:
    """The language switcher leads to the same page, or to the home page where there is no translation."""
    stem = page.file.src_uri.removesuffix(SUFFIX).removesuffix(".md")
    translated = (Path(config.docs_dir) / f"{stem}{SUFFIX}").exists()
    links = {"en": f"{stem}.html", "zh": f"zh/{stem if translated else 'index'}.html"}
    config.extra["alternate"] = [
        {"lang": lang, "name": name, "link": links[lang]} for lang, name in NAMES.items()
    ]


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    # The theme's script asks for a site map beside the target of each of these, and there is none.
    output = re.sub(r'<link rel="?alternate"? [^>]*hreflang[^>]*>', "", output)
    if language(page) == "zh":
        # Where the script looks for the search index, and what the addresses in it are relative to.
        output, count = re.subn(
            r'(<script id="?__config"?.*?"base": ?")([^"]*)"',
            lambda found: f'{found[1]}{_up_to_language(found[2])}"',
            output,
        )
        assert count == 1, f"{page.file.src_uri}: the theme's configuration has another form now"
    return output


def _up_to_language(base: str) -> str:
    """From the way up to the site's root to the way up to zh/."""
    return base.removesuffix("..").rstrip("/") or "."


@event_priority(-300)
def on_post_build(config: MkDocsConfig) -> None:
    """Split the search index by language, after the plugin has put both builds into one."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    of: dict[str, list[dict[str, Any]]] = {"en": [], "zh": []}
    for entry in index["docs"]:
        of["zh" if entry["location"].startswith("zh/") else "en"].append(entry)
    if not of["zh"]:
        return
    pages = {entry["location"].partition("#")[0] for entry in of["zh"]}
    chinese = [{**entry, "location": entry["location"].removeprefix("zh/")} for entry in of["zh"]]
    chinese += [
        {**entry, "location": f"../{entry['location']}"}
        for entry in of["en"]
        if f"zh/{entry['location'].partition('#')[0]}" not in pages
    ]
    for target, lang, docs in (
        (path, "en", of["en"]),
        (path.parents[1] / "zh/search" / path.name, "zh", chinese),
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The theme has no word forms of Chinese; words of both languages go through the English ones.
        settings = {**index["config"], "lang": ["en"], "separator": SEPARATOR[lang]}
        text = json.dumps({"config": settings, "docs": docs}, ensure_ascii=False, separators=(",", ":"))
        target.write_text(text, encoding="utf-8")
