"""Every walkthrough runs alone, shows what it claims, and prints what its page says that it prints."""

from __future__ import annotations

import difflib

import pytest
from walkthrough_runs import ROOT, Runs, outputs

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
