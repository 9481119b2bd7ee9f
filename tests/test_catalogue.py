"""The catalogue: complete, consistent, and true about this package."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import minivllm
from minivllm.tracing.catalogue import BY_INDEX, LIFECYCLE, MESSAGE, RPC, SPANS, SpanSpec, spec
from minivllm.tracing.encode import KINDS

PACKAGE = Path(minivllm.__file__).parent
VLLM = os.environ.get("MINIVLLM_VLLM_SOURCE")  # directory that holds the package `vllm` of 0.25.1

rows = pytest.mark.parametrize("row", BY_INDEX, ids=lambda row: row.name)


def test_rows_are_numbered_and_named_once() -> None:
    assert [row.index for row in BY_INDEX] == list(range(1, len(BY_INDEX) + 1))
    assert list(SPANS) == [row.name for row in BY_INDEX]
    assert len(SPANS) == len(BY_INDEX) >= 90
    assert len(BY_INDEX) < 256  # the open table frees a row by its first byte; boards have 16 bits


@rows
def test_each_row_says_everything(row: SpanSpec) -> None:
    assert re.fullmatch(r"[a-z]+(\.[a-z_]+|_core\.[a-z_]+)?", row.name)
    assert row.level in (LIFECYCLE, RPC, MESSAGE)
    assert row.process and set(row.process) <= {"client", "engine_core", "worker"}
    assert row.per in {"run", "engine_core", "worker", "group", "request", "step", "call", "failure"}
    assert row.what.endswith(".") and row.what[0].isupper()
    assert row.kind in KINDS
    assert row.method.startswith("minivllm.")
    assert all(re.fullmatch(r"part [12] §(intro|[\d.]+)", section) for section in row.articles)
    assert row.articles or row.name in ("run", "request")
    assert re.fullmatch(r"vllm/[\w/]+\.py:\d+ [\w.]+", row.vllm)


def test_unknown_name() -> None:
    assert spec("run") is SPANS["run"]
    with pytest.raises(KeyError, match="not in the span catalogue"):
        spec("worker.lunch")


def _functions(file: Path) -> dict[str, tuple[int, int]]:
    """Qualified names of all functions and classes of a file, with first and last line."""
    found: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = prefix + child.name
                # Overloads share a name: their lines are taken together.
                first, last = found.get(name, (child.lineno, 0))
                found[name] = (first, max(last, child.end_lineno or 0))
                visit(child, name + ".")
            else:
                visit(child, prefix)

    visit(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


def _source(row: SpanSpec) -> str | None:
    """The source of the function that is said to emit the span; None when there is no such function."""
    parts = row.method.split(".")[1:]
    for length in range(len(parts) - 1, 0, -1):
        base = PACKAGE.joinpath(*parts[:length])
        file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if file.is_file():
            lines = _functions(file).get(".".join(parts[length:]))
            if lines is None:
                return None
            return "\n".join(file.read_text(encoding="utf-8").splitlines()[lines[0] - 2 : lines[1]])
    return None


@rows
def test_the_method_emits_it(row: SpanSpec) -> None:
    source = _source(row)
    assert source is not None, f"there is no {row.method}"
    assert f'"{row.name}"' in source, f"{row.method} does not emit it"


@pytest.mark.skipif(not VLLM, reason="MINIVLLM_VLLM_SOURCE does not name vLLM 0.25.1's source")
def test_vllm_places_are_true() -> None:
    for row in BY_INDEX:
        place, name = row.vllm.split(" ")
        path, line = place.split(":")
        functions = _functions(Path(str(VLLM)) / path)
        assert name in functions, f"{row.name}: {path} has no {name}"
        first, last = functions[name]
        assert first <= int(line) <= last, f"{row.name}: line {line} is not within {name}"


@pytest.mark.skipif(not VLLM, reason="MINIVLLM_VLLM_SOURCE does not name vLLM 0.25.1's source")
def test_what_modules_say_of_vllm_is_there() -> None:
    """Each file of vLLM that a text of ours names, and what it says is defined there, by its last name."""
    texts = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "docs").rglob("*.md")]
    places = {
        (str(text.relative_to(PACKAGE.parent)), path, name.strip())
        for text in texts
        for path, names in re.findall(
            r"(?<!mini)(?<![\w/])(vllm/[\w/]+\.py)\b(?: \(([\w., ]+)\))?", text.read_text(encoding="utf-8")
        )
        for name in names.split(",")
    }
    assert len(places) > 200
    wrong = []
    for text, path, name in sorted(places):
        file = Path(str(VLLM)) / path
        if not file.is_file():
            wrong.append(f"{text}: there is no {path}")
        elif re.fullmatch(r"[\w.]+", name):
            last = re.escape(name.rpartition(".")[2])
            if not re.search(rf"^\s*((async )?def|class) {last}\b|^\s*{last}\s*[:=]", file.read_text(), re.M):
                wrong.append(f"{text}: {path} does not define {name}")
    assert not wrong, "\n".join(wrong)
