"""What a walkthrough prints: run it, keep it, draw it, and compare two runs of it.

`make docs-assets` keeps the outputs in docs/outputs/, and a test compares what a walkthrough prints now with what is kept, so
that the pages cannot drift. Nothing here needs MkDocs.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.color import ANSI_COLOR_NAMES, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Span, Text

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ROOT / "docs" / "outputs"
WALKTHROUGHS = ROOT / "walkthroughs"
TRACE = "my-trace"
COLUMNS = 88
# Walkthroughs print in this colour what is not the same in the next run (walkthroughs/common.py, `measured`).
MEASURED = ANSI_COLOR_NAMES["cyan"]


@dataclass(frozen=True)
class Output:
    """What a walkthrough printed, line by line with its colours, and where that was."""

    command: str
    machine: str
    lines: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Output:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(stored["command"], stored["machine"], tuple(stored["lines"]))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def text(self) -> Text:
        return Text.from_ansi("\n".join(self.lines))

    @property
    def plain(self) -> str:
        return self.text.plain

    @property
    def measured(self) -> list[Span]:
        """The parts that differ from run to run."""
        return [
            span
            for span in self.text.spans
            if isinstance(span.style, Style) and span.style.color and span.style.color.number == MEASURED
        ]


def scripts() -> list[str]:
    """The names of all walkthroughs, in the order of the chapters."""
    return sorted(path.stem for path in WALKTHROUGHS.glob("[0-9][0-9]_*.py"))


def run(name: str, directory: Path, device: str = "cpu") -> Output:
    """Run a walkthrough in `directory`, where it leaves its trace. RuntimeError when it fails or complains."""
    arguments = ["--device", device, "--trace", TRACE]
    done = subprocess.run(
        [sys.executable, str(WALKTHROUGHS / f"{name}.py"), *arguments],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode or done.stderr.strip():
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    printed = done.stdout.replace(f"{ROOT}/", "").strip("\n")
    command = " ".join(["python", f"walkthroughs/{name}.py", *arguments])
    return Output(command, machine(device), tuple(printed.split("\n")))


def environment() -> dict[str, str]:
    """Nothing of the caller's settings, and a terminal of a fixed width with colours."""
    from minivllm import envs

    settings = {"NO_COLOR", *envs.environment_variables}
    kept = {key: value for key, value in os.environ.items() if key not in settings}
    return {
        **kept,
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "COLUMNS": str(COLUMNS),
        "OMP_NUM_THREADS": "1",
    }


def machine(device: str) -> str:
    """Where a recording was made, in words."""
    import platform
    from importlib.metadata import version

    hardware = f"{os.cpu_count()} cores, {platform.machine()}"
    if device == "cuda":
        import torch

        hardware = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    python, torch_version = platform.python_version(), version("torch")
    return f"{hardware}, {platform.system()}, Python {python}, torch {torch_version}"


# --- the picture --------------------------------------------------------------------------------------

# Colours that stand for names: `svg` puts the page's variables in their place, so that a picture follows light and dark.
_FOREGROUND, _BACKGROUND = (250, 250, 250), (10, 10, 10)
_ANSI = [(20 + i, 120, 220 - i) for i in range(16)]
_THEME = TerminalTheme(_BACKGROUND, _FOREGROUND, _ANSI[:8], _ANSI[8:])
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
# The width in em makes a character as large as the text around the picture wants it, on every screen.
_PICTURE = (
    '<svg viewBox="0 0 {terminal_width:.0f} HEIGHT" style="width:WIDTHem">'
    "<style>{styles}</style>{backgrounds}{matrix}</svg>"
)


def svg(output: Output, unique_id: str) -> str:
    """The output as Rich exports it, on one line, in the page's fonts and colours."""
    text = output.text
    columns = max(COLUMNS, *(line.cell_len for line in text.split("\n"))) + 1
    console = Console(
        record=True,
        width=columns,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
    )
    console.print(text, soft_wrap=True)
    # Rich's lines are 24.4 high; the rest is for what hangs below the last one.
    height = round(24.4 * len(output.lines)) + 8
    template = _PICTURE.replace("WIDTH", f"{columns * 0.61:.1f}").replace("HEIGHT", str(height))
    picture = console.export_svg(title="", theme=_THEME, code_format=template, unique_id=unique_id)
    picture = re.sub(r' clip-path="[^"]*"|\s*\n\s*', "", picture)
    for colour, name in _variables().items():
        picture = picture.replace(colour, f"var(--terminal-{name})")
    return picture


def _variables() -> dict[str, str]:
    """The page's variable for each colour that the export may hold; what is printed dim is a mixture there."""
    names = {_FOREGROUND: "fg", **{rgb: _NAMES[i % 8] for i, rgb in enumerate(_ANSI)}}
    background = ColorTriplet(*_BACKGROUND)
    found = {}
    for rgb, name in names.items():
        triplet = ColorTriplet(*rgb)
        found[triplet.hex] = name
        found[blend_rgb(triplet, background, 0.4).hex] = "dim" if name == "fg" else name
    return found


# --- what two runs have in common ---------------------------------------------------------------------

_DIFFERS = (
    (r"\S*\w…", "…"),  # cut off by the width of what stands beside it
    (r"(?:/[\w.@+-]+){2,}", "PATH"),
    (r"\b0x[0-9a-f]+\b|\b[0-9a-f]{16,}\b", "HEX"),
    (r"\b\d+\.\d+\.\d+[\w.+]*", "VERSION"),
    (r"\bline \d+", "line N"),
    (r"\b[\d.]+ ?(?:ns|µs|us|ms|s|seconds?)\b", "TIME"),
    (r"\b[\d.]+ ?(?:bytes|B|KiB|MiB|GiB)(?!\w)", "SIZE"),
    # What a live process is at just then is chance.
    (r"\bpid \d+, (?:running|sleeping)\b", "pid N, alive"),
    (r"\bpid \d+", "pid N"),
    (r"\b\d{4,}\b", "N"),
)


def normalised(output: Output) -> list[str]:
    """The words of an output without what differs from run to run.

    That is what the walkthrough prints as measured; and wherever they stand times, sizes, process ids, paths, versions,
    line numbers and whether a process just slept. Line breaks do not count, since they depend on the width of what differs.
    """
    plain = list(output.plain)
    for span in output.measured:
        plain[span.start : span.end] = "\0" * (span.end - span.start)
    words = " ".join(re.sub(r"\0[\s\0]*", " … ", "".join(plain)).split())
    for pattern, name in _DIFFERS:
        words = re.sub(pattern, name, words)
    return words.split()
