"""The site: it builds strictly, its generated pages hold what the code holds, and nothing on it comes from elsewhere."""

from __future__ import annotations

import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs", reason="the docs extra is not installed")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning fails the build."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_every_span_is_on_the_catalogue_page(site: Path) -> None:
    from minivllm.tracing import catalogue

    page = (site / "reference" / "spans.html").read_text(encoding="utf-8")
    missing = [name for name in catalogue.SPANS if f'id="{name}"' not in page]
    assert not missing


def test_every_variable_is_on_its_page(site: Path) -> None:
    from minivllm import envs

    page = text_of(site / "reference" / "environment.html")
    assert not [name for name in envs.environment_variables if name not in page]


def test_every_module_is_on_the_map_and_has_an_api_page(site: Path) -> None:
    page = text_of(site / "reference" / "map.html")
    for path in (ROOT / "minivllm").rglob("*.py"):
        if path.read_text(encoding="utf-8").strip():
            name = path.relative_to(ROOT / "minivllm").as_posix()
            assert name in page
    assert len(list((site / "reference" / "api").glob("*.html"))) > 20


def test_every_deviation_comment_is_on_its_page(site: Path) -> None:
    page = text_of(site / "reference" / "differences.html")
    count = sum(
        path.read_text(encoding="utf-8").count("Deviation from vLLM:")
        for path in (ROOT / "minivllm").rglob("*.py")
    )
    assert f"{count} places" in page


def test_no_page_needs_the_network(site: Path) -> None:
    """No script, style, font or picture from another host; links that a reader may follow are fine."""
    loads = re.compile(
        r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=[\"']?(?:https?:)?//|"
        r"<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon)[^>]*\bhref=[\"']?(?:https?:)?//"
    )
    for page in site.rglob("*.html"):
        found = loads.search(page.read_text(encoding="utf-8"))
        assert not found, f"{page.relative_to(site)}: {found.group(0)}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import\s+url|url\([\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def coverage() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs" / "_hooks"))
    try:
        import coverage as module

        yield module
    finally:
        sys.path.pop(0)
        sys.modules.pop("coverage", None)


def test_chapters_name_sections_spans_and_walkthroughs_that_exist(coverage: ModuleType) -> None:
    from minivllm.tracing import catalogue

    for chapter in coverage.chapters():
        assert set(chapter.articles) <= set(coverage.SECTIONS), chapter.path.name
        assert set(chapter.spans) <= set(catalogue.SPANS), chapter.path.name
        assert not chapter.walkthrough or (ROOT / "walkthroughs" / chapter.walkthrough).is_file()


def test_spans_on_pages_exist(coverage: ModuleType) -> None:
    """A failpoint on a page names a span of the catalogue, so that the command runs as written."""
    from minivllm.tracing import catalogue

    for page in (ROOT / "docs").rglob("*.md"):
        for value in re.findall(r"MINIVLLM_FAILPOINTS=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
            for part in value.split(";"):
                assert re.split(r"[@#=]", part.strip())[0] in catalogue.SPANS, f"{page.name}: {part}"


def test_chapters_keep_the_template(coverage: ModuleType) -> None:
    for chapter in coverage.chapters():
        text = chapter.path.read_text(encoding="utf-8")
        for part in (
            "You will be able to",
            "## Invariants",
            "Predict before you run",
            "## In vLLM 0.25.1",
            "## Check yourself",
        ):
            assert part.removeprefix("#") in text, f"{chapter.path.name} lacks {part!r}"
        assert re.search(r"^## Where the articles? (is|are) off$", text, re.M), chapter.path.name
        assert text.count("Build the smallest example") >= 3, chapter.path.name


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE_WIDTH = 390
# Loads page after page into a frame of a phone's width and writes down what is wrong with each.
PROBE = """
<pre id=out></pre><script>
const out = document.getElementById("out");
async function probe() {
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.width = WIDTH; frame.height = 800; frame.src = page;
    const errors = [];
    const loaded = new Promise(resolve => frame.onload = resolve);
    document.body.appendChild(frame);
    frame.contentWindow.addEventListener("error", event => errors.push(event.message));
    await loaded;
    await new Promise(resolve => setTimeout(resolve, 50));
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > WIDTH) errors.push("is " + root.scrollWidth + " px wide");
    if (!frame.contentDocument.querySelector("h1")) errors.push("has no heading");
    for (const error of errors) out.textContent += page + ": " + error + "\\n";
    frame.remove();
  }
  out.textContent += "looked at " + PAGES.length + " pages";
}
probe();
</script>
"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The built site, served on the loopback interface."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pages_load_and_fit_a_phone(site: Path, address: str, tmp_path: Path) -> None:
    pages = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    # Of the API pages, which are all made alike, some stand for all.
    api = [page for page in pages if page.startswith("reference/api/")]
    pages = [page for page in pages if page not in api] + api[::20]
    probe = PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(PHONE_WIDTH))
    (site / "probe.html").write_text(probe, encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=120000",
            "--dump-dom",
            f"{address}/probe.html",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = re.search(r"<pre id=\"?out\"?>(.*?)</pre>", done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    assert found.group(1) == f"looked at {len(pages)} pages"
