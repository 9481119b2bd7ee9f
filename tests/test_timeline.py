"""Timelines: numbers and sentences are those of the trace shown, and every output can be read."""

from __future__ import annotations

import gc
import io
import json
import re
import shutil
import time
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from real_runs import recorded
from rich.cells import cell_len
from rich.console import Console
from trace_fixtures import MS, json_s, large_run, write_run

from minivllm.exceptions import ConfigError
from minivllm.timeline import SOMETIMES, VIEWS, build_views, export, text, theme
from minivllm.timeline.batches import Batches
from minivllm.timeline.compare import compare
from minivllm.timeline.render import Timeline
from minivllm.timeline.run import Options, Run
from minivllm.timeline.scale import TimeScale, idle_stretches
from minivllm.timeline.view import Actor, Kind, Row, Segment, View
from minivllm.trace_store import TraceStore
from minivllm.trace_store.coverage import cover

RUNS = Path(__file__).resolve().parents[1] / "docs" / "runs"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TraceStore:
    return TraceStore.open(write_run(tmp_path_factory.mktemp("run") / "trace"))


def one(store: TraceStore, name: str, **options: object) -> View:
    return build_views(store, [name], Options(**options))[0]  # type: ignore[arg-type]


def drawn(
    view: View, width: int = 100, glyphs: theme.Glyphs = theme.UNICODE, styled: bool = False
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(Timeline(view, glyphs, styled))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def row(view: View, label: str, actor: str = "") -> Row:
    return next(r for r in view.rows if r.label.startswith(label) and actor in r.actor.name)


# --- what real runs say


def test_ranks_of_one_stage_compute_the_same_and_those_of_another_do_not() -> None:
    said = " ".join(one(TraceStore.open(recorded(pp=2)), "rpc").explanation)
    assert (
        "rank 2 replied; rank 3 computed the same and ranks 0 and 1 computed another stage; they sent nothing back"
        in said
    )


@pytest.mark.parametrize("name", ["pipeline", "async", "slow-sampler"])
def test_every_view_counts_the_same_steps(name: str) -> None:
    """Also the last one, which has no batch; each by the number that the scheduler gives it."""
    store = TraceStore.open(RUNS / name)
    spans = store.spans("engine_core.step")
    numbers = [s.get("step") for s in store.spans("scheduler.schedule")]
    assert numbers == list(range(1, len(spans) + 1))
    for number, span in zip(numbers, spans, strict=True):
        view = one(store, "step", focus=str(number))
        assert view.zero_ns == span.start_ns - Run(store).zero_ns
        assert f"step {number} of {len(spans)}," in view.title
    batches = Batches.of(Run(store))
    assert f" of {len(spans)}" in batches.title(batches.steps)
    assert f"in {len(spans)} steps" in " ".join(one(store, "async").explanation)
    (figures, *_) = compare((store, store), ("A", "B"), ["step"], Options())
    assert f"steps: A {len(spans)}, B {len(spans)} (the same)" in figures.explanation
    row = next(row for row in cover([store], ["A"]).rows if row.spec.name == "engine_core.step")
    assert row.count == len(spans)


def test_titles_count_the_steps_that_had_a_batch() -> None:
    view = one(TraceStore.open(RUNS / "pipeline-no-queue"), "pipeline")
    steps = [
        int(r.label.split()[1]) for r in view.rows if r.label.startswith("step ") and "PP0" in r.actor.name
    ]
    assert view.title.startswith(f"Steps {steps[0]} to {steps[-1]} ")
    assert (" of " in view.title) == (
        steps[-1] - steps[0] + 1 == len(steps)
    ) or "that had a batch" in view.title


def test_how_a_process_ended_fits_at_the_edge() -> None:
    for ended, short in (
        ("exited with code 0", "exit code 0"),
        ("was killed by SIGKILL", "killed: SIGKILL"),
        ("ended after SIGTERM (exit code 143)", "ended: SIGTERM"),
    ):
        assert text.fate(ended) == short and len(short) <= 80 // 5
    for name in ("kill-in-step", "tp2"):
        for view in ("shutdown", "failure") if name.startswith("kill") else ("shutdown",):
            shown = drawn(one(TraceStore.open(RUNS / name), view), 80)
            assert not [line for line in shown if line.endswith("…")], name


def test_the_name_of_a_step_outlives_its_room() -> None:
    actor = Actor("EngineCore", 1)
    rows = [Row("executor.close_message_queues", actor, 3, [Segment(0, 10 * MS)])]
    lines = drawn(View("x", "", 0, 10 * MS, rows=rows), 70)
    assert any("close_message_queues" in line for line in lines) and "…" not in "".join(lines)


def test_futures_say_what_a_bar_is() -> None:
    view = one(TraceStore.open(RUNS / "futures"), "future")
    assert "then the wait in result()" in view.explanation[0]
    assert any("pending, and nobody asks" in line for line in drawn(view))


# --- words and axis


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (0, "0 ns"),
        (450, "450 ns"),
        (1_500, "1.50 µs"),
        (12_340, "12.3 µs"),
        (999_960_000, "1.00 s"),
        (123 * MS, "123 ms"),
        (99.96 * MS, "100 ms"),
        (2_500 * MS, "2.50 s"),
        (125_000 * MS, "2 min 05 s"),
        (-1_500, "-1.50 µs"),
    ],
)
def test_durations_have_three_digits(ns: float, expected: str) -> None:
    assert text.duration(ns) == expected


