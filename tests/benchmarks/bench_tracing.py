"""What each trace level costs: a queue's round trip, a collective_rpc, and a decode step, against no tracing.

python tests/benchmarks/bench_tracing.py [--rounds 5] [--only queue,rpc,decode] [--out docs/benchmarks [--beside]]

The levels take turns, so that what else the machine does meets all of them. Queue and call are measured in processes of
their own for each level, and the best round counts; the levels of a decode step take turns every few steps of one engine, and
the median of the rounds, an engine each, counts. With --out it also writes tracing.json, tracing.md and tracing.svg; --beside
adds the figures to what is there, as those of another machine. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LEVELS = ("off", "lifecycle", "rpc", "message")
COLOURS = {"lifecycle": "#3f9fe0", "rpc": "#3fb068", "message": "#e0a030"}
WHAT = {
    "queue": ("one message of 100 B and its answer, 1 reader", "µs"),
    "rpc": ("an empty collective_rpc, both of 2 ranks reply", "µs"),
    "decode": ("one decode step of the tiny model, tp=2, 8 requests", "ms"),
}
# What the levels may cost, in per cent of a decode step.
ALLOWED = {"lifecycle": 1.0, "rpc": 5.0, "message": 15.0}
# A turn is so many steps at one level, after some that are not counted; so many turns of each level per generation.
STEPS, SETTLING = 10, 2
TURNS = 2
GENERATIONS = 36


# --- one figure, in its own process -------------------------------------------------------------------


def queue() -> float:
    """p50 of a round trip, in microseconds."""
    import multiprocessing

    from minivllm import tracing
    from minivllm.distributed.shm_broadcast import MessageQueue

    requests = MessageQueue(1, 1, name="there")
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with tracing.child_environment():
        process = context.Process(target=answer, args=(requests.export_handle(), theirs), daemon=True)
        process.start()
    answers = MessageQueue.create_from_handle(mine.recv(), 0)
    requests.wait_until_ready()
    answers.wait_until_ready()
    payload, times = b"x" * 100, []
    for _ in range(6000):
        started = time.perf_counter()
        requests.enqueue(payload)
        answers.dequeue()
        times.append(time.perf_counter() - started)
    requests.enqueue(None)
    process.join(10)
    requests.shutdown()
    answers.shutdown()
    return statistics.median(times[1000:]) * 1e6


def answer(handle: Any, connection: Any) -> None:
    from minivllm import tracing
    from minivllm.distributed.shm_broadcast import MessageQueue

    tracing.configure("worker", rank=0)
    requests = MessageQueue.create_from_handle(handle, 0)
    answers = MessageQueue(1, 1, name="back")
    connection.send(answers.export_handle())
    requests.wait_until_ready()
    answers.wait_until_ready()
    while requests.dequeue(indefinite=True) is not None:
        answers.enqueue(1)
    tracing.shutdown()


def rpc() -> float:
    """p50 of a call, in microseconds."""
    from executor_helpers import make_executor

    executor, times = make_executor(tp=2), []
    for _ in range(4000):
        started = time.perf_counter()
        executor.collective_rpc("echo")
        times.append(time.perf_counter() - started)
    executor.shutdown()
    return statistics.median(times[1000:]) * 1e6


def switch(worker: Any, level: str) -> None:
    """Trace at another level from here on; sent to the workers, and called here without one."""
    from minivllm import tracing

    tracing._apply(LEVELS.index(level))


def decode() -> dict[str, float]:
    """Milliseconds of a step by level, all in one engine.

    Two engines differ by several per cent in what a step takes, depending on where their memory lies, and one engine does
    from second to second, which is more than what is to be measured. So the levels take turns every few steps, in the
    same processes and with the same requests; EngineCore runs in this one, where it can be told. Of all steps of a level
    the mean without the slowest tenth counts, which is what else the machine does.
    """
    from minivllm import LLM, SamplingParams

    times: dict[str, list[float]] = {level: [] for level in LEVELS}
    order = list(LEVELS)
    turns = random.Random(0)
    tokens = 2 + TURNS * len(LEVELS) * (STEPS + SETTLING)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [[10 * i + j + 1 for j in range(8)] for i in range(8)]
    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(tensor_parallel_size=2, device="cpu", trace=directory, trace_level="message") as llm,
    ):
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), use_tqdm=False)
        engine = llm.llm_engine
        for generation in range(GENERATIONS):
            for i, prompt in enumerate(prompts):
                engine.add_request(*engine.process_input(f"{generation}-{i}", prompt, params))
            engine.step()
            for _ in range(TURNS):
                turns.shuffle(order)
                for level in order:
                    llm.collective_rpc(switch, args=(level,))
                    switch(None, level)
                    for number in range(SETTLING + STEPS):
                        started = time.perf_counter()
                        engine.step()
                        if number >= SETTLING:
                            times[level].append(time.perf_counter() - started)
            while engine.has_unfinished_requests():
                engine.step()
        switch(None, "message")
    return {
        level: statistics.fmean(sorted(values)[: len(values) * 9 // 10]) * 1e3
        for level, values in times.items()
    }


def one(name: str) -> dict[str, float]:
    """The figure of the level that this process was started with; of a decode step those of all levels."""
    from minivllm import tracing

    if name == "decode":
        return decode()
    tracing.configure("engine_core")
    figure = {"queue": queue, "rpc": rpc}[name]()
    tracing.shutdown()
    return {os.environ["MINIVLLM_TRACE"]: figure}


def in_own_process(name: str, level: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        own = {"MINIVLLM_TRACE": level, "OMP_NUM_THREADS": "1"}
        if name == "decode":
            own["MINIVLLM_ENABLE_MULTIPROCESSING"] = "0"
        if level != "off":
            own["MINIVLLM_TRACE_DIR"] = directory
        foreign = {k: v for k, v in os.environ.items() if not k.startswith(("MINIVLLM_", "OTEL_"))}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--one", name],
            env={**foreign, **own},
            capture_output=True,
            text=True,
            check=True,
            timeout=90,
        )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


# --- what is written ----------------------------------------------------------------------------------


def percent(figures: dict[str, float], level: str) -> float:
    return (figures[level] / figures["off"] - 1) * 100


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# What tracing costs",
        "",
        "What takes how long at each trace level, and how much more that is than without tracing. The steps of level `lifecycle`",
        "are those of start-up, failure and shutdown: while tokens are computed there are none.",
        "",
        f"{report['machine']}. {report['rounds']} rounds, the levels in turn: the best of a message and of a call, the median of a",
        "decode step, whose levels take turns every few steps of one engine, since two engines differ by more than what tracing",
        "costs.",
        "Written by `tests/benchmarks/bench_tracing.py`.",
        "",
        "![Cost of each level](tracing.svg)",
        "",
        "| | " + " | ".join(LEVELS) + " |",
        "|---|" + "---|" * len(LEVELS),
    ]
    for name, figures in report["figures"].items():
        what, unit = WHAT[name]
        cells = [f"{figures['off']:.3g} {unit}"]
        cells += [
            f"{figures[level]:.3g} {unit} ({percent(figures, level):+.1f} %)"
            for level in LEVELS[1:]
            if level in figures
        ]
        # A figure and its unit, or the sign of per cent, stay on one line.
        joined = " | ".join(re.sub(r"(?<=\d) (?=[%µm])", "\N{NO-BREAK SPACE}", cell) for cell in cells)
        lines.append(f"| {what} | {joined} |")
    others = [other for other in report.get("others", ()) if "decode" in other["figures"]]
    if others:
        lines += ["", "A decode step on other machines:", ""]
        lines += ["| | " + " | ".join(LEVELS) + " |", "|---|" + "---|" * len(LEVELS)]
        for other in others:
            figures = other["figures"]["decode"]
            shares = " | ".join(f"{percent(figures, level):+.1f}\N{NO-BREAK SPACE}%" for level in LEVELS[1:])
            lines.append(
                f"| {other['machine']}; {other['rounds']} rounds | {figures['off']:.3g}\N{NO-BREAK SPACE}ms | {shares} |"
            )
    lines += [
        "",
        "A message or an empty call is the worst case: it is little more than what is traced about it. What counts is the decode step.",
    ]
    if "decode" in report["figures"]:
        figures = report["figures"]["decode"]
        limits = ", ".join(f"{level} {ALLOWED[level]:g} %" for level in ALLOWED)
        kept = all(percent(figures, level) <= ALLOWED[level] for level in ALLOWED)
        lines += [
            f"The limits for a decode step are {limits}; this recording {'keeps' if kept else 'does not keep'} them.",
            "Each of these figures is good to about 1 % of a step: so much do two measurements of the same level differ on a shared machine.",
        ]
    return "\n".join(lines) + "\n"


def svg(report: dict[str, Any]) -> str:
    """A panel per measure, a bar per level: per cent more than without tracing."""
    width, height, left, top, gap = 210, 150, 46, 30, 36
    panels = list(report["figures"].items())
    total, bottom = left + len(panels) * (width + gap), top + height
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {bottom + 60}" font-family="sans-serif" '
        'font-size="11" fill="#444">',
        f'<rect width="{total}" height="{bottom + 60}" fill="white"/>',
    ]
    for number, (name, figures) in enumerate(panels):
        x0 = left + number * (width + gap)
        shares = {level: percent(figures, level) for level in LEVELS[1:]}
        highest = max(1.0, *shares.values())
        out.append(f'<text x="{x0}" y="{top - 12}" font-weight="bold">{name}</text>')
        out.append(f'<path d="M{x0} {bottom}H{x0 + width}" stroke="#bbb"/>')
        for place, (level, share) in enumerate(shares.items()):
            x, tall = x0 + 18 + place * 62, max(0.0, share) / highest * (height - 20)
            out.append(
                f'<rect x="{x}" y="{bottom - tall:.1f}" width="40" height="{tall:.1f}" fill="{COLOURS[level]}"/>'
            )
            out.append(
                f'<text x="{x + 20}" y="{bottom - tall - 5:.1f}" text-anchor="middle">{share:+.1f} %</text>'
            )
            out.append(f'<text x="{x + 20}" y="{bottom + 15}" text-anchor="middle">{level}</text>')
        unit = WHAT[name][1]
        out.append(
            f'<text x="{x0}" y="{bottom + 36}" fill="#777">without tracing {figures["off"]:.3g} {unit}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def machine() -> str:
    processor = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            processor = next(
                (line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""
            )
    except OSError:
        pass
    cores = f"{os.cpu_count()} cores" + (f" ({processor})" if processor else "")
    return f"{cores}, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(WHAT), help="queue, rpc, decode")
    parser.add_argument("--out", type=Path, help="directory for tracing.json, tracing.md and tracing.svg")
    parser.add_argument("--one", choices=list(WHAT), help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help="as another machine's, beside what is there")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    figures: dict[str, dict[str, float]] = {}
    recorded: dict[str, Any] = {}
    if options.out and (options.out / "tracing.json").exists():
        recorded = json.loads((options.out / "tracing.json").read_text())
        if not options.beside:
            # What is not measured now stays.
            figures = recorded["figures"]
    for name in options.only.split(","):
        rounds: dict[str, list[float]] = {level: [] for level in LEVELS}
        for number in range(options.rounds):
            starts = ("off",) if name == "decode" else LEVELS if number % 2 == 0 else LEVELS[::-1]
            for start in starts:
                for level, figure in in_own_process(name, start).items():
                    rounds[level].append(figure)
        # Of the short ones the best: they have two values on this kind of machine, depending on where their memory lies.
        of_all = statistics.median if name == "decode" else min
        figures[name] = {level: of_all(values) for level, values in rounds.items()}
        unit = WHAT[name][1]
        print(
            f"{name:7} "
            + "  ".join(
                f"{level} {value:.3g} {unit}"
                + (f" ({percent(figures[name], level):+.1f} %)" if level != "off" else "")
                for level, value in figures[name].items()
            ),
            flush=True,
        )
    report: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "figures": figures}
    others = [other for other in recorded.get("others", ()) if other["machine"] != report["machine"]]
    if options.beside and recorded:
        report = {**recorded, "others": [*others, report]}
    elif others:
        report["others"] = others
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "tracing.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "tracing.md").write_text(markdown(report))
        (options.out / "tracing.svg").write_text(svg(report))
        print(f"written to {options.out}")


if __name__ == "__main__":
    main()
