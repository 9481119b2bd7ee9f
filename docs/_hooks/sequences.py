"""Sequence diagrams of recorded runs: who told whom what, in the order in which it happened.

A block

    ```sequence
    run: tp2
    of: init
    ```

becomes the diagram, made from docs/runs/tp2 at each build, in the page's own colours. `of` is one of init, rpc, futures,
failure and shutdown; `call` is the number of the call that `rpc` shows. Rows are moments; their distances are no measure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page
from timelines import RUNS

from minivllm.trace_store import Span, TraceStore

_BLOCK = re.compile(r"^```sequence\n(?P<body>.*?)^```$", re.M | re.S)
_KEYS = {"run", "of", "call"}

GUTTER, ROW, TOP = 66, 31, 44
BOX = 230
ENGINE = "EngineCore"

TEXTS = {
    "en": "From a recorded run, in the order of events; as a timeline: `{command}`",
    "zh": "取自一次录制的运行，按事件先后排列；对应的时间线：`{command}`",
}


@dataclass
class Diagram:
    """Lanes and what happens on and between them.

    Attributes:
        rows: moment, and the row's drawing as a function of its y.
        bars: lane, begin and end of something that lasts.
    """

    lanes: list[str]
    rows: list[tuple[int, Callable[[int], str]]] = field(default_factory=list)
    bars: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def lane(self) -> int:
        """A lane's width: what makes three or four fit a page."""
        return 232 if len(self.lanes) < 4 else 178

    def x(self, lane: str) -> int:
        return GUTTER + self.lane // 2 + self.lane * self.lanes.index(lane)

    def step(self, lane: str, moment: int, text: str, style: str = "box") -> None:
        """Something that a process does by itself."""
        x = self.x(lane)

        def draw(y: int) -> str:
            width = min(BOX, 14 + round(6.95 * len(text)))
            return (
                f'<rect class="{style}" x="{x - width // 2}" y="{y - 11}" width="{width}" height="22" rx="3"/>'
                f'<text class="mono" x="{x}" y="{y + 4}" text-anchor="middle">{escape(text)}</text>'
            )

        self.rows.append((moment, draw))

    def span(self, lane: str, span: Span, more: str = "") -> None:
        """A step, named after its span."""
        self.step(lane, span.start_ns, f"{span.name}{more}")

    def arrow(self, moment: int, source: str, target: str, text: str, style: str = "line") -> None:
        """What one process gets from another one."""
        a, b = self.x(source), self.x(target)
        head = "head-shm" if "shm" in style else "head"

        def draw(y: int) -> str:
            tip = 7 if b > a else -7
            middle = (a + b) // 2
            return (
                f'<path class="{style}" d="M{a} {y + 6}H{b - tip}"/>'
                f'<path class="{head}" d="M{b} {y + 6}l{-tip - tip // 4} -4v8z"/>'
                f'<text class="small" x="{middle}" y="{y}" text-anchor="middle">{escape(text)}</text>'
            )

        self.rows.append((moment, draw))

    def lasts(self, lane: str, span: Span) -> None:
        self.bars.append((lane, span.start_ns, span.end_ns))

    def svg(self, label: str) -> str:
        rows = sorted(self.rows, key=lambda row: row[0])
        zero = rows[0][0]
        width, height = GUTTER + self.lane * len(self.lanes) + 8, TOP + ROW * len(rows) - 6
        parts = []
        for lane in self.lanes:
            x = self.x(lane)
            parts.append(f'<path class="line dashed" d="M{x} 30V{height}"/>')
        for lane, begin, end in self.bars:
            ys = [TOP + ROW * n for n, (moment, _) in enumerate(rows) if begin <= moment <= end]
            if ys:
                top, bottom = ys[0], max(ys[-1] + 12, ys[0] + 20)
                parts.append(
                    f'<rect class="bar" x="{self.x(lane) - 5}" y="{top}" width="10" height="{bottom - top}" rx="2"/>'
                )
        last = ""
        for number, (moment, draw) in enumerate(rows):
            y = TOP + ROW * number
            at = f"{(moment - zero) / 1e6:,.1f} ms".replace(",", " ")
            if at != last:
                parts.append(
                    f'<text class="small" x="{GUTTER - 6}" y="{y + 4}" text-anchor="end">{at}</text>'
                )
                last = at
            parts.append(draw(y))
        for lane in self.lanes:
            x = self.x(lane)
            parts.append(f'<rect class="box" x="{x - 70}" y="4" width="140" height="24" rx="4"/>')
            parts.append(f'<text x="{x}" y="21" text-anchor="middle">{lane}</text>')
        return (
            f'<svg class="sequence" viewBox="0 0 {width} {height}" style="min-width:{width * 0.9:.0f}px;max-width:{width}px" role="img" '
            f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
        )


