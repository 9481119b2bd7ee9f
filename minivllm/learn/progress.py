"""What a learner has done so far, in a small file beside the exercises.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from minivllm.learn.exercise import EXERCISES, Exercise

FILE_NAME = ".minivllm-learn.json"


@dataclass
class Progress:
    """One exercise's.

    Attributes:
        hints: how many have been shown.
        passed: the digest of the file that passed; "" when none has.
    """

    hints: int = 0
    passed: str = ""


def load(folder: Path) -> dict[str, Progress]:
    """By exercise. A file that is missing or makes no sense is no progress."""
    try:
        data = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        return {
            exercise.name: Progress(
                int(data.get(exercise.name, {}).get("hints", 0)),
                str(data.get(exercise.name, {}).get("passed", "")),
            )
            for exercise in EXERCISES
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {exercise.name: Progress() for exercise in EXERCISES}


def save(folder: Path, progress: dict[str, Progress]) -> None:
    """Best effort: in a folder that cannot be written, hints start again."""
    try:
        text = json.dumps(
            {name: asdict(one) for name, one in progress.items() if one != Progress()}, indent=1
        )
        (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")
    except OSError:
        pass


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def state_of(exercise: Exercise, folder: Path, progress: Progress) -> str:
    """`passed`, `changed since it passed`, `started`, or ""."""
    file = folder / exercise.file_name
    try:
        now = digest(file)
    except OSError:
        return ""
    if progress.passed:
        return "passed" if progress.passed == now else "changed since"
    return "started"
