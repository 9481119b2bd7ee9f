"""What the package's texts tell a reader to type exists: commands, their options, and variables."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path

import minivllm
from minivllm import envs
from minivllm.cli.main import make_parser

PACKAGE = Path(minivllm.__file__).parent
COMMANDS = next(a.choices for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
# A command in backquotes, or at the beginning of a line, or behind a colon.
QUOTED = re.compile(r"`(minivllm(?: [^`]*)?)`")
ON_A_LINE = re.compile(rf"(?:^\s*|: )(minivllm (?:{'|'.join(COMMANDS)}).*)", re.MULTILINE)
VALUE = "1"
# Modules with a command line of their own.
PROGRAMS = {"assets/make_checkpoint.py", "distributed/ring_model.py"}
# Options of other programs.
FOREIGN = {"--rm", "--shm-size"}


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Where, and the text, of every string in the package; values that are put into it become `1`."""
    return list(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        parts = {
            part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
        }
        for node in ast.walk(tree):
            where = f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                yield (
                    where,
                    "".join(str(v.value) if isinstance(v, ast.Constant) else VALUE for v in node.values),
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                yield where, node.value


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def refused(command: str) -> str:
    """What the parser has against a command; "" if it takes it."""
    # What follows two blanks explains the command, as in the examples of --help.
    words = re.split(r"\s{2,}|\s[|>]\s", command)[0].replace('"', "").split()[1:]
    if words[:1] == ["…"]:
        return ""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            make_parser().parse_args([word.replace("…", VALUE) for word in words])
    except SystemExit as end:
        return said.getvalue().strip().splitlines()[-1] if end.code else ""
    return ""


def test_commands() -> None:
    found = [
        (where, command)
        for where, text in texts()
        for command in {*QUOTED.findall(text), *ON_A_LINE.findall(text)}
    ]
    assert len(found) > 30
    wrong = {f"{where}: {command}": why for where, command in found if (why := refused(command))}
    assert not wrong


def test_options() -> None:
    known = {
        option for parser in parsers(make_parser()) for option in parser._option_string_actions
    } | FOREIGN
    named = {
        f"{where}: {option}"
        for where, text in texts()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)
        if option not in known and where.partition(":")[0] not in PROGRAMS
    }
    assert not named


def test_variables() -> None:
    named = {
        f"{where}: {variable}"
        for where, text in texts()
        for variable in re.findall(r"\bMINIVLLM_[A-Z0-9_]*[A-Z0-9]\b", text)
        if variable not in envs.environment_variables
    }
    assert not named
