"""`minivllm learn`: exercises with a stub to edit, a check that names the broken invariant, hints, and a solution.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.cli import common

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import Style

    from minivllm.learn.exercise import Exercise
    from minivllm.learn.judge import Verdict


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "learn",
        parents=[common.options()],
        help="exercises: find and mend one defect each, with checks and hints",
        description="Exercises to the tour. `start` writes a file with one defect into the working directory; edit it "
        "until `check`, which runs it with real processes, finds nothing broken any more.",
    )
    parser.set_defaults(run=_overview)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    for name, run, text in (
        ("list", _list, "the exercises, and which are started and passed here"),
        ("start", _start, "write the exercise's file into the working directory"),
        ("check", _check, "try the invariants on the file; exit code 1 when one is broken"),
        ("hint", _hint, "the next hint; each time one more"),
        ("solution", _solution, "print a solution, with what it rests on"),
    ):
        action = actions.add_parser(
            name, parents=[common.options()], help=text, description=text[:1].upper() + text[1:] + "."
        )
        action.set_defaults(run=run)
        if name != "list":
            action.add_argument("exercise", help="its name or number")
        if name == "start":
            action.add_argument(
                "--force", action="store_true", help="start over: replace a file that is there"
            )
        if name == "check":
            action.add_argument("--file", metavar="FILE", help="the file to check (default: that of `start`)")


def _overview(args: argparse.Namespace) -> int:
    return _list(args)


def _list(args: argparse.Namespace) -> int:
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from minivllm.learn import progress
    from minivllm.learn.exercise import EXERCISES
    from minivllm.timeline import theme

    console, spell = _console()
    faint = Style(color=theme.FAINT)
    here = Path.cwd()
    done = progress.load(here)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("exercise", no_wrap=True)
    table.add_column("chapter", justify="right", no_wrap=True)
    table.add_column("minutes", justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("what is wrong", overflow="fold", ratio=1)
    for exercise in EXERCISES:
        about, state = exercise.about, progress.state_of(exercise, here, done[exercise.name])
        if console.width < common.NARROW:
            facts = f"  chapter {about.chapter}, {about.minutes} min  "
            head = Text.assemble((f"{exercise.number:>2}  ", faint), exercise.name, (facts, faint))
            common.print_entry(console, head.append(state, _style(state)), spell(about.title))
            continue
        table.add_row(
            Text(str(exercise.number), faint),
            exercise.name,
            Text(str(about.chapter), faint),
            Text(str(about.minutes), faint),
            Text(state, _style(state)),
            Text(spell(about.title)),
        )
    if table.row_count:
        console.print(table)
    console.print(
        Text(
            "`minivllm learn start NAME` writes the file to edit; `minivllm learn check NAME` tries it.",
            faint,
        )
    )
    return common.OK


def _start(args: argparse.Namespace) -> int:
    from minivllm.exceptions import ConfigError
    from minivllm.learn.exercise import find

    exercise = find(args.exercise)
    file = Path(exercise.file_name)
    if file.exists() and not args.force:
        raise ConfigError(f"{file} is there already; edit it, or start over with --force")
    common.write_file(str(file), exercise.stub.encode())
    console, spell = _console()
    _heading(console, exercise, spell)
    console.print(spell(_body(exercise)), soft_wrap=False)
    console.print()
    console.print("It holds when:")
    for number, invariant in enumerate(exercise.invariants(), 1):
        _item(console, f"{number}.", spell(invariant))
    console.print()
    console.print(f"Edit {file}, then: minivllm learn check {exercise.name}")
    console.print(
        f"Stuck? minivllm learn hint {exercise.name}. The subject is chapter {exercise.about.chapter} of the tour."
    )
    return common.OK


def _check(args: argparse.Namespace) -> int:
    from minivllm.exceptions import ConfigError
    from minivllm.learn import progress
    from minivllm.learn.exercise import find
    from minivllm.learn.judge import judge

    exercise = find(args.exercise)
    file = Path(args.file or exercise.file_name)
    if not file.is_file():
        first = f"`minivllm learn start {exercise.name}` writes it"
        raise ConfigError(
            f"there is no file {file} here; {first}" if not args.file else f"there is no file {file}"
        )
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise ConfigError(f"{file} cannot be imported; its name must be that of a Python module")
    verdict = judge(exercise, file)
    _report(exercise, file, verdict)
    if not args.file:
        done = progress.load(Path.cwd())
        if verdict.passed:
            done[exercise.name].passed = progress.digest(file)
            progress.save(Path.cwd(), done)
    return common.OK if verdict.passed else common.FAILED


def _report(exercise: Exercise, file: Path, verdict: Verdict) -> None:
    from rich.style import Style
    from rich.text import Text

    from minivllm.learn.judge import State
    from minivllm.timeline import theme

    console, spell = _console()
    _heading(console, exercise, spell)
    invariants = exercise.invariants()
    width = max(len(state.value) for state in State)
    for number, (state, invariant) in enumerate(zip(verdict.states, invariants, strict=True), 1):
        _item(console, f"{state.value:<{width}}  {number}.", spell(invariant), _style(state.value))
        if state is State.BROKEN:
            _item(console, " " * (width + 4), spell(verdict.why), indent=1)
    if verdict.why and State.BROKEN not in verdict.states:
        console.print(Text(verdict.why, Style(color=theme.ERROR)))
    if verdict.output and not verdict.passed:
        console.print()
        console.print(Text("what the code printed, the last lines:", Style(color=theme.FAINT)))
        console.print(Text(verdict.output, Style(color=theme.FAINT)), soft_wrap=True)
    console.print()
    if verdict.passed:
        console.print(
            f"All {len(invariants)} invariants hold. `minivllm learn solution {exercise.name}` shows another way."
        )
    else:
        console.print(f"Not yet. A hint: minivllm learn hint {exercise.name}")


def _hint(args: argparse.Namespace) -> int:
    from minivllm.learn import progress
    from minivllm.learn.exercise import find

    exercise = find(args.exercise)
    here = Path.cwd()
    done = progress.load(here)
    hints = exercise.about.hints
    seen = done[exercise.name].hints
    shown = min(seen + 1, len(hints))
    done[exercise.name].hints = shown
    progress.save(here, done)
    console, spell = _console()
    if seen >= len(hints):
        console.print("There are no more; all of them once again:")
        console.print()
    for number, hint in enumerate(hints[:shown], 1):
        _item(console, f"{number} of {len(hints)}", spell(hint))
    if shown == len(hints):
        console.print()
        said = "" if seen >= len(hints) else "That was the last one. "
        console.print(f"{said}`minivllm learn solution {exercise.name}` prints a solution.")
    return common.OK


def _solution(args: argparse.Namespace) -> int:
    from minivllm.learn.exercise import find

    common.write(find(args.exercise).solution)
    return common.OK


def _console() -> tuple[Console, Callable[[str], str]]:
    """Where to print, and what spells a text with the characters that it has."""
    from minivllm.timeline import theme

    console = common.console()
    return console, theme.glyphs_for(console.encoding).spell


def _style(state: str) -> Style:
    from rich.style import Style

    from minivllm.timeline import theme

    if state in ("passed", "holds"):
        return Style(color=theme.color(theme.FIRST_WORKER_SLOT + 1))
    if state == "broken":
        return Style(color=theme.ERROR, bold=True)
    return Style(color=theme.FAINT)


def _heading(console: Console, exercise: Exercise, spell: Callable[[str], str]) -> None:
    from rich.style import Style
    from rich.text import Text

    console.print(Text(f"{exercise.number} {exercise.name}: {spell(exercise.about.title)}", Style(bold=True)))
    console.print()


def _body(exercise: Exercise) -> str:
    """The task without its first line, which is the title, and without the lines on vLLM and the articles."""
    paragraphs = [" ".join(part.split()) for part in exercise.task.split("\n\n")[1:]]
    return "\n\n".join(part for part in paragraphs if not part.startswith("vLLM 0.25.1:"))


def _item(console: Console, label: str, text: str, style: Style | str = "", indent: int = 0) -> None:
    """A label and a text that is folded beside it."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(label, style), Text(text))
    console.print(table)
