"""The page that maps every section of both articles to chapter, spans and walkthrough, from the chapters' front matter."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "docs" / "tour"

# Sections of the articles; the titles are ours.
SECTIONS: dict[str, str] = {
    "part 1 §1": "Core classes and the process tree",
    "part 1 §2": "MultiprocExecutor._init_executor",
    "part 1 §3": "WorkerProc.make_worker_process",
    "part 1 §4": "`WorkerProc.__init__` and worker_cls",
    "part 1 §5": "Worker.init_device",
    "part 1 §6": "Which runner: use_v2_model_runner",
    "part 1 §7": "Why Model Runner V2",
    "part 1 §8.1": "What the runner's constructor builds",
    "part 1 §8.2": "load_model",
    "part 1 §8.3": "KV cache, profiling, graphs, steps",
    "part 1 §9": "The whole chain in a few lines",
    "part 1 §10": "Flow chart",
    "part 2 §1.1": "What the file is for",
    "part 2 §1.2": "Ideas of the architecture",
    "part 2 §1.3": "Other executors",
    "part 2 §2.0": "Imports",
    "part 2 §2.1": "FutureWrapper",
    "part 2 §2.2": "The two handle classes",
    "part 2 §2.3": "MultiprocExecutor",
    "part 2 §2.3.1": "Construction and initialisation",
    "part 2 §2.3.2": "The worker monitor",
    "part 2 §2.3.3": "Registering a failure callback",
    "part 2 §2.3.4": "execute_model",
    "part 2 §2.3.5": "sample_tokens",
    "part 2 §2.3.6": "execute_dummy_batch, take_draft_token_ids",
    "part 2 §2.3.7": "collective_rpc",
    "part 2 §2.3.8": "Ending the workers",
    "part 2 §2.3.9": "shutdown",
    "part 2 §2.3.10": "Health, output rank, concurrent batches",
    "part 2 §2.4": "WorkerProc",
    "part 2 §2.4.1": "Its message queues",
    "part 2 §2.4.2": "Its constructor",
    "part 2 §2.4.3": "make_worker_process",
    "part 2 §2.4.4": "wait_for_ready",
    "part 2 §2.4.5": "The response ring's handle",
    "part 2 §2.4.6": "The worker's shutdown",
    "part 2 §2.4.7": "monitor_death_pipe",
    "part 2 §2.4.8": "worker_main",
    "part 2 §2.4.9": "ResponseStatus",
    "part 2 §2.4.10": "enqueue_output",
    "part 2 §2.4.11": "handle_output",
    "part 2 §2.4.12": "The async output thread",
    "part 2 §2.4.13": "The busy loop",
    "part 2 §2.4.14": "Process titles and log prefixes",
    "part 2 §2.5.1": "Channels, overview",
    "part 2 §2.5.2": "The MessageQueue",
    "part 2 §2.5.3": "Communication on one host",
    "part 2 §2.5.4": "Communication between hosts",
    "part 2 §2.5.5": "Cost of broadcast and response",
    "part 2 §2.6.1": "Start",
    "part 2 §2.6.2": "Running",
    "part 2 §2.6.3": "Shutdown",
    "part 2 §2.6.4": "Faults",
    "part 2 §2.7": "Environment of the workers",
    "part 2 §3.1": "Diagram: classes",
    "part 2 §3.2": "Diagram: initialisation",
    "part 2 §3.3": "Diagram: collective_rpc",
    "part 2 §3.4": "Diagram: busy loop",
    "part 2 §3.5": "Diagram: shutdown",
    "part 2 §3.6": "Diagram: failure",
    "part 2 §3.7": "Diagram: pipes and queues",
    "part 2 §3.8": "Diagram: FutureWrapper",
    "part 2 §4.1": "Shared memory or sockets",
    "part 2 §4.2": "Responses in order",
    "part 2 §4.3": "Daemon process and death pipe",
    "part 2 §4.4": "One reply",
    "part 2 §4.5": "Weak references",
    "part 2 §4.6": "Descriptors under fork",
    "part 2 §5": "Summary",
}


# The chapters of the tour.
CHAPTERS = {
    1: "process topology",
    2: "MultiprocExecutor's initialisation",
    3: "spawning a worker",
    4: "WorkerProc's constructor and the worker's class",
    5: "init_device and NCCL",
    6: "which runner",
    7: "why Model Runner V2",
    8: "loading, KV cache, profiling, CUDA graphs",
    9: "the MessageQueue",
    10: "collective_rpc and FutureWrapper",
    11: "one step from schedule to token",
    12: "async scheduling and the pipeline",
    13: "health, failure and who notices",
    14: "shutdown in three levels",
}


@dataclass(frozen=True)
class Chapter:
    """A page of the tour and what its front matter says it covers."""

    path: Path
    title: str
    articles: tuple[str, ...]
    spans: tuple[str, ...]
    walkthrough: str
    aim: str

    @property
    def number(self) -> int:
        return int(self.path.name[:2])


def chapters(suffix: str = ".md") -> list[Chapter]:
    """The tour's chapters, or with `.zh.md` those that are translated."""
    found = []
    for path in sorted(TOUR.glob(f"[0-9][0-9]-*{suffix}")):
        if "." in path.name.removesuffix(suffix):
            continue
        found.append(_read(path, path.stat().st_mtime_ns))
    return found


