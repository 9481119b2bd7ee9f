"""The exercises: every solution is green and every stub red, and the command around them behaves."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minivllm.learn.exercise import EXERCISES, Exercise
from minivllm.learn.judge import State, Verdict, judge

LIMIT_S = 120.0
IDS = [exercise.name for exercise in EXERCISES]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Verdict]:
    """What the checks say about every stub and every solution. Most of a check is waiting, so they run side by side."""

    def run(exercise: Exercise, kind: str) -> tuple[tuple[str, str], Verdict]:
        file = tmp_path_factory.mktemp(f"{exercise.module_name}_{kind}") / exercise.file_name
        file.write_text(getattr(exercise, kind), encoding="utf-8")
        return (exercise.name, kind), judge(exercise, file)

    with ThreadPoolExecutor(4) as pool:
        pairs = [(exercise, kind) for kind in ("solution", "stub") for exercise in EXERCISES]
        return dict(pool.map(lambda pair: run(*pair), pairs))


@pytest.mark.parametrize("name", IDS)
def test_the_solution_is_green(name: str, verdicts: dict[tuple[str, str], Verdict]) -> None:
    verdict = verdicts[name, "solution"]
    assert verdict.passed, f"{verdict.why}\n{verdict.output}"


@pytest.mark.parametrize("name", IDS)
def test_the_stub_is_red_and_the_invariant_is_named(
    name: str, verdicts: dict[tuple[str, str], Verdict]
) -> None:
    verdict = verdicts[name, "stub"]
    assert State.BROKEN in verdict.states and verdict.why
    # The reason is the check's own sentence, and not an error that somebody forgot to catch.
    assert not re.match(r"\w+Error\b", verdict.why) and "Traceback" not in verdict.output, verdict


@pytest.mark.parametrize("exercise", EXERCISES, ids=IDS)
def test_an_exercise_is_complete(exercise: Exercise) -> None:
    about = exercise.about
    assert len(about.hints) >= 3 and 5 <= about.minutes <= 60
    assert exercise.task.splitlines()[0].rstrip(".") == about.title
    invariants = exercise.invariants()
    assert len(invariants) >= 2 and all(text.endswith(".") for text in invariants)
    # The learner may change everything but the names that the check uses; a solution keeps them.
    assert _public_names(exercise.stub) <= _public_names(exercise.solution)


def _public_names(source: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
    }


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def send(:\n", "flag_last.py:1: SyntaxError"),
        ("import torchh\n", "ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import os\nos._exit(0)\n", "ended by the code under test"),
        ("while True:\n    pass\n", "nothing has happened for 1 s; the code is at flag_last.py:"),
        ("publish = take = None\n", "'NoneType' object is not callable"),
    ],
    ids=["syntax", "import", "exit", "os-exit", "endless", "nonsense"],
)
def test_whatever_a_file_does_the_check_says_so(source: str, text: str, tmp_path: Path) -> None:
    exercise = EXERCISES[IDS.index("flag-last")]
    file = tmp_path / exercise.file_name
    file.write_text(source)
    verdict = judge(exercise, file, limit_s=1.0 if "while" in source else 30.0)
    assert not verdict.passed and text in verdict.why, verdict


@pytest.mark.parametrize("source", ["while True:\n    pass\n", "import time\ntime.sleep(1e6)\n"])
def test_a_file_whose_import_does_not_end_is_given_up_soon(source: str, tmp_path: Path) -> None:
    exercise = EXERCISES[IDS.index("flag-last")]
    file = tmp_path / exercise.file_name
    file.write_text(source)
    why = judge(exercise, file, import_limit_s=0.3).why
    assert "the file cannot be used: importing it does not end within 0.3 s (at flag_last.py:" in why


def learn(*args: str, cwd: Path, module: str = "minivllm", **env: str) -> subprocess.CompletedProcess[str]:
    names = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-m", module, "learn", *args],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=cwd,
        env={**inherited, **env},
        check=False,
    )


def test_from_start_to_solution(tmp_path: Path) -> None:
    """The way of a learner: list, start, check, three hints, the solution, check, list."""
    assert "one-slot" in learn("list", cwd=tmp_path).stdout
    started = learn("start", "one-slot", cwd=tmp_path)
    assert started.returncode == 0 and "minivllm learn check one-slot" in started.stdout
    file = tmp_path / "one_slot.py"
    assert "class OneSlotChannel" in file.read_text()

    checked = learn("check", "one-slot", cwd=tmp_path)
    assert checked.returncode == 1 and checked.stderr == ""
    assert "broken     1. A command that a reader has not taken yet is never overwritten." in checked.stdout
    assert "not tried  2." in checked.stdout

    hints = [learn("hint", "1", cwd=tmp_path).stdout for _ in range(4)]
    assert [text.count(" of 3 ") for text in hints] == [1, 2, 3, 3] and "last one" in hints[2]
    assert hints[3].startswith("There are no more") and "last one" not in hints[3]

    solution = learn("solution", "one-slot", cwd=tmp_path)
    file.write_text(solution.stdout)
    checked = learn("check", "one_slot.py", cwd=tmp_path)
    assert checked.returncode == 0 and "All 2 invariants hold" in checked.stdout
    assert re.search(r"one-slot +9 +15 +passed", learn("list", cwd=tmp_path).stdout)
    file.write_text(file.read_text() + "\n")
    assert re.search(r"one-slot +9 +15 +changed since", learn(cwd=tmp_path).stdout)
    state = json.loads((tmp_path / ".minivllm-learn.json").read_text())
    assert list(state) == ["one-slot"] and state["one-slot"]["hints"] == 3


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("check", "one-slto"), "did you mean one-slot?"),
        (("check", "12"), "there is no exercise '12'"),
        (("check", "finalizer"), "`minivllm learn start finalizer` writes it"),
        (("check", "finalizer", "--file", "nowhere.py"), "there is no file nowhere.py"),
        (("check", "finalizer", "--file", "my-try.py"), "its name must be that of a Python module"),
        (("start", "one-slot"), "start over with --force"),
        (("hint",), "the following arguments are required: exercise"),
        (("begin",), "invalid choice: 'begin'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(args: tuple[str, ...], text: str, tmp_path: Path) -> None:
    (tmp_path / "one_slot.py").write_text("mine\n")
    (tmp_path / "my-try.py").write_text("")
    done = learn(*args, cwd=tmp_path)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "one_slot.py").read_text() == "mine\n"


def test_colours_and_encodings(tmp_path: Path) -> None:
    coloured = learn("list", cwd=tmp_path, FORCE_COLOR="1").stdout
    assert "\x1b[" in coloured
    assert "\x1b[38" not in learn("list", cwd=tmp_path, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert learn("start", "stale-answers", cwd=tmp_path, PYTHONIOENCODING="ascii").stdout.isascii()


@pytest.mark.parametrize("module", ["minivllm", "minivllm.cli.main"])
def test_the_module_is_the_command(module: str, tmp_path: Path) -> None:
    done = learn("list", cwd=tmp_path, module=module)
    assert done.returncode == 0 and "two-nets" in done.stdout
