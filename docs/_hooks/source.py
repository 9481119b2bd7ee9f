"""What the site reads from the package's source: module docstrings and the comments that mark a deviation."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minivllm"
EXERCISES = PACKAGE / "learn" / "exercises"
MARK = "Deviation from vLLM:"


@dataclass(frozen=True)
class Room:
    """One module: its dotted name, the sentence that says what it is for, and where vLLM and the articles have it."""

    path: str
    module: str
    sentence: str
    vllm: str
    articles: str


@dataclass(frozen=True)
class Deviation:
    """One place where minivllm does better on purpose: file, line, enclosing definition, and the comment's text."""

    path: str
    line: int
    where: str
    text: str


def source_files() -> list[Path]:
    """The modules of the package; the files of exercises are material and have a page of their own."""
    return sorted(
        path
        for path in PACKAGE.rglob("*.py")
        if path.read_text(encoding="utf-8").strip() and EXERCISES not in path.parents
    )


def field(docstring: str, name: str) -> str:
    """The text after `name:` in a module docstring, up to the next field or blank line; "" when it is missing."""
    found = re.search(
        rf"^{re.escape(name)}:\s*(.+?)(?=\n\s*\n|\n(?:vLLM 0\.25\.1|Articles):|\Z)", docstring, re.M | re.S
    )
    return " ".join(found.group(1).split()) if found else ""


def rooms() -> list[Room]:
    found = []
    for path in source_files():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        relative = path.relative_to(ROOT)
        parts = relative.with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(
            Room(
                path=relative.as_posix(),
                module=module,
                sentence=" ".join(docstring.split("\n\n")[0].split("\nvLLM 0.25.1:")[0].split()),
                vllm=field(docstring, "vLLM 0.25.1"),
                articles=field(docstring, "Articles"),
            )
        )
    return found


def _enclosing(tree: ast.AST, line: int) -> str:
    """Qualified name of the innermost definition around a line, "" at module level."""
    names: list[str] = []
    node: ast.AST = tree
    while True:
        for child in ast.iter_child_nodes(node):
            if getattr(child, "lineno", line + 1) <= line <= (getattr(child, "end_lineno", 0) or 0):
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    names.append(child.name)
                node = child
                break
        else:
            return ".".join(names)


def _comment_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Each comment that stands on lines of its own, as (first line, text)."""
    block: list[str] = []
    first = last = column = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, col), body = token.start, token.string.lstrip("#").strip()
        if block and line == last + 1 and col == column and not body.startswith(MARK):
            block.append(body)
        else:
            if block:
                yield first, " ".join(block)
            block, first, column = [body], line, col
        last = line
    if block:
        yield first, " ".join(block)


def deviations() -> list[Deviation]:
    found = []
    for path in source_files():
        text = path.read_text(encoding="utf-8")
        if MARK not in text:
            continue
        tree = ast.parse(text)
        relative = path.relative_to(ROOT).as_posix()
        for line, comment in _comment_blocks(text):
            if comment.startswith(MARK):
                # A comment above a definition belongs to it.
                where = _enclosing(tree, line) or _enclosing(tree, line + comment.count("\n") + 1)
                found.append(Deviation(relative, line, where, comment[len(MARK) :].strip()))
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            docstring = ast.get_docstring(node) or ""
            for paragraph in docstring.split("\n\n"):
                for part in paragraph.split(MARK)[1:]:
                    line = next(
                        number
                        for number, content in enumerate(text.splitlines(), 1)
                        if number >= getattr(node, "lineno", 1) and MARK in content
                    )
                    found.append(Deviation(relative, line, _enclosing(tree, line), " ".join(part.split())))
    return sorted(found, key=lambda deviation: (deviation.path, deviation.line))