def test_instants_tell_neighbours_apart() -> None:
    assert text.instants([310 * MS, 330 * MS]) == ["0.31 s", "0.33 s"]
    assert text.instants([310 * MS, 310 * MS + 40_000]) == ["0.31000 s", "0.31004 s"]


def test_scale_is_linear_and_ends_at_the_edges() -> None:
    scale = TimeScale(0, 1000, 50)
    assert [scale.column(t) for t in (-5, 0, 500, 1000, 2000)] == [0, 0, 25, 50, 50]
    assert scale.ticks(1) == [(0, "0"), (10, "200"), (20, "400"), (30, "600"), (40, "800")]


@pytest.mark.parametrize("width", [17, 40, 63, 100])
@pytest.mark.parametrize(
    ("start", "end", "zero"), [(0, 977, 0), (313, 5_417, 0), (-90, 8_123_457, 0), (7, 20_011, 503)]
)
def test_ticks_lie_at_whole_columns_and_cover_what_is_shown(
    start: int, end: int, zero: int, width: int
) -> None:
    scale = TimeScale(start, end, width, zero)
    assert scale.start_ns <= start and scale.end_ns >= end - 1e-3
    assert scale.end_ns - scale.start_ns < 1.5 * (end - start), "little of the width is given away"
    columns = [c for c, _ in scale.ticks(1)]
    assert len({b - a for a, b in pairwise(columns)}) <= 1, columns
    assert abs(scale.column(zero) - round(scale.column(zero))) < 1e-6 or not start <= zero <= end


def test_long_idle_stretches_are_shortened_and_times_stay_in_order() -> None:
    idle = idle_stretches([(0, 100), (9_900, 10_000)], 0, 10_000)
    assert idle == [(100, 9_900)]
    scale = TimeScale(0, 10_000, 60, cuts=idle)
    assert len(scale.shortened) == 1
    columns = [scale.column(t) for t in range(0, 10_001, 50)]
    assert columns == sorted(columns) and columns[-1] == 60
    assert scale.column(100) > 25, "what happened has the room, not the idle stretch"


def test_a_shortened_axis_says_so() -> None:
    actor = Actor("client", 0)
    view = View("x", "x", shorten="idle")
    view.rows = [
        Row("a", actor, 0, [Segment(0, 10 * MS)]),
        Row("b", actor, 0, [Segment(990 * MS, 1000 * MS)]),
    ]
    lines = drawn(view.fit())
    assert any("(980 ms) is cut short" in line for line in lines), lines


def test_bars_have_the_resolution_of_an_eighth() -> None:
    actor = Actor("EngineCore", 1)
    widths = []
    for end in range(0, 1001, 10):
        view = View("x", "x", 0, 1000, rows=[Row("a", actor, 0, [Segment(0, end)], note="-")])
        line = next(line for line in drawn(view, 60) if line.startswith("a "))
        filled = [theme.UNICODE.eighths.index(c) for c in line[2:] if c in theme.UNICODE.eighths[1:]]
        widths.append(sum(filled))
    assert widths == sorted(widths)
    assert len(set(widths)) > 95


# --- the views of a run whose numbers are known


def test_spawn_says_that_all_were_started_before_the_first_was_waited_for(store: TraceStore) -> None:
    view = one(store, "spawn")
    said = " ".join(view.explanation)
    assert (
        "both workers were started (at 0.31 s and 0.33 s) before the first was waited for (at 0.34 s)" in said
    )
    assert "rank 1 was ready last, 12.0 ms after rank 0" in said
    assert "EngineCore waited 1.87 s for READY, and the client 2.89 s for EngineCore" in said
    assert row(view, "executor.wait_for_ready").segments[0].kind is Kind.WAIT
    assert [m.at_ns for m in row(view, "executor.wait_for_ready").marks] == [2_200_500_000, 2_212_500_000]
    assert [a.name for a in view.actors()] == ["client", "EngineCore", "Worker_TP0", "Worker_TP1"]


