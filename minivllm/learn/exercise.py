"""What an exercise is, and which there are.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from minivllm.exceptions import ConfigError

HERE = Path(__file__).parent / "exercises"

# In the order in which to do them.
NAMES = (
    "one-slot",
    "start-together",
    "ready-pipe",
    "handshake-order",
    "flag-last",
    "future-order",
    "profile-first",
    "read-your-shard",
    "finalizer",
    "two-nets",
    "stale-answers",
)


@dataclass(frozen=True)
class About:
    """What an exercise's package says about it.

    Attributes:
        title: what is wrong, in a line.
        chapter: the tour's chapter on it.
        minutes: what somebody who has read the chapter needs, roughly.
        hints: from a nudge to nearly everything.
    """

    title: str
    chapter: int
    minutes: int
    hints: tuple[str, ...]


@dataclass(frozen=True)
class Exercise:
    """One exercise, by its number and name."""

    number: int
    name: str

    @property
    def module_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package(self) -> str:
        return f"minivllm.learn.exercises.{self.module_name}"

    @property
    def file_name(self) -> str:
        """What the learner's file is called."""
        return f"{self.module_name}.py"

    @cached_property
    def about(self) -> About:
        about: About = importlib.import_module(self.package).ABOUT
        return about

    @property
    def stub(self) -> str:
        return self._text("stub.py")

    @property
    def solution(self) -> str:
        return self._text("solution.py")

    @property
    def task(self) -> str:
        """The stub's docstring: what to do."""
        return ast.get_docstring(ast.parse(self.stub)) or ""

    def checks(self) -> list[Callable[[ModuleType], None]]:
        """The functions that try the invariants, in order; the docstring of each is its invariant."""
        module = importlib.import_module(f"{self.package}.check")
        return [value for name, value in vars(module).items() if name.startswith("check_")]

    def invariants(self) -> list[str]:
        return [" ".join((check.__doc__ or "").split()) for check in self.checks()]

    def _text(self, name: str) -> str:
        return (HERE / self.module_name / name).read_text(encoding="utf-8")


EXERCISES = tuple(Exercise(number, name) for number, name in enumerate(NAMES, 1))


def find(name: str) -> Exercise:
    """An exercise by its name, its number, or the name of its file.

    Raises:
        ConfigError: there is none.
    """
    for exercise in EXERCISES:
        if name in (exercise.name, str(exercise.number), exercise.module_name, exercise.file_name):
            return exercise
    import difflib

    near = difflib.get_close_matches(name, NAMES, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"there is no exercise {name!r}{meant} (`minivllm learn list` shows them all)")
