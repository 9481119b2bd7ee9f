"""The commands on the pages: find them, run them as written, and keep what came of it.

`make docs-assets ARGS=commands` runs every command of README and pages in the order of the pages, in one directory, and keeps
exit codes and times in docs/outputs/commands.json. A test fails for a command that was never run. Those that a test runs anyway,
or that need a terminal, Docker or a package index, are recognised by ELSEWHERE.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import outputs

ROOT = outputs.ROOT
RECORD = ROOT / "docs" / "outputs" / "commands.json"
# What runs a command of this form; a file of this checkout.
ELSEWHERE = {
    r"make .*": "Makefile",
    r"pip install 'minivllm\[\w+\]'": "pyproject.toml",
    r"source \.venv/bin/activate": "Makefile",
    r"python walkthroughs/\d\d_\w+\.py": "tests/test_walkthroughs.py",
    r"python -m pytest tests/test_runner_v1\.py .*": "tests/test_runner_v1.py",
    r"python tests/benchmarks/bench_runners\.py": "tests/benchmarks/bench_runners.py",
    r"docker run .*jaeger.*": "tests/test_jaeger.py",
    r"minivllm export .*--otlp .*": "tests/test_jaeger.py",
    r"MINIVLLM_JAEGER_URL=.*": "tests/test_jaeger.py",
    r"minivllm step \S+": "tests/test_step.py",
    r"minivllm demo --live-step": "tests/test_live_step.py",
}
# Those that take a moment and start no engine.
QUICK = re.compile(
    r"(?:MINIVLLM_USE_V2_MODEL_RUNNER=1 )?minivllm (?:timeline|spans|doctor|learn list|export .*--html)\b.*"
)
# What a page says will fail: breaks the run, is refused, or checks an exercise that nobody has solved yet.
_FAILS = r".*FAILPOINTS=\"[^\"]*=(kill|raise|hang)\".*|.*MODEL_RUNNER=1 .*raw_logits|.*learn check .*|.*KVCACHE_BYTES=.*"
# A hanging clean-up is ended by the executor, and the run itself went well.
_FAILS_NOT = r".*worker\.shutdown@rank1=hang.*"

_BLOCK = re.compile(r"^(?P<indent> *)```sh\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S)
_INLINE = (
    r"(?:[A-Z_0-9]+=\S+ )+minivllm \w+.*"
    r"|(?:[A-Z_0-9]+=\S+ )*(?:(?:minivllm|python) \S+ \S|make \S|pip install|docker run|source ).*"
)


def pages() -> list[Path]:
    """README and what is written by hand; other languages have the same commands, which another test checks."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(path for path in found if not path.name.endswith(".zh.md"))]


def on_page(path: Path) -> list[str]:
    """The commands of a page: the lines of its shell blocks, and what stands in `code` and is one."""
    text = path.read_text(encoding="utf-8")
    lines = []
    for match in _BLOCK.finditer(text):
        for line in match["body"].replace("\\\n", "").splitlines():
            lines.append(re.sub(r"(^|\s+)#(?![\d*]).*$", "", line))
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    lines += [
        code for code in re.findall(r"`([^`]+)`", prose) if re.fullmatch(_INLINE, " ".join(code.split()))
    ]
    return [" ".join(line.split()) for line in lines if line.strip()]


def everything() -> dict[str, list[str]]:
    """Every command, with the pages that have it, in the order of the pages."""
    found: dict[str, list[str]] = {}
    for page in pages():
        for command in on_page(page):
            found.setdefault(command, []).append(page.name)
    return found


def elsewhere(command: str) -> str:
    """The file that runs a command of this kind, "" when `record` does."""
    return next((file for form, file in ELSEWHERE.items() if re.fullmatch(form, command)), "")


def may_fail(command: str) -> bool:
    return bool(re.fullmatch(_FAILS, command)) and not re.fullmatch(_FAILS_NOT, command)


def prepare(directory: Path, page: Path) -> None:
    """What a reader has who comes to the commands of a page: the checkout, and traces, unless the page makes them."""
    directory.mkdir(parents=True)
    for name in ("docs", "tests", "walkthroughs"):
        (directory / name).symlink_to(ROOT / name)
    for name, recorded in (("DIR", "tp2"), ("traces/run", "tp2"), ("traces/other-run", "kill-in-step")):
        if not any(f"--trace {name}" in command for command in on_page(page)):
            shutil.copytree(ROOT / "docs" / "runs" / recorded, directory / name)


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run it as written, by a shell in which the environment's commands are found."""
    environment = outputs.environment()
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def record(directory: Path) -> None:
    """Run what nothing else runs, page by page, and keep it. RuntimeError for what fails and should not, or is none."""
    codes: dict[str, int] = {}
    wrong = []
    for page in pages():
        new = [c for c in on_page(page) if not elsewhere(c) and (c not in codes or "--trace " in c)]
        if new:
            place = directory / page.relative_to(ROOT).with_suffix("")
            prepare(place, page)
        for command in dict.fromkeys(new):
            began = time.monotonic()
            done = run(command, place)
            codes[command] = done.returncode
            print(f"{time.monotonic() - began:5.1f} s, {done.returncode}  {command}", flush=True)
            if not as_meant(command, done):
                wrong.append(f"{page.name}: {command}\n{done.stdout[-2000:]}\n{done.stderr}")
    if wrong:
        raise RuntimeError("\n\n".join(wrong))
    kept = {"machine": outputs.machine("cpu"), "exit codes": codes}
    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def as_meant(command: str, done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a command did what its page says: went well or failed, and was understood."""
    return (
        done.returncode in (0, 1, 2)
        and bool(done.returncode) == may_fail(command)
        and "usage:" not in done.stderr
    )


def recorded() -> dict[str, int]:
    codes: dict[str, int] = json.loads(RECORD.read_text(encoding="utf-8"))["exit codes"]
    return codes
