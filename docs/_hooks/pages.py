"""MkDocs hook: the pages that are generated from the code at each build.

Nothing that the code can say is written by hand: the span catalogue, the environment variables, the map to vLLM, the
deviations, the commands and the API pages come from the package, the measured pages from the files that the benchmarks
and the crash matrix leave in docs/.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import coverage
import exercises
import explorer
import languages
import marks
import originals
import players
import repository
import sequences
import source
import steps
import symbols
import tabs
import timelines
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = source.ROOT


def _cell(text: str) -> str:
    """One line of table text. Outside `code`, nothing in it is taken for Markdown: dunder names, brackets, tags."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    plain = re.compile(r"([_\[\]<>*])")
    return "`".join(part if index % 2 else plain.sub(r"\\\1", part) for index, part in enumerate(parts))


def _code(text: str) -> str:
    return f"`{text}`" if text else "–"


def _name(text: str) -> str:
    """A dotted name or path in code that may break after each part of it."""
    # An entity for the underscore, which would be emphasis otherwise.
    broken = re.sub(r"([./_ ])(?=\w)", r"\1<wbr>", text).replace("_", "&#95;")
    return f"<code>{broken}</code>" if text else "–"


def api_page(module: str) -> str:
    return f"reference/api/{module}.md"


def map_page() -> str:
    lines = [
        "---\nhide: [toc]\n---",
        "",
        "# Map to vLLM",
        "",
        "Room by room, from the module docstrings. Paths on the right are relative to vLLM 0.25.1; `v1/` is taken out on the left.",
        "A module that helps to teach and has no counterpart says so.",
    ]
    group = None
    for room in source.rooms():
        package = ".".join(room.module.split(".")[:2]) if "/" in room.path[len("minivllm/") :] else "minivllm"
        if package != group:
            group = package
            lines += [
                "",
                f"## {package}",
                "",
                "| module | in vLLM 0.25.1 | articles | what it is for |",
                "|---|---|---|---|",
            ]
        name = room.path.removeprefix("minivllm/")
        lines.append(
            f"| [`{name}`](api/{room.module}.md) | {_cell(room.vllm) or '–'} | {_cell(room.articles) or '–'} | {_cell(room.sentence)} |"
        )
    return "\n".join(lines) + "\n"


def differences_page() -> str:
    found = source.deviations()
    lines = [
        "---\nhide: [toc]\n---",
        "",
        "# Where minivllm differs",
        "",
        f"{len(found)} places where minivllm does something else than vLLM 0.25.1 on purpose. Each is a comment in the code that",
        f"starts with `{source.MARK}`; this page is made from them at each build.",
    ]
    group = ""
    for deviation in found:
        path = deviation.path.removeprefix("minivllm/")
        if path.split("/")[0] != group:
            group = path.split("/")[0]
            lines += ["", f"## {group}", "", "| where | what and why |", "|---|---|"]
        where = f"{_name(path)}, line {deviation.line}"
        if deviation.where:
            where = f"`{deviation.where}`<br><small>{where}</small>"
        text = _cell(deviation.text)
        lines.append(f"| {where} | {text[:1].upper()}{text[1:]} |")
    return "\n".join(lines) + "\n"


