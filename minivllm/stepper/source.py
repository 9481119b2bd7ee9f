"""The source line that emitted a step, from the installed package, and what the code says about why it is there.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import minivllm
from minivllm.trace_store import Span
from minivllm.tracing.catalogue import SPANS

_PACKAGE = Path(minivllm.__file__).parent
# A comment this many lines above or below the line still speaks about it.
_NEAR = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step was emitted.

    Attributes:
        path: relative to the directory that holds the package.
        line: from 1; 0 when the source could not be found.
        function: its qualified name within the module.
        lines: all lines of the file; empty when the source could not be found.
        why: the comment near the line, else the beginning of the function's docstring, else of the class's.
        note: what is wrong with the place, if anything.
    """

    path: str
    line: int
    function: str
    lines: tuple[str, ...] = ()
    why: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class _File:
    lines: tuple[str, ...] = ()
    comments: dict[int, str] = field(default_factory=dict)
    # (first line, last line, qualified name, docstring) of each class and function, the outer ones first; decorators
    # count, since a step may be emitted by one.
    scopes: tuple[tuple[int, int, str, str], ...] = ()
    # The first line of the call, for the line of each text that is handed to one.
    calls: dict[int, int] = field(default_factory=dict)
    # The lines from the first decorator to the name, of each decorated function.
    headers: tuple[range, ...] = ()


def place_of(span: Span) -> Place:
    """Find the line that emitted a span; the recorded line number may be that of another version of the package."""
    path = str(span.attributes.get("code.file.path", ""))
    function = str(span.attributes.get("code.function.name", ""))
    return find_place(span.name, path, int(span.attributes.get("code.line.number", 0)), function)


def place_in_catalogue(name: str) -> Place:
    """Where the catalogue says that a step is emitted."""
    path, function = _module_of(SPANS[name].method)
    return find_place(name, path, 0, function)


@lru_cache(maxsize=1024)
def find_place(name: str, path: str, line: int, function: str) -> Place:
    if not path:
        return Place("", 0, function, note="the trace does not say where this step was emitted")
    file = _read(path)
    if file is not None and _mentions(file, line, name):
        return Place(path, line, _local(function, path), file.lines, _why(file, line))
    # The package may have changed since the run was recorded: the step may be further down, or in another file now.
    spec = SPANS.get(name)
    homes = [(path, _local(function, path))]
    if spec is not None:
        homes.append(_module_of(spec.method))
    for home, qualified in homes:
        file = _read(home)
        moved = _search(file, name, qualified, line if home == path else 0) if file is not None else 0
        if file is not None and moved:
            here = _function_at(file, moved)
            if home != path or here != _local(function, path):
                note = f"source changed since the recording: the step was in {path}, {_local(function, path)}"
            elif line and not any(line in header and moved in header for header in file.headers):
                note = f"source changed since the recording: this was line {line}"
            else:
                note = ""
            return Place(home, moved, here, file.lines, _why(file, moved), note)
    return Place(path, 0, _local(function, path), note="the installed minivllm does not have this line")


def _local(function: str, path: str) -> str:
    """A qualified name without its module."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return function.removeprefix(f"{module}.")


def _module_of(method: str) -> tuple[str, str]:
    """The file and the name within it of `minivllm.package.module.Class.method`."""
    parts = method.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = "/".join(parts[:length])
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if (_PACKAGE.parent / candidate).is_file():
                return candidate, ".".join(parts[length:])
    return "", method


@lru_cache(maxsize=256)
def _read(path: str) -> _File | None:
    target = (_PACKAGE.parent / path).resolve()
    if not target.is_relative_to(_PACKAGE.resolve()):
        return None
    try:
        text = target.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    scopes: list[tuple[int, int, str, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = prefix + child.name
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                scopes.append((first, child.end_lineno or 0, name, ast.get_docstring(child) or ""))
                visit(child, name + ".")
            else:
                visit(child, prefix)

    visit(tree, "")
    calls: dict[int, int] = {}
    headers = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    calls[argument.lineno] = node.lineno
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:
            headers.append(range(node.decorator_list[0].lineno, node.lineno + 1))
    return _File(tuple(text.splitlines()), comments, tuple(scopes), calls, tuple(headers))


def _mentions(file: _File, line: int, name: str) -> bool:
    """Whether the call at a line names the span; it may go over several lines."""
    if not 1 <= line <= len(file.lines):
        return False
    if f'"{name}"' in file.lines[line - 1]:
        return True
    begins_here = file.lines[line - 1].rstrip().endswith("(")
    return begins_here and any(f'"{name}"' in text for text in file.lines[line : line + 2])


def _function_at(file: _File, line: int) -> str:
    """The innermost function or class around a line."""
    return next((name for first, last, name, _ in reversed(file.scopes) if first <= line <= last), "")


def _search(file: _File, name: str, function: str, line: int) -> int:
    """The first line of the call that names the span, preferably within its function and near a line; 0 if none."""
    found = [
        file.calls.get(number, number) for number, text in enumerate(file.lines, 1) if f'"{name}"' in text
    ]
    within = [
        number
        for number in found
        for first, last, qualified, _ in file.scopes
        if qualified == function and first <= number <= last
    ]
    return min(within or found or [0], key=lambda number: abs(number - line) if line else number)


def _why(file: _File, line: int) -> str:
    around = [scope for scope in file.scopes if scope[0] <= line <= scope[1]]
    first, last = (around[-1][0], around[-1][1]) if around else (1, len(file.lines))
    near = sorted(
        (number for number in file.comments if abs(number - line) <= _NEAR and first <= number <= last),
        key=lambda number: (number > line, abs(number - line)),
    )
    parts = [_block(file, near[0])] if near else []
    # The innermost scope that says anything.
    docstring = next((text for _, _, _, text in reversed(around) if text), "")
    if docstring:
        parts.append(inspect.cleandoc(docstring).split("\n\n")[0])
    return " ".join(" ".join(parts).split())


def _block(file: _File, number: int) -> str:
    """The whole comment that a line belongs to."""

    def is_whole_line(at: int) -> bool:
        return at in file.comments and file.lines[at - 1].lstrip().startswith("#")

    if not is_whole_line(number):
        return file.comments[number]
    first = last = number
    while is_whole_line(first - 1):
        first -= 1
    while is_whole_line(last + 1):
        last += 1
    return " ".join(file.comments[at] for at in range(first, last + 1))
