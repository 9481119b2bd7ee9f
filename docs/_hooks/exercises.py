"""The page of exercises, from what `minivllm learn` knows about them."""

from __future__ import annotations

import re
import textwrap

import languages
import marks
from mkdocs.structure.pages import Page

SOURCE = "exercises.md"


def page() -> str:
    from minivllm.learn.exercise import EXERCISES

    lines = [
        "# Exercises",
        "",
        "Small programs with one defect each, of the kind that this layer has, and each about a page long. You get the",
        "file, find what is wrong, and change it until the check finds nothing broken any more. The check runs your code with real",
        "processes, names the invariant that is broken and how it saw that, and ends in any case, also when your code does not.",
        "",
        "```sh",
        "minivllm learn list                # the exercises, and which are started and passed here",
        "minivllm learn start one-slot      # writes one_slot.py, and says what to do",
        "minivllm learn check one-slot      # tries the invariants; exit code 1 while one is broken",
        "minivllm learn hint one-slot       # the next of three hints",
        "minivllm learn solution one-slot   # prints a solution",
        "```",
        "",
        "Read the chapter first, or do not, and come back to it. Each exercise can be done without the others; they become",
        "harder towards the end.",
        "",
        "| | exercise | what is wrong | chapter | minutes |",
        "|---|---|---|---|---|",
    ]
    for exercise in EXERCISES:
        about = exercise.about
        lines.append(
            f"| {exercise.number} | [`{exercise.name}`](#{exercise.name}) | {about.title} "
            f"| {marks.chapter(about.chapter, 'tour/', SOURCE, '{}')} | {about.minutes} |"
        )
    for exercise in EXERCISES:
        about = exercise.about
        body = exercise.task.split("\n\n")[1:]
        origin = body.pop()
        lines += [
            "",
            f"## {exercise.number} {exercise.name} {{ #{exercise.name} }}",
            "",
            f"**{about.title}** ({marks.chapter(about.chapter, 'tour/', SOURCE)}, {about.minutes} minutes)",
            "",
            *[_paragraph(part) for part in body],
            "It holds when:",
            "",
            *[f"{number}. {text}" for number, text in enumerate(exercise.invariants(), 1)],
            "",
            f"*{_origin(origin)}*",
            "",
            "```sh",
            f"minivllm learn start {exercise.name}",
            "```",
        ]
        for number, hint in enumerate(about.hints, 1):
            lines += ["", f'??? tip "Hint {number} of {len(about.hints)}"', "", textwrap.indent(hint, "    ")]
    return "\n".join(lines) + "\n"


_TO_CHAPTER = {
    "en": "**Exercises on this chapter:** {}. `minivllm learn start NAME` writes the file.",
    "zh": "**本章的练习：** {}。`minivllm learn start NAME` 会写出要修改的文件。",
}


def expand(markdown: str, page: Page) -> str:
    """A chapter ends with links to its exercises."""
    from minivllm.learn.exercise import EXERCISES

    number = re.match(r"tour/(\d\d)-", page.file.src_uri)
    mine = [exercise for exercise in EXERCISES if number and exercise.about.chapter == int(number[1])]
    if not mine:
        return markdown
    links = ", ".join(f"[{exercise.name}](../{SOURCE}#{exercise.name})" for exercise in mine)
    return f"{markdown.rstrip()}\n\n{_TO_CHAPTER[languages.language(page)].format(links)}\n"


def _paragraph(text: str) -> str:
    """As it stands, or, where it is indented, as code."""
    return f"{text}\n" if not text.startswith("    ") else f"```text\n{textwrap.dedent(text)}\n```\n"


def _origin(text: str) -> str:
    """The docstring's lines on vLLM and the articles, as a sentence."""
    vllm, articles = re.fullmatch(r"vLLM 0\.25\.1: (.*)\nArticles: (.*)", text, re.S).groups()  # type: ignore[union-attr]
    where = re.sub(
        r"vllm/\S+\.py", lambda match: f"`{match[0].removeprefix('vllm/')}`", " ".join(vllm.split())
    )
    return f"In vLLM 0.25.1: {where}. In the articles: {articles}."