@functools.cache  # nearly every page refers to a chapter
def _read(path: Path, _changed_ns: int) -> Chapter:
    text = path.read_text(encoding="utf-8")
    meta = yaml.safe_load(text.split("---\n")[1])
    aims = text.partition("!!! abstract")[2].partition("* ")[2]
    return Chapter(
        path,
        meta["title"],
        tuple(meta["articles"]),
        tuple(meta["spans"]),
        meta.get("walkthrough", ""),
        " ".join(re.split("[;；]\n", aims)[0].split()),
    )


_HEADS = {
    "en": "| chapter | you will be able to, among other things | walkthrough |",
    "zh": "| 章节 | 读完之后你能做的事之一 | 演练脚本 |",
}


def contents(language: str) -> str:
    """The tour's table of contents."""
    told = chapters(".md" if language == "en" else f".{language}.md")
    lines = [_HEADS[language], "|---|---|---|"]
    for chapter in told:
        script = f"`walkthroughs/{chapter.walkthrough}`" if chapter.walkthrough else "–"
        target = chapter.path.name.replace(f".{language}.md", ".md")
        lines.append(f"| [{chapter.title}]({target}) | {chapter.aim.replace('|', '&#124;')} | {script} |")
    return "\n".join(lines)


def uncovered() -> list[str]:
    """Sections that no chapter covers."""
    told = {section for chapter in chapters() for section in chapter.articles}
    return [section for section in SECTIONS if section not in told]


def page() -> str:
    from minivllm.tracing import catalogue

    if missing := uncovered():
        raise PluginError(f"no chapter of the tour covers {', '.join(missing)}")
    told = chapters()
    lines = [
        "---\ntitle: Article sections\nhide: [toc]\n---",
        "",
        "# Where each section of the articles is covered",
        "",
        "Section by section: the chapter that covers it with its walkthrough, and the spans in which a run shows it. Made from the",
        "chapters' front matter and the span catalogue; a section without a chapter fails the build.",
    ]
    for part in ("part 1", "part 2"):
        lines += [
            "",
            f"## {part.capitalize()}",
            "",
            "| section | subject | chapter, walkthrough | spans |",
            "|---|---|---|---|",
        ]
        for section, subject in SECTIONS.items():
            if not section.startswith(part):
                continue
            pages = "<br>".join(_with_walkthrough(c) for c in told if section in c.articles)
            spans = [name for name, spec in catalogue.SPANS.items() if section in spec.articles]
            shown = ", ".join(f"[`{name}`](../reference/spans.md#{name})" for name in spans) or "–"
            lines.append(f"| {section.removeprefix(part + ' ')} | {subject} | {pages} | {shown} |")
    return "\n".join(lines) + "\n"


def _with_walkthrough(chapter: Chapter) -> str:
    link = f"[{chapter.title}]({chapter.path.name})"
    return f"{link} <small>`{chapter.walkthrough}`</small>" if chapter.walkthrough else link
