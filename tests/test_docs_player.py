"""The player on the pages: the same steps and states as `minivllm step`, and it works in a real browser."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import recorded

from minivllm.stepper import History, Walk
from minivllm.stepper.player import SEPARATOR, as_data
from minivllm.stepper.words import Words
from minivllm.trace_store import TraceStore
from minivllm.tracing.catalogue import LIFECYCLE

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.parametrize("level", [None, LIFECYCLE])
def test_states_are_those_of_the_walk(level: int | None) -> None:
    walk = Walk(TraceStore.open(recorded("rpc.execute@rank1#6=kill")))
    if level is not None:
        walk.details = level
    data = as_data(walk)
    words, history = Words(walk.run), History(walk)
    assert json.loads(json.dumps(data)) == data
    shown = [i for i in range(len(walk)) if walk.is_shown(walk[i])]
    assert [step["index"] - 1 for step in data["steps"]] == shown
    assert [step["failed"] for step in data["steps"]] == [walk[i].failed for i in shown]
    texts, state, states = data["texts"], dict(data["before"]), []
    for step in data["steps"]:
        for key, before, after in step["changes"]:
            assert state.get(key, texts.index("")) == before, "each change begins where the state is"
            state[key] = after
        states.append({key: texts[number] for key, number in state.items() if texts[number]})
    for position in random.Random(3).sample(range(len(shown)), 40):
        at = history.at(shown[position])
        for number, process in enumerate(walk.store.processes()):
            status = words.status(at, process)
            expected = SEPARATOR.join((status.kind, status.text, status.note, status.detail))
            assert states[position][f"p{number}"] == expected
        slots = {
            key.removeprefix("r"): text.split(SEPARATOR)
            for key, text in states[position].items()
            if key.startswith("r")
        }
        assert len(slots) == sum(map(len, at.rings.values()))
        for queue, ring in at.rings.items():
            for number, slot in enumerate(ring):
                letter, what = slots[f"{queue}{SEPARATOR}{number}"]
                assert (letter == "W") == (not slot.is_free and not any(slot.read) and not slot.writing)
                assert what in ("", words.slot(slot))


def test_a_part_of_a_run_begins_with_the_state_it_has_there() -> None:
    walk = Walk(TraceStore.open(recorded()))
    whole, part = as_data(walk), as_data(walk, 300, 25)
    assert [s["index"] for s in part["steps"]] == list(range(301, 326))
    texts = {key: part["texts"][number] for key, number in part["before"].items()}
    state = dict(whole["before"])
    for step in whole["steps"][:300]:
        state.update({key: after for key, _, after in step["changes"]})
    assert texts == {key: whole["texts"][n] for key, n in state.items() if whole["texts"][n]}


PROBE = """
<pre id=out></pre><script>
const out = document.getElementById("out"), problems = [];
const say = (...what) => out.textContent += JSON.stringify(what) + "\\n";
window.addEventListener("error", event => problems.push(event.message));
console.error = (...what) => problems.push(what.join(" "));
let escaped = 0;
window.addEventListener("keydown", () => escaped++);
window.addEventListener("load", () => setTimeout(async () => {
  const root = document.querySelector(".player");
  const press = (key, target = root) => target.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
  const now = () => Number(root.dataset.step);
  const picture = () => [root.querySelector(".player-event").textContent, root.querySelector(".player-left").textContent];
  say("first", now());
  const seen = {};
  for (let i = 0; i < 40; i++) { seen[now()] = picture().join(); press("ArrowRight"); }
  say("forward", now());
  let same = 0;
  for (let i = 0; i < 40; i++) { press("p"); same += seen[now()] === picture().join(); }
  say("back", now(), same);
  press("End"); say("end", now()); press("ArrowRight"); say("stays", now());
  press("Home"); say("home", now());
  press("f"); say("failure", now(), root.querySelector(".player-error").textContent);
  root.querySelector(".player-first").click(); root.querySelector(".player-next").click(); say("buttons", now());
  const slider = root.querySelector("input");
  slider.value = 30; slider.dispatchEvent(new Event("input")); say("slider", now());
  press("x"); say("escaped", escaped);
  say("source", root.querySelector(".player-here").textContent, root.querySelectorAll(".player-now").length);
  root.querySelector("select").value = "16×";
  press(" ");
  await new Promise(resolve => setTimeout(resolve, 400));
  const played = now();
  press(" ");
  await new Promise(resolve => setTimeout(resolve, 200));
  say("played", played > 32, now() - played);
  const unnamed = [...root.querySelectorAll("button, select, input")].filter(e => !e.getAttribute("aria-label"));
  say("names", unnamed.length, root.tabIndex);
  say("width", root.scrollWidth <= root.clientWidth);
  say("problems", ...problems);
}, 0));
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("language", ["en", "zh"])
def test_in_a_browser(language: str, tmp_path: Path) -> None:
    data = json.dumps(
        as_data(Walk(TraceStore.open(recorded("rpc.execute@rank1#6=kill")))), ensure_ascii=False
    )
    page = (
        f'<!doctype html><html lang="{language}"><meta charset="utf-8"><style>{(ASSETS / "site.css").read_text()}</style>'
        f'<div class="player" data-player="run">needs JavaScript</div>{PROBE}'
        f'<script>window.minivllmRuns = {{"run": {data.replace("</", "<" + chr(92) + "/")}}};</script>'
        f"<script>{(ASSETS / 'player.js').read_text(encoding='utf-8')}</script></html>"
    )
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *[
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--window-size=500,900",
            ],
            *[f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"],
            (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = re.search(r"<pre id=\"?out\"?>(.*?)</pre>", done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    said = {what[0]: what[1:] for what in map(json.loads, html.unescape(found.group(1)).splitlines())}
    steps = json.loads(data)["steps"]
    failure = next(i for i, step in enumerate(steps) if step["failed"])
    assert said["problems"] == []
    assert (said["first"], said["forward"], said["back"]) == ([1], [41], [1, 40])
    assert said["end"] == said["stays"] == [len(steps)] and said["home"] == [1]
    assert said["failure"][0] == failure + 1 and "rpc.execute@rank1#6=kill" in said["failure"][1]
    assert said["buttons"] == [2] and said["slider"] == [30]
    assert said["escaped"] == [1], "the page does not see the player's keys, but those of others"
    assert steps[29]["name"] in said["source"][0] and said["source"][1] == 1
    assert said["played"] == [True, 0], "plays, and stops when told"
    assert said["names"] == [0, 0] and said["width"] == [True]


def test_a_page_names_runs_that_exist() -> None:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    sys.path.insert(0, str(ROOT / "docs" / "_hooks"))
    try:
        import players
        from mkdocs.exceptions import PluginError

        blocks = [
            players._settings(match["body"], page.name)
            for page in (ROOT / "docs").rglob("*.md")
            for match in players._BLOCK.finditer(page.read_text(encoding="utf-8"))
        ]
        assert len(blocks) >= 4
        for wrong in ("run: nowhere", "level: rpc", "run: tp2\nspeed: 3"):
            with pytest.raises(PluginError):
                players._settings(wrong, "page.md")
    finally:
        sys.path.pop(0)
