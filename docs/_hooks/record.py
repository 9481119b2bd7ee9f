"""Record what the pages show: `make docs-assets [ARGS="NAME... --device cuda"]`.

A run is a real run of `minivllm generate`. What is kept in docs/runs/NAME is its trace, one OTLP/JSON file per process,
without what is only true of the machine it ran on (paths, host name). Of a walkthrough, docs/outputs/NAME.json keeps what it
prints. On a GPU, walkthroughs alone are recorded; output and trace go to minivllm/assets/traces/<gpu>/NAME/.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import commands
import outputs

from minivllm.tracing.spool_reader import read_process

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "docs" / "runs"


@dataclass(frozen=True)
class Recording:
    """One run.

    Attributes:
        arguments: of `minivllm generate`.
        failpoints: value of MINIVLLM_FAILPOINTS.
        code: exit code that the run must have.
        runner: value of MINIVLLM_USE_V2_MODEL_RUNNER.
        batches: value of MINIVLLM_MAX_CONCURRENT_BATCHES.
    """

    arguments: tuple[str, ...]
    failpoints: str = ""
    code: int = 0
    runner: str = ""
    batches: str = ""


PROMPTS = ("A generator is", "The import statement", "Exceptions are")
TP1 = ("--tp", "1", "--max-tokens", "8", "--trace-level")
TP2 = ("--tp", "2", "--max-tokens", "8", "--trace-level")
# A step takes one of them, so that two stages get batches of their own.
LONGER = tuple(
    f"{prompt} is a thing that the reference describes"
    for prompt in ("A class", "A name", "A scope", "A value")
)
PP2 = ("--tp", "1", "--pp", "2", "--max-num-batched-tokens", "12", "--max-tokens", "10", "--trace-level")
PP2_TP2 = ("--tp", "2", "--pp", "2", "--max-tokens", "4", "--trace-level")
RECORDINGS = {
    "tp2": Recording((*PROMPTS, *TP2, "message")),
    "tp2-pp2": Recording((PROMPTS[0], *PP2_TP2, "lifecycle")),
    "slow-device": Recording((*PROMPTS, *TP2, "lifecycle"), "worker.init_device@rank1=sleep:1"),
    "raise-in-class": Recording((*PROMPTS, *TP2, "lifecycle"), "worker.init_worker@rank1=raise", code=1),
    "kill-in-collective": Recording(
        (*PROMPTS, *TP2, "lifecycle"), "dist.init_communicator@rank1#2=kill", code=1
    ),
    "kill-in-load": Recording((*PROMPTS, *TP2, "lifecycle"), "worker.load_model@rank1=kill", code=1),
    "kill-in-profile": Recording((*PROMPTS, *TP2, "lifecycle"), "runner.profile_run@rank1=kill", code=1),
    "slow-sampler": Recording((PROMPTS[0], *TP2, "message"), "runner.sample_tokens@rank1#8=sleep:0.3"),
    "kill-in-step": Recording((*PROMPTS, *TP2, "rpc"), "model.forward@rank1#6=kill", code=1),
    "raise-in-step": Recording((*PROMPTS, *TP2, "rpc"), "model.forward@rank1#6=raise", code=1),
    "runner-v1": Recording((*PROMPTS, *TP1, "rpc"), runner="0"),
    "runner-v2": Recording((*PROMPTS, *TP1, "rpc"), runner="1"),
    "pipeline": Recording((*LONGER, *PP2, "rpc")),
    "pipeline-no-queue": Recording((*LONGER, *PP2, "rpc"), batches="1"),
    "async": Recording((*LONGER, *TP2, "rpc", "--async-scheduling")),
}


# Runs that no command makes.
RUNS_OF_WALKTHROUGHS = {"futures": "10_collective_rpc"}


def record(name: str) -> None:
    recording = RECORDINGS[name]
    with tempfile.TemporaryDirectory() as temp:
        trace = Path(temp) / "trace"
        command = [
            sys.executable,
            "-m",
            "minivllm.cli.main",
            "generate",
            *recording.arguments,
            "--trace",
            str(trace),
        ]
        environment = {
            **os.environ,
            "MINIVLLM_FAILPOINTS": recording.failpoints,
            "MINIVLLM_USE_V2_MODEL_RUNNER": recording.runner,
            "MINIVLLM_MAX_CONCURRENT_BATCHES": recording.batches,
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, env=environment, cwd=ROOT, timeout=120, check=False, capture_output=True, text=True
        )
        if done.returncode != recording.code:
            raise SystemExit(f"{name}: exit code {done.returncode}, expected {recording.code}\n{done.stderr}")
        target = RUNS / name
        keep(trace, target)
    if name == "tp2":
        picture(target)
    print(f"{name}: {sum(p.stat().st_size for p in target.iterdir()) // 1024} KiB")


def keep(trace: Path, target: Path) -> None:
    """Put a trace in the place of the one that is there."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(trace.iterdir()):
        if path.suffix == ".jsonl":
            text = path.read_text(encoding="utf-8")
            if not path.name.endswith(".journal.jsonl"):
                # What a killed process could not bring into this form itself.
                found = read_process(path.with_suffix(".spool"), path.with_suffix(".spans"))
                text += b"".join(found.lines).decode()
            (target / path.name).write_text(anonymous(text, str(trace)), encoding="utf-8")


def record_walkthrough(name: str, device: str) -> None:
    with tempfile.TemporaryDirectory() as temp:
        output = outputs.run(name, Path(temp), device)
        if device == "cuda":
            target = ROOT / "minivllm" / "assets" / "traces" / gpu_name() / name
            keep(Path(temp) / outputs.TRACE, target)
            output.write(target / "output.json")
        else:
            output.write(outputs.OUTPUTS / f"{name}.json")
            for run, walkthrough in RUNS_OF_WALKTHROUGHS.items():
                if walkthrough == name:
                    keep(Path(temp) / outputs.TRACE, RUNS / run)
    print(f"{name}: {len(output.lines)} lines")


def gpu_name() -> str:
    import torch

    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")


def picture(run: Path) -> None:
    """The timeline that the README and the home page show."""
    from minivllm.timeline import build_views
    from minivllm.timeline.export import views_to_svg
    from minivllm.trace_store import TraceStore

    views = build_views(TraceStore.open(run), ["spawn"])
    (ROOT / "docs" / "assets" / "spawn.svg").write_text(views_to_svg(views, 110), encoding="utf-8")


def anonymous(text: str, trace: str) -> str:
    """Without paths and names of this machine."""
    text = text.replace(f"{ROOT}/", "").replace(trace, "trace")
    library = re.escape(str(Path(os.__file__).parent))
    text = re.sub(rf"(?:{library}|\.venv/lib/python[0-9.]+)/(?:site-packages/)?", "", text)
    return text.replace(f'"{socket.gethostname()}"', '"host"')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="runs, walkthroughs, and commands for those on the pages (default: all)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    runs = list(RECORDINGS) if args.device == "cpu" else []
    known = [*runs, *outputs.scripts(), *(["commands"] if args.device == "cpu" else [])]
    for name in args.names or known:
        if name not in known:
            parser.error(f"{name} is none of {', '.join(known)}")
        if name == "commands":
            with tempfile.TemporaryDirectory() as temp:
                commands.record(Path(temp))
        elif name in RECORDINGS:
            record(name)
        else:
            record_walkthrough(name, args.device)


if __name__ == "__main__":
    main()
