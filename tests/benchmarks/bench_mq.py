"""Round trips by channel, message size and number of readers: one message to all readers, one answer from each.

python tests/benchmarks/bench_mq.py [--readers 1,2,4] [--rounds 3] [--vllm-python PATH] [--out docs/benchmarks]

Channels: minivllm's MessageQueue, multiprocessing.Queue, Pipe, ZMQ (PUSH/PULL over ipc), vLLM's own MessageQueue where it
can be imported (by this interpreter, or by the one of --vllm-python), and the copies alone, which is no queue but the
least that a message through shared memory takes. Channels take turns, round by round; the figure is the median of a
round, and of all rounds the best. Prints a table, and with --out also writes mq.json, mq.md and mq.svg there. Run it on
an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import mmap
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = (100, 10_000, 1_000_000, 8_000_000, 30_000_000)
CHANNELS = ("minivllm", "vllm", "mp.Queue", "Pipe", "ZMQ", "copies alone")
COLOURS = {
    "minivllm": "#0b7a75",
    "vllm": "#d1495b",
    "mp.Queue": "#8d6a9f",
    "Pipe": "#edae49",
    "ZMQ": "#5c7aea",
    "copies alone": "#999999",
}


def runs(size: int, crowd: bool) -> int:
    """Fewer of the large ones; fewer of all with slow channels."""
    return (2000 if size <= 10_000 else 200 if size <= 1_000_000 else 30) // (1 if crowd else 2)


class Copies:
    """A copy into shared memory, a flag, and a copy out of it by each reader: what the machine needs, and no queue.

    Nobody sleeps, nothing is pickled, there is one message at a time and no fence.
    """

    HEADER, SLOTS, SLOT_BYTES = 4096, 10, 1 << 20
    LAST = 2**64 - 1

    def __init__(self, path: str, create: bool = False) -> None:
        size = self.HEADER + max(self.SLOTS * self.SLOT_BYTES, SIZES[-1])
        with open(path, "w+b" if create else "r+b") as file:
            if create:
                os.posix_fallocate(file.fileno(), 0, size)
            self.memory = mmap.mmap(file.fileno(), size)
        self.number = 0

    def send(self, payload: bytes | None) -> None:
        size = self.LAST if payload is None else len(payload)
        # As many places as a ring has slots, where they fit in.
        place = self.number % self.SLOTS * self.SLOT_BYTES if size <= self.SLOT_BYTES else 0
        start = self.HEADER + place
        if payload is not None:
            self.memory[start : start + size] = payload
        struct.pack_into("<QQ", self.memory, 8, size, start)
        self.number += 1
        self.memory[0] = self.number % 251

    def receive(self) -> bytes | None:
        self.number += 1
        self._wait(0)
        size, start = struct.unpack_from("<QQ", self.memory, 8)
        return None if size == self.LAST else self.memory[start : start + size]

    def answer(self, rank: int) -> None:
        self.memory[64 * (rank + 1)] = self.number % 251

    def answered(self, rank: int) -> None:
        self._wait(64 * (rank + 1))

    def _wait(self, flag: int) -> None:
        while self.memory[flag] != self.number % 251:
            os.sched_yield()


# One channel: `parent(n)` returns (what the readers need, send to all, receive one from each, close).


def message_queue(module: str) -> Any:
    import importlib

    return importlib.import_module(module).MessageQueue


MODULES = {
    "minivllm": "minivllm.distributed.shm_broadcast",
    "vllm": "vllm.distributed.device_communicators.shm_broadcast",
}


def reader(channel: str, rank: int, setup: Any, conn: Any) -> None:
    """Answers 1 to each message until None comes."""
    if channel in MODULES:
        queue = message_queue(MODULES[channel])
        requests = queue.create_from_handle(setup, rank)
        answers = queue(1, 1)
        conn.send(answers.export_handle())
        requests.wait_until_ready()
        answers.wait_until_ready()
        receive: Callable[[], Any] = lambda: requests.dequeue(indefinite=True)  # noqa: E731
        send: Callable[[Any], Any] = answers.enqueue
    elif channel == "mp.Queue":
        receive, send = setup[0][rank].get, setup[1][rank].put
    elif channel == "Pipe":
        receive, send = setup[rank].recv, setup[rank].send
    elif channel == "copies alone":
        copies = Copies(setup)
        receive, send = copies.receive, lambda _: copies.answer(rank)
    else:
        import zmq

        context = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.connect(f"ipc://{setup}/requests-{rank}")
        push.connect(f"ipc://{setup}/answers-{rank}")
        receive, send = pull.recv_pyobj, push.send_pyobj
    while receive() is not None:
        send(1)


def measure(channel: str, n: int, sizes: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """Median and 99th percentile of a round trip, in microseconds, by size."""
    context = multiprocessing.get_context("spawn")
    directory = tempfile.mkdtemp(prefix="mq-")
    sends: list[Callable[[Any], Any]] = []
    receives: list[Callable[[], Any]] = []
    setups: list[Any] = [None] * n
    ends: list[Any] = []
    if channel in MODULES:
        requests = message_queue(MODULES[channel])(n, n)
        setups = [requests.export_handle()] * n
        sends = [requests.enqueue]
        ends.append(requests)
    elif channel == "mp.Queue":
        there, back = [context.Queue() for _ in range(n)], [context.Queue() for _ in range(n)]
        setups = [(there, back)] * n
        sends, receives = [q.put for q in there], [q.get for q in back]
    elif channel == "Pipe":
        pairs = [context.Pipe() for _ in range(n)]
        setups = [[theirs for _, theirs in pairs]] * n
        sends, receives = [mine.send for mine, _ in pairs], [mine.recv for mine, _ in pairs]
    elif channel == "copies alone":
        descriptor, path = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else directory)
        os.close(descriptor)
        copies = Copies(path, create=True)
        setups = [path] * n
        sends = [copies.send]
        receives = [functools.partial(copies.answered, rank) for rank in range(n)]
    else:
        import zmq

        zmq_context = zmq.Context()
        for rank in range(n):
            push, pull = zmq_context.socket(zmq.PUSH), zmq_context.socket(zmq.PULL)
            push.bind(f"ipc://{directory}/requests-{rank}")
            pull.bind(f"ipc://{directory}/answers-{rank}")
            sends.append(push.send_pyobj)
            receives.append(pull.recv_pyobj)
        setups = [directory] * n
    processes, conns = [], []
    for rank in range(n):
        mine, theirs = context.Pipe()
        process = context.Process(target=reader, args=(channel, rank, setups[rank], theirs), daemon=True)
        process.start()
        processes.append(process)
        conns.append(mine)
    if channel in MODULES:
        answers = [message_queue(MODULES[channel]).create_from_handle(conn.recv(), 0) for conn in conns]
        for end in [*ends, *answers]:
            end.wait_until_ready()
        receives = [answer.dequeue for answer in answers]
        ends += answers
    found = {}
    for size in sizes:
        payload = b"x" * size
        count = runs(size, channel in MODULES)
        times = []
        for _ in range(count + 3):
            started = time.perf_counter()
            for send in sends:
                send(payload)
            for receive in receives:
                receive()
            times.append(time.perf_counter() - started)
        times = sorted(times[3:])
        found[size] = (times[count // 2] * 1e6, times[int(count * 0.99)] * 1e6)
    for send in sends:
        send(None)
    for process in processes:
        process.join(10)
    if channel == "minivllm":
        for end in ends:
            end.shutdown()
    if channel == "ZMQ":
        zmq_context.destroy(linger=0)
    if channel == "copies alone":
        os.unlink(path)
    subprocess.run(["rm", "-r", directory], check=False)
    return found


def in_own_process(
    channel: str, n: int, python: str, sizes: tuple[int, ...]
) -> dict[int, tuple[float, float]] | None:
    """Each measurement in a fresh interpreter, which for vLLM may be another one; None where it cannot be done."""
    command = [python, str(Path(__file__).resolve()), "--measure", channel, "--readers", str(n)]
    command += ["--sizes", ",".join(map(str, sizes))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return {int(size): tuple(pair) for size, pair in json.loads(line).items()}
    print(
        f"{channel} with {n} readers gave no figures: {done.stderr.strip().splitlines()[-1:]}",
        file=sys.stderr,
    )
    return None


def has_vllm(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def vllm_version(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
    return subprocess.run([python, "-c", code], capture_output=True, check=True, text=True).stdout.strip()


# What is written


def words(size: int) -> str:
    return (
        f"{size // 1_000_000} MB"
        if size >= 1_000_000
        else f"{size // 1000} kB"
        if size >= 1000
        else f"{size} B"
    )


def duration(us: float) -> str:
    return f"{us / 1000:.1f} ms" if us >= 1000 else f"{us:.0f} µs" if us >= 100 else f"{us:.1f} µs"


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# What a message costs",
        "",
        "Median round trip: one message to all readers, one small answer from each. Slots differ in size: 8 MB are too large for",
        "one of minivllm's (1 MiB), fit one of vLLM's (24 MiB), and 30 MB are too large for both. Readers differ in how they wait:",
        "vLLM's poll for a second after each message, and so never sleep here, minivllm's sleep after 200 µs.",
        "",
        *(
            [
                '"copies alone" is no queue: one copy into shared memory, a flag, and a copy out of it by each reader, who polls',
                "without end. Large messages can be quicker than that, since here readers begin before the writer has ended.",
                "",
            ]
            if "copies alone" in report["channels"]
            else []
        ),
        f"{report['machine']}. Written by `tests/benchmarks/bench_mq.py`.",
        "",
        "![Round trip by message size](mq.svg)",
        "",
    ]
    channels = report["channels"]
    header = "| readers | message | " + " | ".join(channels)
    ratio = "vllm" in channels
    lines += [
        header + (" | minivllm / vllm |" if ratio else " |"),
        "|" + "---|" * (2 + len(channels) + ratio),
    ]
    for n, by_size in report["p50_us"].items():
        for size, by_channel in by_size.items():
            cells = [duration(by_channel[c]) if c in by_channel else "–" for c in channels]
            line = f"| {n} | {words(int(size))} | " + " | ".join(cells)
            if ratio:
                both = "minivllm" in by_channel and "vllm" in by_channel
                line += f" | {by_channel['minivllm'] / by_channel['vllm']:.2f}" if both else " | –"
            lines.append(line + " |")
    return "\n".join(lines) + "\n"


def svg(report: dict[str, Any]) -> str:
    """A panel per number of readers, both axes logarithmic."""
    panels = list(report["p50_us"].items())
    width, height, left, top, gap = 250, 230, 56, 34, 48
    values = [v for _, sizes in panels for channels in sizes.values() for v in channels.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    sizes = [int(size) for size in panels[0][1]]
    x_low, x_high = math.log10(sizes[0]), math.log10(sizes[-1])
    total = left + len(panels) * (width + gap)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {top + height + 62}" font-family="sans-serif" '
        'font-size="11" fill="#444">',
        f'<rect width="{total}" height="{top + height + 62}" fill="white"/>',
    ]
    for number, (n, by_size) in enumerate(panels):
        x0 = left + number * (width + gap)

        def x(size: float, x0: float = x0) -> float:
            return x0 + (math.log10(size) - x_low) / ((x_high - x_low) or 1) * width

        def y(us: float) -> float:
            return top + height - (math.log10(us) - low) / (high - low) * height

        out.append(
            f'<text x="{x0}" y="{top - 12}" font-weight="bold">{n} reader{"s" if int(n) > 1 else ""}</text>'
        )
        for power in range(low, high + 1):
            line = y(10**power)
            out.append(f'<path d="M{x0} {line:.1f}H{x0 + width}" stroke="#ddd"/>')
            if number == 0:
                label = f"{10**power} µs" if power < 3 else f"{10 ** (power - 3)} ms"
                out.append(f'<text x="{x0 - 6}" y="{line + 4:.1f}" text-anchor="end">{label}</text>')
        for size in sizes:
            out.append(
                # In two rows by turns: the largest sizes stand close together on this axis.
                f'<text x="{x(size):.1f}" y="{top + height + 16 + 13 * (SIZES.index(size) % 2)}" '
                f'text-anchor="middle">{words(size)}</text>'
            )
        for channel in report["channels"]:
            points = [(x(int(s)), y(c[channel])) for s, c in by_size.items() if channel in c]
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            out.append(f'<path d="{path}" fill="none" stroke="{COLOURS[channel]}" stroke-width="2"/>')
            out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLOURS[channel]}"/>' for a, b in points]
    for number, channel in enumerate(report["channels"]):
        x0, y0 = left + number * 110, top + height + 42
        out.append(f'<path d="M{x0} {y0 - 4}h18" stroke="{COLOURS[channel]}" stroke-width="3"/>')
        out.append(f'<text x="{x0 + 24}" y="{y0}">{channel}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers", default="1,2,4")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--channels", default=",".join(CHANNELS))
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--out", type=Path, help="directory for mq.json, mq.md and mq.svg")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = tuple(map(int, options.sizes.split(",")))
    if options.measure:
        print(json.dumps(measure(options.measure, int(options.readers), sizes)))
        return
    channels = options.channels.split(",")
    if "vllm" in channels and not has_vllm(options.vllm_python):
        print("vLLM is not installed here: its queue is left out")
        channels.remove("vllm")
    # Not at the top: a reader of vLLM's queue, in vLLM's own environment, has no use for it.
    from bench_tracing import machine

    best: dict[str, dict[str, dict[str, float]]] = {}
    for n in map(int, options.readers.split(",")):
        table = best.setdefault(str(n), {str(size): {} for size in sizes})
        for _ in range(options.rounds):
            for channel in channels:
                python = options.vllm_python if channel == "vllm" else sys.executable
                for size, (p50, _p99) in (in_own_process(channel, n, python, sizes) or {}).items():
                    row = table[str(size)]
                    row[channel] = min(p50, row.get(channel, p50))
        for size, row in table.items():
            print(
                f"{n} readers, {words(int(size)):>6}: "
                + ", ".join(f"{c} {duration(v)}" for c, v in row.items())
            )
    report = {
        "machine": machine() + (f", vLLM {vllm_version(options.vllm_python)}" if "vllm" in channels else ""),
        "channels": channels,
        "p50_us": best,
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "mq.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "mq.md").write_text(markdown(report))
        (options.out / "mq.svg").write_text(svg(report))
        print(f"written to {options.out}")


if __name__ == "__main__":
    main()