def environment_page() -> str:
    from minivllm import envs

    lines = [
        "---\nhide: [toc]\n---",
        "",
        "# Environment variables",
        "",
        "All variables that minivllm reads, from the table in `minivllm/envs.py`. Times are in seconds and sizes in bytes unless the",
        "text says otherwise. `minivllm doctor` prints the values in force. In workers and in the engine they are frozen once",
        "initialisation is over, so a change takes effect at the next start.",
        "",
        "| variable | default | what it does |",
        "|---|---|---|",
    ]
    for name, variable in envs.environment_variables.items():
        lines.append(f"| `{name}` | {_code(variable.default)} | {_cell(variable.help)} |")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    import argparse
    import os

    from minivllm.cli.main import make_parser

    os.environ["COLUMNS"] = "100"
    os.environ["NO_COLOR"] = "1"
    parser = make_parser()
    lines = [
        "# Commands",
        "",
        "What `minivllm` and each of its subcommands say with `--help`. Exit codes: 0 done, 1 the engine failed or something needed",
        "is missing, 2 bad input, 130 interrupted by Ctrl-C, 143 and 129 ended by SIGTERM and SIGHUP, 141 the reader of the output",
        "has gone. Errors are one line; `--traceback` shows where they come from.",
        "",
        "```text",
        parser.format_help().rstrip(),
        "```",
    ]
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, subparser in subparsers.choices.items():
        lines += ["", f"## minivllm {name}", "", "```text", subparser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def reference_index() -> str:
    return """# Reference

Most of it is made from the code at each build, so it says what the code does.

* [Span catalogue](spans.md): every step that a trace can show, where it runs, and where vLLM does the same.
* [Map to vLLM](map.md): module by module, in both directions.
* [Where minivllm differs](differences.md): what is done better on purpose, and why.
* [Where the original breaks](where-the-original-breaks.md): twenty-one scenes, what vLLM does in them and what minivllm does.
* [Errata of the articles](errata.md): claim by claim.
* [Glossary](glossary.md): the terms, each in two sentences.
* [Environment variables](environment.md): all of them.
* [Commands](commands.md): `minivllm …`, with its options.
* API: one page per module, with its source.
"""


def spans_page() -> str:
    from minivllm.tracing import catalogue
    from minivllm.tracing.spec import LEVEL_NAMES

    lines = [
        "---\nhide: [toc]\n---",
        "",
        "# Span catalogue",
        "",
        f"{len(catalogue.SPANS)} steps, each a span with this name. A failpoint of the same name breaks the run exactly there:",
        '`MINIVLLM_FAILPOINTS="worker.load_model@rank1=kill"`. `minivllm spans` prints the list in the terminal.',
        "",
        "**Level** is the lowest `MINIVLLM_TRACE` that records the step. **Where** names the process, and how often a run shows it.",
        "Under each sentence stands the method that emits the span, and the condition if not every run has it.",
        "`python walkthroughs/every_step.py` records a set of small runs that together show every one of them, and",
        "`minivllm spans --coverage DIR…` says which of them a run of yours shows, and which it could not show, and why.",
    ]
    for name, spec in catalogue.SPANS.items():
        if name in SECTION_STARTS:
            lines += ["", f"## {SECTION_STARTS[name]}", ""]
            lines += [
                "| span | what it shows | articles, and the same place in vLLM 0.25.1 |",
                "|---|---|---|",
            ]
        where = f"{', '.join(spec.process)}, per {spec.per}".replace("_", " ")
        what = f"{_cell(spec.what)}<br>{_name(spec.method.removeprefix('minivllm.'))}"
        if spec.when:
            what += f"<br>*When: {_cell(spec.when)}*"
        elsewhere = [
            "; ".join(spec.articles),
            _name(spec.vllm.removeprefix("vllm/")) if spec.vllm else "nothing of the kind",
        ]
        if spec.vllm_span:
            elsewhere.append(f'vLLM\'s span "{_cell(spec.vllm_span)}"')
        lines.append(
            f'| <span id="{name}"></span>`{name}`<br><small>{LEVEL_NAMES[spec.level]} · {where}</small> | {what} '
            f"| {'<br>'.join(filter(None, elsewhere))} |"
        )
    return "\n".join(lines) + "\n"


def not_recorded(title: str, command: str) -> str:
    return f"# {title}\n\nNo run has been recorded in this checkout. `{command}` makes one and writes this page.\n"


# The catalogue is one list in the order of a run; these are the steps that open a new part of it.
SECTION_STARTS = {
    "run": "Start-up: client and EngineCore",
    "executor.init": "Start-up: executor",
    "worker.process": "Start-up: worker",
    "request": "Running",
    "monitor.worker_died": "Failure and shutdown",
}

GENERATED: dict[str, Callable[[], str]] = {
    "reference/index.md": reference_index,
    "reference/spans.md": spans_page,
    "reference/map.md": map_page,
    "reference/differences.md": differences_page,
    "reference/environment.md": environment_page,
    "reference/commands.md": commands_page,
    "tour/coverage.md": coverage.page,
    exercises.SOURCE: exercises.page,
    originals.PAGE: originals.page,
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation with what only the checkout can tell: API pages by package, and measured pages."""
    groups: dict[str, list[Any]] = {}
    for room in source.rooms():
        package = room.path.split("/")[1] if room.path.count("/") > 1 else "top level"
        label = room.path.removeprefix("minivllm/").removeprefix(f"{package}/")
        groups.setdefault(package, []).append({label: api_page(room.module)})
    sections = {name: entries for part in config.nav or [] for name, entries in part.items()}
    api = next(entry for entry in sections["Reference"] if isinstance(entry, dict) and "API" in entry)
    api["API"] = [{name: pages} for name, pages in sorted(groups.items())]
    benchmarks = benchmark_pages() or [{"Benchmarks": "benchmarks.md"}]
    sections["Measured"][:] = [*benchmarks, {"Crash matrix": "crash_matrix.md"}]
    return config


def benchmark_pages() -> list[str]:
    """Pages that the benchmarks have left in docs/benchmarks, the index first."""
    found = sorted(
        (ROOT / "docs" / "benchmarks").glob("*.md"), key=lambda path: (path.stem != "index", path.stem)
    )
    return [f"benchmarks/{path.name}" for path in found]


@event_priority(-200)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; the i18n plugin, which knows files of docs/ only, has done its work by then."""
    for path, page in GENERATED.items():
        files.append(File.generated(config, path, content=page()))
    for data in players.files(config, files):
        files.append(data)
    if not benchmark_pages():
        files.append(
            File.generated(config, "benchmarks.md", content=not_recorded("Benchmarks", "make bench"))
        )
    if not (ROOT / "docs" / "crash_matrix.md").exists():
        files.append(
            File.generated(config, "crash_matrix.md", content=not_recorded("Crash matrix", "make test-crash"))
        )
    for room in source.rooms():
        name = room.path.removeprefix("minivllm/")
        counterpart = f"\n**vLLM 0.25.1:** {room.vllm}\n" if room.vllm else ""
        articles = f"\n**Articles:** {room.articles}\n" if room.articles else ""
        files.append(
            File.generated(
                config,
                api_page(room.module),
                content=f"# {name}\n{counterpart}{articles}\n::: {room.module}\n",
            )
        )
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """On API pages the two lines on vLLM and the articles stand at the top, and not again in the docstring; on others, outputs."""
    if page.file.src_uri.startswith("reference/api/"):
        return re.sub(r"<p>vLLM 0\.25\.1: .*?</p>", "", html, count=1, flags=re.S)
    return tabs.fill(html)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put code of the package, and timelines, steps and players of recorded runs, into the pages that name them."""
    if "<!-- chapters -->" in markdown:
        markdown = markdown.replace("<!-- chapters -->", coverage.contents(languages.language(page)))
    for expand in (
        repository.expand,
        symbols.expand,
        timelines.expand,
        steps.expand,
        players.expand,
        sequences.expand,
        explorer.expand,
        tabs.expand,
        originals.expand,
        exercises.expand,
        marks.expand,
    ):
        markdown = expand(markdown, page)
    return markdown
