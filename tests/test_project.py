"""The project as a whole: its top level, its docstrings, its promises about imports, and that its texts are true."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm import envs

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {
    "mkdocs.yml",
    "docs",
    "minivllm",
    "walkthroughs",
    "tests",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
    ".ci",
    ".gitignore",
}
MODULES = sorted(p for p in (ROOT / "minivllm").rglob("*.py") if p.read_text(encoding="utf-8").strip())
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".svg", ".css", ".js", ".txt", ""}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def in_repository() -> bool:
    return (ROOT / ".git").exists()


needs_git = pytest.mark.skipif(not in_repository(), reason="not a git checkout: no list of tracked files")


@needs_git
def test_top_level_is_as_agreed() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= TOP_LEVEL
    assert {path.name for path in tracked() if path.parent == ROOT / ".ci"} == {"run"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_docstring_names_vllm_and_articles(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert re.search(r"^vLLM 0\.25\.1: \S", docstring, re.M), "no line `vLLM 0.25.1: <file> (<classes>)`"
    assert re.search(r"^Articles: \S", docstring, re.M), "no line `Articles: part N §…`"


@needs_git
def test_no_path_of_a_machine_in_tracked_text() -> None:
    here = [path.as_posix() for path in (Path.home(), ROOT, ROOT.parent) if len(path.parts) > 1]
    mine = "".join(f"|{re.escape(path)}/" for path in here)
    pattern = re.compile(rf"(?<![\w.])(/home/\w|/Users/\w|/root\b{mine})")
    found = []
    for path in tracked():
        if path.suffix not in TEXT or path == Path(__file__).resolve() or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_commands_in_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for text in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", text.read_text(encoding="utf-8"), re.M)
        assert set(named) <= targets, f"{text.name} names a make target that does not exist"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme and "make test" in readme


@needs_git
def test_relative_links_in_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / target).exists(), f"README.md links to {target}, which does not exist"


# How a parent tells a child about the trace it is part of; nobody sets them by hand.
CARRIERS = {"MINIVLLM_TRACE_ANCHOR", "MINIVLLM_TRACE_START"}


def test_every_variable_in_use_is_in_the_table() -> None:
    unknown = {}
    for path in [*MODULES, *sorted((ROOT / "walkthroughs").glob("*.py"))]:
        names = set(re.findall(r"\bMINIVLLM_[A-Z0-9_]*[A-Z0-9]\b", path.read_text(encoding="utf-8")))
        missing = names - set(envs.environment_variables) - CARRIERS
        # A family named by its prefix in prose (MINIVLLM_MQ_…) is no variable.
        missing = {n for n in missing if not any(known.startswith(n) for known in envs.environment_variables)}
        if missing:
            unknown[path.relative_to(ROOT).as_posix()] = sorted(missing)
    assert not unknown, f"not in minivllm.envs.environment_variables: {unknown}"


def test_every_variable_in_the_table_is_used() -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in MODULES if p.name != "envs.py")
    unused = [name for name in envs.environment_variables if name not in text]
    assert not unused, f"nothing reads {unused}"


@pytest.mark.parametrize(
    "module",
    [
        "minivllm",
        "minivllm.config",
        "minivllm.tracing",
        "minivllm.distributed.shm_broadcast",
        "minivllm.executor.multiproc_executor",
        "minivllm.engine.core",
        "minivllm.entrypoints.llm",
        "minivllm.cli.main",
    ],
)
def test_room_imports_no_torch(module: str) -> None:
    """Client, EngineCore and a worker's first instructions must be up in a fraction of a second."""
    code = (
        f"import json, sys, {module}; print(json.dumps(sorted(m for m in sys.modules if m.count('.') == 0)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout))
    assert not imported & {"torch", "transformers", "numba"}, f"import {module} brings heavy modules"
