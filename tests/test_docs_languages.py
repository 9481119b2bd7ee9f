"""Both languages of a page say the same: the same sections, snippets, commands, recorded runs, names and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).resolve().parents[1] / "docs"
SUFFIX = ".zh.md"
# What is in both languages; the reference, the guides and the measurements are in English only.
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in (DOCS / "index.md", DOCS / "quickstart.md", *(DOCS / "tour").glob("*.md"))
    if not path.name.endswith(SUFFIX)
)

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)(?P=fence)$", re.M | re.S
)
_COMMENT = re.compile(r"(?:^|\s+)#(?![!<]).*$", re.M)


def translation(page: str) -> Path:
    return DOCS / f"{page.removesuffix('.md')}{SUFFIX}"


def read(path: Path) -> tuple[dict[str, object], str]:
    """Front matter without the title, and the text after it."""
    text = path.read_text(encoding="utf-8")
    if not text.startswith("---\n"):
        return {}, text
    _, front, text = text.split("---\n", 2)
    meta = yaml.safe_load(front)
    meta.pop("title", None)
    return meta, text


def prose(text: str) -> str:
    return _FENCE.sub("", text)


def headings(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(text), re.M)]


def blocks(text: str) -> list[tuple[str, str]]:
    """Fenced blocks: snippets, commands, timelines, steps; shell comments, which are translated, left out."""
    return [
        (found["info"], _COMMENT.sub("", found["body"]) if found["info"] == "sh" else found["body"])
        for found in _FENCE.finditer(text)
    ]


def includes(text: str) -> list[str]:
    return re.findall(r'--8<-- "([^"]+)"', text)


def notes(text: str) -> list[tuple[str, str]]:
    """Admonitions, by depth and kind."""
    return re.findall(r"^( *)(?:!!!|\?\?\?\+?|===) *(\w*)", prose(text), re.M)


def names(text: str) -> set[str]:
    """What stands in `code`: names, files and lines, settings, and short commands."""
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", prose(text))}


def links(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)\s]+)\)", prose(text)))


def references(text: str) -> set[str]:
    """Lines of vLLM's files by the page's short names, ME:1-2."""
    return set(re.findall(r"\b[A-Z]{2}:\d[\d, -]*\d", re.sub(r"\s*\n\s*", " ", prose(text))))


def rows(text: str) -> list[int]:
    """The cells of each row of a table."""
    return [line.count("|") for line in prose(text).splitlines() if line.startswith("|")]


def items(text: str) -> int:
    """Points of lists. A line of a paragraph may begin with "1." by the way its text is broken."""
    count, inside, after_blank = 0, False, True
    for line in prose(text).splitlines():
        if re.match(r" *(?:\*|\d+\.) ", line) and (inside or after_blank):
            count, inside = count + 1, True
        elif not line.startswith(" ") and after_blank:
            inside = False
        after_blank = not line.strip()
    return count


def test_home_quick_start_and_tour_are_translated() -> None:
    assert not [page for page in PAGES if not translation(page).is_file()]


def test_no_translation_without_its_page() -> None:
    translated = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob(f"*{SUFFIX}")}
    assert translated <= {translation(page).relative_to(DOCS).as_posix() for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_say_the_same(page: str) -> None:
    if not translation(page).is_file():
        pytest.skip("not translated, which another test reports")
    english_meta, english = read(DOCS / page)
    chinese_meta, chinese = read(translation(page))
    assert chinese_meta == english_meta
    for what in (headings, blocks, includes, notes, names, links, references, rows, items):
        assert what(chinese) == what(english), f"{translation(page).name} has other {what.__name__}"
