"""Walkthroughs run once each in a session, however many tests look at what they printed and recorded."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minivllm.trace_store import TraceStore

ROOT = Path(__file__).resolve().parents[1]


def _load() -> ModuleType:
    """docs/_hooks/outputs.py, without putting its neighbours on the path."""
    spec = importlib.util.spec_from_file_location("docs_outputs", ROOT / "docs" / "_hooks" / "outputs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_outputs"] = module
    spec.loader.exec_module(module)
    return module


outputs = _load()


@dataclass(frozen=True)
class Run:
    """One run of a walkthrough: what it printed (as the pages keep it, and plain), and where its trace is."""

    output: Any
    text: str
    trace: Path

    def store(self) -> TraceStore:
        return TraceStore.open(self.trace)


class Runs:
    """Runs a walkthrough when it is asked for first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._done: dict[str, Run] = {}

    def __call__(self, name: str) -> Run:
        if name not in self._done:
            place = self._directory / name
            place.mkdir()
            output = outputs.run(name, place)
            self._done[name] = Run(output, output.plain, place / outputs.TRACE)
        return self._done[name]
