"""The whole engine on two worker processes: start-up, decoding, idling, a worker's death, the end.

python tests/benchmarks/bench_llm.py [--rounds 3] [--vllm-python PATH] [--checkpoint DIR] [--out docs/benchmarks]

Engines: minivllm, and vLLM where it can be imported: by this interpreter, or by the one of --vllm-python. They take turns,
round by round, each time in a fresh process; the figure is the median of the rounds. Without --checkpoint it is the random one of
1.1 million parameters. Prints a table, and with --out also writes llm.json, llm.md and llm.svg there. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from bench_mq import COLOURS, has_vllm  # noqa: E402

ENGINES = ("minivllm", "vllm")
PROMPT = "def make_worker_process("
# Name, unit, whether more is better, and what it is in words.
FIGURES = {
    "start_s": ("s", False, "start-up, until the first request can be sent"),
    "one_tok_s": ("tok/s", True, "greedy decoding, 1 request"),
    "many_tok_s": ("tok/s", True, "greedy decoding, 32 requests, 8 at a time"),
    "rpc_us": ("µs", False, "`collective_rpc` of an empty method through the client"),
    "idle_pct": ("%", False, "processor time of all processes while idle"),
    "down_s": ("s", False, "shutdown, until all processes are gone"),
    "death_s": ("s", False, "SIGKILL of a worker while tokens are made, until the caller has the error"),
}
SHORT = ("start-up", "1 request", "32 requests", "call", "idle", "shutdown", "death")


# --- one engine, in a process of its own


def start(engine: str, checkpoint: str) -> tuple[Any, Any, float]:
    """(the LLM, greedy parameters of 100 tokens, seconds)."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    module = importlib.import_module(engine)
    begun = time.perf_counter()
    llm = module.LLM(
        checkpoint,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
    )
    return (
        llm,
        module.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
        time.perf_counter() - begun,
    )


def processes() -> list[Any]:
    """The engine's processes, without the resource trackers, which end after this process."""
    import psutil

    found = psutil.Process().children(recursive=True)
    return [p for p in found if "resource_tracker" not in " ".join(p.cmdline())]


def cpu_s(of: list[Any]) -> float:
    return sum(p.cpu_times().user + p.cpu_times().system for p in of)


def rate(llm: Any, params: Any, prompts: list[str], times: int = 1) -> float:
    """Tokens per second; each request makes 100."""
    begun = time.perf_counter()
    for _ in range(times):
        llm.generate(prompts, params, use_tqdm=False)
    return 100 * times * len(prompts) / (time.perf_counter() - begun)


def measure(engine: str, checkpoint: str) -> dict[str, float]:
    import psutil

    llm, greedy, start_s = start(engine, checkpoint)
    figures = {"start_s": start_s}

    rate(llm, greedy, [PROMPT])
    figures["one_tok_s"] = rate(llm, greedy, [PROMPT], 10)
    figures["many_tok_s"] = rate(llm, greedy, [f"{PROMPT}{number}" for number in range(32)])
    calls = []
    for _ in range(1050):
        begun = time.perf_counter()
        llm.collective_rpc("check_health")
        calls.append(time.perf_counter() - begun)
    figures["rpc_us"] = statistics.median(calls[50:]) * 1e6
    time.sleep(3)
    family = processes()
    before = cpu_s(family)
    time.sleep(5)
    figures["idle_pct"] = (cpu_s(family) - before) / 5 * 100
    begun = time.perf_counter()
    del llm
    # Both engines end when nobody refers to them any more; vLLM has no other way to end one.
    importlib.import_module("gc").collect()
    psutil.wait_procs(family, timeout=60)
    figures["down_s"] = time.perf_counter() - begun
    return figures