def rank(number: int | None) -> str:
    return f"rank {number}"


def ranks_of(store: TraceStore) -> list[int]:
    return sorted({process.rank for process in store.processes() if process.rank is not None})


def init(store: TraceStore, call: int) -> Diagram:
    found = ranks_of(store)
    diagram = Diagram([ENGINE, *map(rank, found)])
    for name in (
        "parallel_sizes",
        "set_worker_envs",
        "distributed_init_method",
        "create_broadcast_mq",
        "wait_for_ready",
        "start_worker_monitor",
        "collect_response_mqs",
        "post_init",
    ):
        (span,) = store.spans(f"executor.{name}")
        diagram.span(ENGINE, span)
        if name == "wait_for_ready":
            diagram.lasts(ENGINE, span)
    for span in store.spans("executor.make_worker_process"):
        diagram.arrow(span.start_ns, ENGINE, rank(span.get("rank")), "start; a ready pipe, a death pipe")
    for name in (
        "worker.init_worker",
        "worker.init_device",
        "worker.load_model",
        "worker.init_message_queues",
    ):
        for span in store.spans(name):
            diagram.span(rank(span.rank), span)
    meeting = store.spans("dist.rendezvous")
    for span in meeting:
        diagram.lasts(rank(span.rank), span)
    late = max(meeting, key=lambda span: span.start_ns)
    for span in meeting:
        if span is not late:
            diagram.arrow(
                late.end_ns, rank(late.rank), rank(span.rank), "dist.rendezvous: all are there", "line dashed"
            )
    for span in store.spans("worker.send_ready"):
        diagram.arrow(span.start_ns, rank(span.rank), ENGINE, "READY, handle of its response ring")
    (handshake,) = store.spans("executor.mq_handshake")
    for span in store.spans("worker.mq_handshake"):
        diagram.span(rank(span.rank), span)
        diagram.lasts(rank(span.rank), span)
        diagram.arrow(handshake.start_ns, ENGINE, rank(span.rank), "broadcast ring: all attached", "line shm")
        diagram.arrow(
            max(span.end_ns, handshake.start_ns),
            rank(span.rank),
            ENGINE,
            "response ring: attached",
            "line shm",
        )
    return diagram


def rpc(store: TraceStore, call: int) -> Diagram:
    diagram = Diagram([ENGINE, *map(rank, ranks_of(store))])
    (sent,) = (span for span in store.spans("rpc.call") if span.get("seq") == call)
    diagram.span(ENGINE, sent, f" {sent.attributes['rpc.method']}")
    for span in store.spans("mq.enqueue"):
        if store.parent(span) is sent:
            diagram.step(ENGINE, span.start_ns, f"mq.enqueue {span.get('bytes')} B, slot {span.get('slot')}")
    for span in store.spans("rpc.execute"):
        if span.get("seq") != call:
            continue
        lane = rank(span.rank)
        diagram.arrow(span.start_ns, ENGINE, lane, "read from the broadcast ring", "line shm")
        diagram.span(lane, span)
        diagram.lasts(lane, span)
        reply = [s for s in store.spans("rpc.enqueue_output", process=span.process) if s.get("seq") == call]
        if reply:
            text = f"response: {call}, {reply[0].get('status')}, output"
            diagram.arrow(reply[0].end_ns, lane, ENGINE, text, "line shm")
        else:
            diagram.arrow(span.end_ns, lane, ENGINE, f"one store: {call} is done", "line shm dashed")
    for name in ("future.result", "rpc.await_responses"):
        for span in store.spans(name):
            if span.get("seq") == call:
                diagram.span(ENGINE, span)
                diagram.lasts(ENGINE, span)
                diagram.step(ENGINE, span.end_ns, "the result")
    return diagram


def futures(store: TraceStore, call: int) -> Diagram:
    waited = next((span for span in store.spans("future.result") if span.get("drained")), None)
    if waited is None:
        raise PluginError("this run has no future that drained older ones")
    last = int(waited.get("seq"))
    numbers = range(last - int(waited.get("drained")), last + 1)
    diagram = Diagram(["the caller", rank(0)])
    for span in store.spans("rpc.call"):
        if span.get("seq") in numbers:
            diagram.arrow(
                span.end_ns, "the caller", rank(0), f"call {span.get('seq')}, returns a future", "line shm"
            )
    for span in store.spans("rpc.execute"):
        if span.rank == 0 and span.get("seq") in numbers:
            diagram.span(rank(0), span, f" {span.get('seq')}")
    for span in store.spans("rpc.enqueue_output"):
        if span.rank == 0 and span.get("seq") in numbers:
            diagram.arrow(
                span.end_ns, rank(0), "the caller", f"response {span.get('seq')}, into the ring", "line shm"
            )
    diagram.step("the caller", waited.start_ns, f"result() of {last}")
    diagram.lasts("the caller", waited)
    done = ", ".join(map(str, numbers))
    diagram.step("the caller", waited.end_ns, f"taken in order: {done}")
    return diagram


