"""Every walkthrough runs alone, shows what it claims, and prints what its page says that it prints."""

from __future__ import annotations

import difflib
import os
from itertools import pairwise

import pytest
from walkthrough_runs import ROOT, Runs, outputs

from minivllm.trace_store import TraceStore

pytestmark = pytest.mark.timeout(150)
every_walkthrough = pytest.mark.parametrize("name", outputs.scripts())


@every_walkthrough
def test_runs_alone_and_says_how_to_look_further(name: str, walkthrough: Runs) -> None:
    run = walkthrough(name)
    assert "To look further" in run.text
    assert list(run.trace.glob("*.jsonl"))


@every_walkthrough
def test_page_shows_what_comes_out(name: str, walkthrough: Runs) -> None:
    """The output on the page and the output of now are the same, but for what differs from run to run."""
    pages = [
        page.name
        for page in (ROOT / "docs" / "tour").glob("*.md")
        if f"```walkthrough\n{name}\n" in page.read_text(encoding="utf-8")
    ]
    assert pages, f"no page of the tour shows {name}"
    kept = outputs.OUTPUTS / f"{name}.json"
    assert kept.is_file(), f"never recorded: make docs-assets ARGS={name}"
    shown, now = (
        outputs.normalised(output) for output in (outputs.Output.read(kept), walkthrough(name).output)
    )
    different = [
        f"on the page: {' '.join(shown[max(0, i - 8) : j])}\n        now: {' '.join(now[max(0, k - 8) : m])}"
        for what, i, j, k, m in difflib.SequenceMatcher(None, shown, now, autojunk=False).get_opcodes()
        if what != "equal"
    ]
    if different:
        pytest.fail(
            f"not what the page shows; if this is meant, make docs-assets ARGS={name}\n"
            + "\n".join(different),
            pytrace=False,
        )


def test_message_queue(walkthrough: Runs) -> None:
    text = walkthrough("09_message_queue").text
    assert "got 4 of 4" in text
    assert "waits for reader rank 1" in " ".join(text.split())


def test_initialisation(walkthrough: Runs) -> None:
    """All are started before any is waited for, and the order that deadlocks is the one that the page names."""
    run = walkthrough("02_initialisation")
    store = run.store()
    (waiting,) = store.spans("executor.wait_for_ready")
    assert all(span.end_ns <= waiting.start_ns for span in store.spans("executor.make_worker_process"))
    waits = [span.duration_ns for span in store.spans("dist.rendezvous")]
    assert max(waits) > 5 * min(waits)
    assert "rank 0 is still in dist.rendezvous" in run.text
    assert run.text.count("done") == 6


def test_spawn(walkthrough: Runs) -> None:
    run = walkthrough("03_spawn")
    words = " ".join(run.text.split())
    assert "has kept its copy of the writing end: waits on" in words
    assert "has closed its copy of the writing end: end of file" in words
    assert "failed to start in worker.load_model: FileNotFoundError" in words
    assert "was killed by SIGKILL in worker.load_model during start-up" in words
    assert len(run.store().spans("worker.bootstrap")) == 2


def test_worker_class(walkthrough: Runs) -> None:
    """WorkerProc builds the class, the device with its groups, the model and the queues, in this order, on every rank."""
    run = walkthrough("04_worker_class")
    store = run.store()
    for rank in (0, 1):
        order = [
            store.spans(f"worker.{name}", rank=rank)[0]
            for name in (
                "init_worker",
                "init_device",
                "load_model",
                "init_message_queues",
                "enable_envs_cache",
            )
        ]
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(order))
        titles = [span.get("title") for span in store.spans("worker.set_process_title", rank=rank)]
        assert titles == ["Worker", f"Worker_TP{rank}"]
    assert "no worker yet" in " ".join(run.text.split())