def measure_death(engine: str, checkpoint: str) -> dict[str, float | str]:
    llm, greedy, _ = start(engine, checkpoint)
    greedy.max_tokens = 400
    llm.generate([PROMPT], greedy, use_tqdm=False)
    worker = max(
        (p for p in processes() if "worker" in p.name().lower() + p.cmdline()[0].lower()), key=lambda p: p.pid
    )
    killed = []

    def kill() -> None:
        killed.append(time.perf_counter())
        os.kill(worker.pid, signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    error = "none"
    try:
        while not killed or time.perf_counter() - killed[0] < 60:
            llm.generate([f"{PROMPT}{number}" for number in range(32)], greedy, use_tqdm=False)
    except Exception as e:
        error = f"{type(e).__name__}: {e}".splitlines()[0][:200]
    return {"death_s": time.perf_counter() - killed[0], "error": error}


# --- all of them


def in_own_process(python: str, *arguments: str) -> dict[str, Any] | None:
    command = [python, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            figures: dict[str, Any] = json.loads(line.removeprefix("FIGURES "))
            return figures
    print(f"{' '.join(arguments)} gave no figures: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return None


def version_of(engine: str, python: str) -> str:
    # vLLM's build for CPUs has a name of its own.
    code = (
        "import importlib.metadata as m; "
        f"print(m.version(m.packages_distributions()[{engine!r}][0]), m.version('torch'))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return " with torch ".join(done.stdout.split()) or "of unknown version"


def factor(name: str, figures: dict[str, dict[str, float]]) -> float | None:
    """How much better minivllm's figure is."""
    ours, theirs = (figures.get(engine, {}).get(name) for engine in ENGINES)
    if not ours or not theirs:
        return None
    return ours / theirs if FIGURES[name][1] else theirs / ours


def in_words(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {FIGURES[name][0]}"


def markdown(report: dict[str, Any]) -> str:
    figures = report["figures"]
    both = "vllm" in figures
    engines = [engine for engine in ENGINES if engine in figures]
    lines = [
        "# What the whole engine takes",
        "",
        "Two worker processes, tensor parallelism, a Qwen3 of random weights with 1.1 million parameters, float32, no compiled",
        "model. With a model as small as this one the executor's own work shows, and that is what is compared. vLLM does more than",
        "minivllm: it serves, counts, logs and chooses among hundreds of models and kernels. Of what the difference buys it, none is",
        "in this table.",
        "",
        f"{report['machine']}. Median of {report['rounds']} rounds, the engines in turn; the death once. minivllm "
        f"{report['versions']['minivllm']}"
        + (f", vLLM {report['versions']['vllm']} (CPU build)" if both else "")
        + ". Written by",
        "`tests/benchmarks/bench_llm.py`.",
        "",
        *(["![How many times better each figure is](llm.svg)", ""] if both else []),
        "| | " + " | ".join(engines) + (" | times better |" if both else " |"),
        "|---" * (len(engines) + 1 + both) + "|",
    ]
    for name, (_, _, what) in FIGURES.items():
        cells = [in_words(name, figures[engine].get(name)) for engine in engines]
        if both:
            times = factor(name, figures)
            cells.append("–" if times is None else f"{times:.{times < 100:d}f}")
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    if both:
        rounds = list(zip(*(report["all"][engine] for engine in ENGINES), strict=False))
        spread = [
            f"{min(ratios):.1f} to {max(ratios):.1f} times as fast with {what}"
            for name, what in (("one_tok_s", "1 request"), ("many_tok_s", "32"))
            if (ratios := [ours[name] / theirs[name] for ours, theirs in rounds])
        ]
        lines += ["", f"Round by round, decoding was {' and '.join(spread)}."]
    errors = [f"- {engine}: `{report['errors'][engine]}`" for engine in engines if engine in report["errors"]]
    return "\n".join([*lines, "", "What the caller is told of the worker's death:", "", *errors, ""])


def svg(report: dict[str, Any]) -> str:
    """A bar per figure, logarithmic; the line is vLLM."""
    rows = [
        (label, times)
        for label, name in zip(SHORT, FIGURES, strict=True)
        if (times := factor(name, report["figures"])) is not None
    ]
    left, top, width, height = 90, 16, 520, 24
    low = min(0.0, math.floor(math.log10(min(times for _, times in rows))))
    high = max(1.0, math.ceil(math.log10(max(times for _, times in rows))))
    bottom = top + len(rows) * height

    def x(times: float) -> float:
        return left + (math.log10(times) - low) / (high - low) * width

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 60} {bottom + 30}" '
        'font-family="sans-serif" font-size="11" fill="#444">',
        f'<rect width="{left + width + 60}" height="{bottom + 30}" fill="white"/>',
    ]
    for power in range(int(low), int(high) + 1):
        at = x(10.0**power)
        out.append(
            f'<path d="M{at:.1f} {top}V{bottom}" stroke="{COLOURS["vllm"] if power == 0 else "#ddd"}"/>'
        )
        out.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{10.0**power:g}×</text>')
    for number, (label, times) in enumerate(rows):
        y, begin, end = top + number * height, min(x(1), x(times)), max(x(1), x(times))
        out.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{label}</text>')
        out.append(
            f'<rect x="{begin:.1f}" y="{y + 5}" width="{end - begin:.1f}" height="14" fill="{COLOURS["minivllm"]}"/>'
        )
        out.append(f'<text x="{end + 6:.1f}" y="{y + 16}">{times:.{times < 100:d}f}×</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--checkpoint", help="a local Hugging Face directory")
    parser.add_argument("--out", type=Path, help="directory for llm.json, llm.md and llm.svg")
    parser.add_argument("--measure", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--death", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        figures = (measure_death if options.death else measure)(options.measure, options.checkpoint)
        print("FIGURES " + json.dumps(figures), flush=True)
        return
    pythons = {"minivllm": sys.executable, "vllm": options.vllm_python}
    engines = options.engines.split(",")
    if "vllm" in engines and not has_vllm(options.vllm_python):
        print("vLLM is not installed here: it is left out")
        engines.remove("vllm")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = options.checkpoint
        if checkpoint is None:
            from minivllm.assets.random_checkpoint import PRESETS, make_random_checkpoint

            checkpoint = str(make_random_checkpoint(Path(directory) / "qwen3-1m", **PRESETS["qwen3-1m"]))
        found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
        for number in range(options.rounds):
            for engine in engines:
                figures = in_own_process(pythons[engine], "--measure", engine, "--checkpoint", checkpoint)
                if figures is not None:
                    found[engine].append(figures)
                    said = ", ".join(f"{key} {value:,.2f}" for key, value in figures.items())
                    print(f"round {number + 1}, {engine}: {said}", flush=True)
        errors = {}
        medians = {
            engine: {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
            for engine, rounds in found.items()
            if rounds
        }
        for engine in medians:
            death = in_own_process(
                pythons[engine], "--measure", engine, "--checkpoint", checkpoint, "--death"
            )
            if death is not None:
                medians[engine]["death_s"], errors[engine] = death["death_s"], death["error"]
    report = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, "
        f"Python {platform.python_version()}",
        "versions": {engine: version_of(engine, pythons[engine]) for engine in medians},
        "rounds": options.rounds,
        "figures": medians,
        "errors": errors,
        "all": found,
    }
    text = markdown(report)
    print(text[text.index("| |") :])
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "llm.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "llm.md").write_text(text)
        if "vllm" in medians:
            (options.out / "llm.svg").write_text(svg(report))
        print(f"written to {options.out}")


if __name__ == "__main__":
    main()