def test_spawn_does_not_claim_an_order_that_was_not_kept(tmp_path: Path) -> None:
    view = one(TraceStore.open(write_run(tmp_path / "t", started_late=True)), "spawn")
    said = " ".join(view.explanation)
    assert "not all workers were started" in said and "rank 1 was started at" in said
    assert "both workers" not in said


def test_init_shows_waiting_for_the_slowest_rank_as_waiting(store: TraceStore) -> None:
    view = one(store, "init")
    waits = [s for s in row(view, "dist.rendezvous", "TP0").segments if s.kind is Kind.WAIT]
    assert [(s.end_ns - s.start_ns) for s in waits] == [120 * MS]
    assert all(s.kind is Kind.WORK for s in row(view, "dist.rendezvous", "TP1").segments)
    assert "in dist.rendezvous rank 0 waited 120 ms for rank 1, which came last" in view.explanation
    assert row(view, "dist.new_group").label == "dist.new_group ×3"
    assert "the longest step was worker.bootstrap: 899 ms on rank 0 and 999 ms on rank 1" in view.explanation


def test_rpc_shows_one_broadcast_with_its_readers(store: TraceStore) -> None:
    view = one(store, "rpc")
    said = " ".join(view.explanation)
    assert "execute_model, call number 14" in view.title
    assert "slot 4, 612 B" in said and "read by 2 ranks" in said
    assert "rank 0 had it 100 µs after it was written and rank 1 had it 150 µs after it was written" in said
    assert "rank 1 executed for 5.25 ms, rank 0 for 5.00 ms; the last to finish was rank 1" in said
    assert "rank 0 replied; rank 1 computed the same and sent nothing back" in said
    kinds = [s.kind for s in row(view, "mq.dequeue", "TP1").segments]
    assert kinds == [Kind.WAIT, Kind.WORK]


def test_focus_chooses_by_number_and_by_span_id(store: TraceStore) -> None:
    assert "call number 17" in one(store, "rpc", focus="17").title
    call = store.spans(name="rpc.call")[0]
    assert "call number 10" in one(store, "rpc", focus=call.span_id).title
    assert "step 1 of 9" in one(store, "step", focus="1").title
    with pytest.raises(ConfigError, match="calls are numbered 10 to 18"):
        one(store, "rpc", focus="3")
    with pytest.raises(ConfigError, match="numbered 1 to 9"):
        one(store, "step", focus="99")


def test_step_adds_up(store: TraceStore) -> None:
    said = " ".join(one(store, "step").explanation)
    assert (
        "of 8.00 ms, EngineCore spent on scheduling 300 µs (4%), waiting for the workers 5.90 ms (74%)"
        in said
    )
    assert "model.forward took 4.10 ms on rank 1 and 3.80 ms on rank 0" in said


def test_shutdown_says_whether_a_signal_was_needed(store: TraceStore) -> None:
    view = one(store, "shutdown")
    assert any("no signal was needed" in s for s in view.explanation)


def test_failure_names_rank_signal_and_step(tmp_path: Path) -> None:
    store = TraceStore.open(write_run(tmp_path / "t", dies=1))
    names = [v.name for v in build_views(store, ["all"])]
    assert "failure" in names
    view = one(store, "failure")
    assert "rank 1 was killed by SIGKILL in worker.load_model" in view.explanation
    assert "monitor.worker_died noticed 1.00 ms later" in view.explanation
    died = row(view, "worker.load_model", "TP1")
    assert died.segments[0].kind is Kind.UNFINISHED and died.note == "never finished"
    # The spawn view of the same run claims no READY of the dead rank.
    assert not any("rank 1 was ready" in s for s in one(store, "spawn").explanation)


def test_a_healthy_run_has_no_failure_view(store: TraceStore) -> None:
    assert [v.name for v in build_views(store, ["all"])] == [n for n in VIEWS if n not in SOMETIMES]
    assert "nothing failed in this run" in one(store, "failure").missing[0]


@pytest.mark.parametrize(
    ("level", "view", "said"),
    [
        ("lifecycle", "rpc", "recorded at level lifecycle: no rpc spans; record with --trace-level rpc"),
        ("lifecycle", "step", "recorded at level lifecycle: no engine steps; record with --trace-level rpc"),
        ("rpc", "rpc", "recorded at level rpc: no queue messages"),
    ],
)
def test_a_view_says_what_is_missing_and_which_level_shows_it(
    tmp_path: Path, level: str, view: str, said: str
) -> None:
    assert said in " ".join(one(TraceStore.open(write_run(tmp_path / "t", level=level)), view).missing)


