"""Code on a page by the name it has in the source: a definition that is renamed or gone fails the build.

In a fenced block, a line

    --8<-- "minivllm/executor/multiproc_executor.py:WorkerProc.worker_busy_loop"

becomes that definition, dedented, with file and line as the block's title. `-doc` after the name leaves out its
docstring. Parts of a definition are ordinary named sections of pymdownx.snippets, which this leaves alone.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r'^(?P<indent> *)```python\n(?P=indent)--8<-- "(?P<path>[\w/.]+\.py):(?P<name>[A-Z_a-z][\w.]*)(?P<nodoc> -doc)?"\n(?P=indent)```$',
    re.M,
)
_MARKER = re.compile(r"^\s*# --8<-- \[(?:start|end):[\w-]+\]\n", re.M)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def find(tree: ast.AST, name: str) -> Definition | None:
    """The definition with a qualified name, also inside functions."""
    node: ast.AST = tree
    for part in name.split("."):
        for child in ast.walk(node):
            if child is not node and isinstance(child, Definition) and child.name == part:
                node = child
                break
        else:
            return None
    return node if isinstance(node, Definition) else None


def code_of(path: str, name: str, with_docstring: bool) -> tuple[str, int] | None:
    """Source text and first line of a definition; None when the file has no such name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    node = find(ast.parse(text), name)
    if node is None:
        return None
    lines = text.splitlines()
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    skip: range = range(0)
    body = node.body[0]
    if not with_docstring and isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant):
        skip = range(body.lineno, (body.end_lineno or body.lineno) + 1)
    kept = [lines[n - 1] for n in range(first, (node.end_lineno or first) + 1) if n not in skip]
    return _MARKER.sub("", textwrap.dedent("\n".join(kept)) + "\n").rstrip("\n"), first


def expand(markdown: str, page: Page) -> str:
    """Replace every block that names a definition."""

    def block(match: re.Match[str]) -> str:
        path, name, indent = match["path"], match["name"], match["indent"]
        if "." not in name and not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: {path} does not exist")
        found = code_of(path, name, with_docstring=not match["nodoc"])
        if found is None:
            if "." not in name:
                return match[0]  # a named section
            raise PluginError(f"{page.file.src_uri}: {path} defines no {name}")
        code, line = found
        body = textwrap.indent(code, indent)
        return f'{indent}```python title="{path}, line {line}"\n{body}\n{indent}```'

    return _BLOCK.sub(block, markdown)