def test_init_device(walkthrough: Runs) -> None:
    """Device, groups, memory, runner, in this order; and no rank leaves the meeting before the last one has come."""
    run = walkthrough("05_init_device")
    store = run.store()
    for rank in (0, 1):
        first = {
            name: store.spans(name, rank=rank)[0]
            for name in ("device.bind", "dist.new_group", "device.memory_snapshot", "runner.init")
        }
        assert sorted(first, key=lambda name: first[name].start_ns) == list(first)
        assert len(store.spans("dist.init_communicator", rank=rank)) == 3
    for trace in (store, TraceStore.open(run.trace / "late")):
        meetings = trace.spans("dist.rendezvous")
        assert min(span.end_ns for span in meetings) >= max(span.start_ns for span in meetings)


def test_which_runner(walkthrough: Runs) -> None:
    spans = walkthrough("06_which_runner").store().spans("runner.select")
    assert [span.get("runner") for span in spans] == ["V2", "V2"]


def test_memory_and_graphs(walkthrough: Runs) -> None:
    """Each rank reads half; no rank allocates its cache before every rank has measured its peak."""
    run = walkthrough("08_memory_and_graphs")
    store = run.store()
    for load in store.spans("model.load_weights"):
        assert load.get("bytes") < 0.51 * load.get("bytes_of_whole_tensors")
    measured = max(span.end_ns for span in store.spans("worker.determine_available_memory"))
    assert measured <= min(span.start_ns for span in store.spans("runner.initialize_kv_cache"))
    assert "rank 1 holds rows 128 to 255" in run.text
    assert all(span.get("reason") == "a CPU has no graphs" for span in store.spans("runner.capture_model"))


def test_one_step(walkthrough: Runs) -> None:
    """All ranks sample, one replies; a prompt that is not done gives no token."""
    run = walkthrough("11_one_step")
    store = run.store()
    for method in ("execute_model", "sample_tokens"):
        calls = [s for s in store.spans("rpc.execute") if s.attributes["rpc.method"] == method]
        assert {span.rank for span in calls} == {0, 1}
        replies = {
            span.rank for span in calls for child in store.children(span) if child.name == "rpc.handle_output"
        }
        assert replies == {0}
    words = " ".join(run.text.split())
    assert "no: its prompt is not done" in words
    assert words.count("5 computed, last token 12 5 computed, no token yet") == 2


def test_collective_rpc(walkthrough: Runs) -> None:
    run = walkthrough("10_collective_rpc")
    assert "[(0, 'new'), (1, 'new')]" in run.text
    assert "[(0, 'new'), (1, 'old')]" in run.text
    (wait,) = run.store().spans("future.result")
    assert wait.get("drained") == 2


def test_async_and_pipeline(walkthrough: Runs) -> None:
    """A queue of batches makes the stages overlap, and asynchronous scheduling costs a step after a stop token."""
    lines = [" ".join(line.split()) for line in walkthrough("12_async_and_pipeline").text.splitlines()]
    together = {line.split()[0]: int(line.split()[-1].rstrip("%")) for line in lines if line.endswith("%")}
    if len(os.sched_getaffinity(0)) > 1:
        # On one core nothing is done at the same time.
        assert together["a"] > together["one"]
    assert "async stop 3 4" in lines
    assert "async length 3 3" in lines
    assert "in turn stop 3 3" in lines


def test_failure(walkthrough: Runs) -> None:
    """The caller has its error before the other rank has been ended."""
    run = walkthrough("13_failure")
    store = run.store()
    (other,) = (span for span in store.spans("worker.process") if span.rank == 0)
    assert store.spans("request")[-1].end_ns < other.end_ns
    assert " ".join(run.text.split()).count("was killed by SIGKILL in model.forward") == 3


def test_shutdown(walkthrough: Runs) -> None:
    run = walkthrough("14_shutdown")
    store = run.store()
    assert [span.get("ranks") for span in store.spans("executor.terminate_sigkill")] == [[1]]
    lines = [" ".join(line.split()) for line in run.text.splitlines()]
    assert "one flag for both closed is still running" in lines
    assert "a flag for each closed exited with code 0" in lines
    assert "an executor of 2 workers, then del: 0 of them run" in lines