def failure(store: TraceStore, call: int) -> Diagram:
    (death,) = store.spans("monitor.worker_died")
    dead = death.get("rank")
    others = [number for number in ranks_of(store) if number != dead]
    diagram = Diagram(["client", ENGINE, *map(rank, others), rank(dead)])
    lives = {span.get("rank"): span for span in store.spans("worker.process")}
    victim = next(p for p in store.processes() if p.pid == death.get("pid"))
    open_step = max((s for s in store.spans() if s.process is victim), key=lambda s: s.start_ns)
    diagram.step(rank(dead), victim.end_ns, f"SIGKILL in {open_step.name}", "box bad")
    diagram.arrow(lives[dead].end_ns, rank(dead), ENGINE, "sentinel: the process has ended", "line dashed")
    request = store.spans("request")[-1]
    diagram.arrow(request.end_ns, ENGINE, "client", "EngineDeadError: rank, signal, step")
    for name in (
        "monitor.worker_died",
        "executor.failure_callback",
        "executor.shutdown",
        "executor.close_message_queues",
    ):
        for span in store.spans(name):
            diagram.span(ENGINE, span)
    for span in store.spans("executor.terminate_graceful"):
        diagram.lasts(ENGINE, span)
    (closing,) = store.spans("executor.close_death_writers")
    for number in others:
        lane = rank(number)
        diagram.arrow(closing.start_ns, ENGINE, lane, "death pipe: a byte, end of file")
        for name in ("worker.parent_died", "worker.exception", "worker.shutdown"):
            for span in store.spans(name):
                if span.rank == number and span.start_ns >= death.start_ns - 10**9:
                    diagram.span(lane, span)
        diagram.arrow(
            lives[number].end_ns, lane, ENGINE, f"sentinel: {lives[number].get('ended')}", "line dashed"
        )
    return diagram


def shutdown(store: TraceStore, call: int) -> Diagram:
    found = ranks_of(store)
    diagram = Diagram([ENGINE, *map(rank, found)])
    for name in ("executor.shutdown", "executor.terminate_graceful", "executor.close_message_queues"):
        (span,) = store.spans(name)
        diagram.span(ENGINE, span)
        if name == "executor.terminate_graceful":
            diagram.lasts(ENGINE, span)
    (closing,) = store.spans("executor.close_death_writers")
    for number in found:
        diagram.arrow(closing.start_ns, ENGINE, rank(number), "death pipe: a byte, end of file")
    for name in ("worker.parent_died", "worker.shutdown", "dist.destroy"):
        for span in store.spans(name):
            diagram.span(rank(span.rank), span)
            if name == "dist.destroy":
                diagram.lasts(rank(span.rank), span)
    for span in store.spans("worker.process"):
        diagram.arrow(
            span.end_ns, rank(span.get("rank")), ENGINE, f"sentinel: {span.get('ended')}", "line dashed"
        )
    return diagram


DIAGRAMS: dict[str, tuple[str, str, Callable[[TraceStore, int], Diagram]]] = {
    "init": ("The executor's initialisation", "init", init),
    "rpc": ("One collective_rpc", "rpc", rpc),
    "futures": ("Three futures, the last one asked first", "future", futures),
    "failure": ("A worker dies", "failure", failure),
    "shutdown": ("Shutdown", "shutdown", shutdown),
}


def expand(markdown: str, page: Page) -> str:
    """Replace every sequence block by its diagram."""
    texts = TEXTS["zh" if page.file.src_uri.endswith(".zh.md") else "en"]

    def block(match: re.Match[str]) -> str:
        settings = dict(line.split(": ", 1) for line in match["body"].strip().splitlines())
        if not {"run", "of"} <= set(settings) <= _KEYS or settings["of"] not in DIAGRAMS:
            raise PluginError(f"{page.file.src_uri}: a sequence needs run and of, one of {sorted(DIAGRAMS)}")
        path = RUNS / settings["run"]
        if not path.is_dir():
            raise PluginError(
                f"{page.file.src_uri}: docs/runs/{settings['run']} does not exist (make docs-assets)"
            )
        label, view, build = DIAGRAMS[settings["of"]]
        picture = build(TraceStore.open(path), int(settings.get("call", "0"))).svg(label)
        focus = f" --focus {settings['call']}" if "call" in settings else ""
        command = f"minivllm timeline docs/runs/{settings['run']} --view {view}{focus}"
        return f'<div class="diagram" tabindex="0">{picture}</div>\n\n<small>{texts.format(command=command)}</small>\n'

    return _BLOCK.sub(block, markdown)