def test_a_cut_off_trace_is_not_to_be_recorded_at_a_level_it_has(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole")
    for kept, said in (("client*", "or this trace is cut off"), ("[cw]*", "a part of this trace is missing")):
        part = tmp_path / said.replace(" ", "-")
        part.mkdir()
        for file in whole.glob(kept):
            shutil.copy(file, part)
        (missing,) = one(TraceStore.open(part), "spawn").missing
        assert missing.startswith("no spawn spans: level ") and said in missing


def test_many_ranks_keep_their_colours_and_sentences_stay_short(tmp_path: Path) -> None:
    store = TraceStore.open(write_run(tmp_path / "t", tp=8))
    spawn = one(store, "spawn")
    assert "all 8 workers were started (between 0.31 s and 0.45 s)" in spawn.explanation[0]
    colours = {a.name: theme.color(a.slot) for a in spawn.actors()}
    assert len(set(colours.values())) == 10
    shown = one(store, "init", ranks=frozenset({3}))
    assert [a.name for a in shown.actors()] == ["Worker_TP3"]
    assert theme.color(shown.actors()[0].slot) == colours["Worker_TP3"]


def test_filters_drop_rows_and_say_so(store: TraceStore) -> None:
    view = one(store, "init", min_duration_ns=50 * MS)
    assert all(r.heading or any(s.end_ns - s.start_ns for s in r.segments) for r in view.rows)
    assert "device.bind" not in [r.label for r in view.rows]
    assert "rows shorter than 50.0 ms are left out" in view.explanation[-1]
    cut = one(store, "init", from_ns=2_400 * MS, to_ns=2_900 * MS)
    assert (cut.start_ns, cut.end_ns) == (2_400 * MS, 2_900 * MS)
    assert "worker.bootstrap" not in [r.label for r in cut.rows]
    assert "outside 2.400 s to 2.900 s" in cut.explanation[-1]
    assert "rows before 2.400 s are left out" in one(store, "init", from_ns=2_400 * MS).explanation[-1]
    assert "rows after 2.400 s are left out" in one(store, "init", to_ns=2_400 * MS).explanation[-1]


# --- what reaches the reader


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
@pytest.mark.parametrize("name", [n for n in VIEWS if n != "failure"])
def test_no_line_is_wider_than_the_terminal(store: TraceStore, name: str, width: int) -> None:
    for glyphs in (theme.UNICODE, theme.ASCII):
        for line in drawn(one(store, name), width, glyphs):
            assert cell_len(line.rstrip()) <= width, line


def test_ascii_output_is_ascii(store: TraceStore) -> None:
    for name in VIEWS:
        "\n".join(drawn(one(store, name), 80, theme.ASCII)).encode("ascii")
    assert theme.glyphs_for("ascii") is theme.ASCII
    assert theme.glyphs_for("no such codec") is theme.ASCII
    assert theme.glyphs_for("utf-8") is theme.UNICODE


def test_svg_is_well_formed_and_needs_nothing_from_outside(store: TraceStore) -> None:
    svg = export.views_to_svg(build_views(store, ["all"]))
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    found = set(re.findall(r"https?://[^\s\"'<]+", svg))
    assert found == {"http://www.w3.org/2000/svg"}
    assert "@font-face" not in svg and "url(" not in svg and "<script" not in svg
    width = float(root.get("width", "0"))
    for element in root.iter():
        if element.tag.endswith("rect") and element.get("x"):
            assert 0 <= float(element.get("x", "")) <= width
            assert float(element.get("width", "0")) > 0


def test_html_is_one_page_with_every_view(store: TraceStore) -> None:
    html = export.views_to_html(build_views(store, ["all"]), 'a <b> & "c"')
    assert "<h1>a &lt;b&gt; &amp; " in html
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) <= {"http://www.w3.org/2000/svg"}
    for name in VIEWS:
        assert (f'id="{name}"' in html) == (name not in SOMETIMES)
    assert "before the first was waited for" in html


def test_json_holds_the_numbers(store: TraceStore) -> None:
    data = json.loads(export.views_to_json(build_views(store, ["spawn"]), {"spans": 1}))
    rows = {r["label"]: r for r in data["views"][0]["rows"]}
    wait = rows["executor.wait_for_ready"]["segments"][0]
    assert (wait["start_ns"], wait["kind"]) == (344 * MS, "wait")


def test_hundred_thousand_spans_open_and_render_in_time() -> None:
    """A little longer than json takes for the same spans, and no more than thrice as long."""
    directory = large_run()
    limit = json_s()
    # CPU time of this process: what else the machine does is not the point.
    gc.disable()
    start = time.process_time()
    try:
        store = TraceStore.open(directory)
        opened = time.process_time() - start
        for view in build_views(store, ["all"]):
            drawn(view)
        took = time.process_time() - start
    finally:
        gc.enable()
    assert len(store.spans()) > 95_000
    assert took < 3 * limit, f"opening took {opened:.2f} s, all of it {took:.2f} s, json {limit:.2f} s"
