"""Every command on every page was run as written, and is one that a reader can run."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def commands() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs" / "_hooks"))
    try:
        yield importlib.import_module("commands")
    finally:
        sys.path.pop(0)


def test_each_was_run_as_written(commands: ModuleType) -> None:
    """By a test, or when `make docs-assets ARGS=commands` ran them all and kept their exit codes."""
    kept = commands.recorded()
    written = commands.everything()
    assert len(written) > 40
    never = {
        command: pages
        for command, pages in written.items()
        if not commands.elsewhere(command) and command not in kept
    }
    assert not never, "never run as written: make docs-assets ARGS=commands"
    assert set(kept) <= set(written), "recorded, and on no page any more: make docs-assets ARGS=commands"
    for command, code in kept.items():
        assert bool(code) == commands.may_fail(command), command


def test_what_runs_the_others_is_there(commands: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for command in commands.everything():
        if file := commands.elsewhere(command):
            assert (ROOT / file).is_file(), command
        words = command.split()
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile, command
        if words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), command
        if words[0] == "pip":
            assert f"\n{command.partition('[')[2].partition(']')[0]} = [" in project, command


@pytest.mark.timeout(120)
def test_those_that_take_a_moment_still_run(commands: ModuleType, tmp_path: Path) -> None:
    """The ones that start no engine are run here each time; all of them when they are recorded."""
    for page in commands.pages():
        place = tmp_path / page.relative_to(ROOT).with_suffix("")
        for command in commands.on_page(page):
            if (
                commands.QUICK.fullmatch(command)
                and not commands.elsewhere(command)
                and "traces/" not in command
            ):
                if not place.exists():
                    commands.prepare(place, page)
                done: subprocess.CompletedProcess[str] = commands.run(command, place)
                assert commands.as_meant(command, done), f"{page.name}: {command}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_still_run(commands: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "RECORD", tmp_path / "commands.json")
    commands.record(tmp_path / "pages")
