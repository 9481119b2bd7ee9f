"""Every walkthrough runs alone, with the options that all have, and ends by saying how to look further."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WALKTHROUGHS = sorted((ROOT / "walkthroughs").glob("[0-9][0-9]_*.py"))


@pytest.mark.parametrize("path", WALKTHROUGHS, ids=lambda path: path.stem)
@pytest.mark.timeout(150)
def test_walkthrough(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path), "--device", "cpu", "--trace", str(tmp_path / "trace")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr.strip(), done.stderr
    assert "To look further" in done.stdout
    assert list((tmp_path / "trace").glob("*.jsonl"))
    if path.stem == "09_message_queue":
        assert "got 4 of 4" in done.stdout
        assert "waits for reader rank 1" in done.stdout
