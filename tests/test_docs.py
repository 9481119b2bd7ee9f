"""The site: it builds strictly, its generated pages hold what the code holds, and nothing on it comes from elsewhere."""

from __future__ import annotations

import contextlib
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs", reason="the docs extra is not installed")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning fails the build. MINIVLLM_TEST_SITE names one that has just been built."""
    if os.environ.get("MINIVLLM_TEST_SITE"):
        return Path(os.environ["MINIVLLM_TEST_SITE"])
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
        if path.read_text(encoding="utf-8").strip() and "exercises" not in path.parts:
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


def test_every_section_of_the_articles_has_a_chapter(coverage: ModuleType) -> None:
    assert coverage.uncovered() == []
    assert [chapter.number for chapter in coverage.chapters()] == list(coverage.CHAPTERS)


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


class _WithoutSearch(_Quiet):
    """Serves an empty search index: building the real one takes each page a second."""

    def do_GET(self) -> None:
        if not self.path.endswith("/search_index.json"):
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(
            b'{"config": {"lang": ["en"], "separator": " ", "pipeline": [], "fields": {}}, "docs": []}'
        )


@contextlib.contextmanager
def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on the loopback interface."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def browse(url: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Load a page in a browser with a profile of its own, and dump what has become of it."""
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={directory / 'profile'}",
            "--dump-dom",
            *options,
            url,
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pages_load_and_fit_a_phone(site: Path, tmp_path: Path) -> None:
    pages = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    # A site that was tested before holds these tests' own pages, too.
    pages = [page for page in pages if not re.fullmatch(r"probe\d?\.html|search\.html", page)]
    # Of the API pages, which are all made alike, some stand for all.
    api = [page for page in pages if page.startswith("reference/api/")]
    pages = [page for page in pages if page not in api] + api[::20]
    halves = [pages[::2], pages[1::2]]

    def probe(number: int) -> subprocess.CompletedProcess[str]:
        """A browser of its own, since one loads one page at a time."""
        text = PROBE.replace("PAGES", json.dumps(halves[number])).replace("WIDTH", str(PHONE_WIDTH))
        (site / f"probe{number}.html").write_text(text, encoding="utf-8")
        directory = tmp_path / str(number)
        directory.mkdir()
        return browse(f"{address}/probe{number}.html", directory, "--virtual-time-budget=120000")

    with serving(partial(_WithoutSearch, directory=str(site))) as address, ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(probe, range(2)))
    for half, done in zip(halves, ended, strict=True):
        found = re.search(r"<pre id=\"?out\"?>(.*?)</pre>", done.stdout, re.S)
        assert found is not None, done.stderr[-2000:]
        assert found.group(1) == f"looked at {len(half)} pages"


# Types each query into the search of its page and writes down the pages that it finds. The page counts as loaded, for
# --dump-dom, when the answer to `wait` has come.
SEARCH = """
<meta charset="utf-8"><pre id=out></pre><img src="wait" alt=""><script>
async function find(page, query) {
  const frame = document.createElement("iframe");
  frame.width = 1200; frame.height = 800; frame.src = page;
  const loaded = new Promise(resolve => frame.onload = resolve);
  document.body.appendChild(frame);
  await loaded;
  const root = frame.contentDocument;
  const input = root.querySelector("[data-md-component=search-query]");
  input.dispatchEvent(new Event("focus"));
  input.value = query;
  for (let i = 0; i < 300 && !root.querySelector(".md-search-result__link"); i++) {
    input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    await new Promise(resolve => setTimeout(resolve, 100));
  }
  const found = [...root.querySelectorAll(".md-search-result__link")].map(link => new URL(link.href).pathname);
  frame.remove();
  return [...new Set(found)];
}
async function run() {
  const found = [];
  for (const [page, query] of QUERIES) found.push(await find(page, query));
  document.getElementById("out").textContent = JSON.stringify(found);
}
run().finally(() => fetch("done"));
</script>
"""


class _Waiting(_Quiet):
    """Answers `wait` when `done` has been asked for."""

    done: threading.Event

    def do_GET(self) -> None:
        if self.path not in ("/wait", "/done"):
            return super().do_GET()
        if self.path == "/done":
            self.done.set()
        self.done.wait(120)
        self.send_response(204)
        self.end_headers()


def test_listings_are_on_the_pages_and_not_in_the_search_index(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "minivllm.distributed.shm_ring.ShmRingBuffer" in index and "Source code in" not in index
    page = (site / "reference/api/minivllm.distributed.shm_ring.html").read_text(encoding="utf-8")
    assert page.count("<summary>Source code in") >= 3 and "<!-- listing" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_search_finds_names_and_chinese_words(site: Path, tmp_path: Path) -> None:
    """In real time: the search runs in a worker of the browser, for which virtual time does not wait."""
    queries = [
        ("index.html", "FutureWrapper"),
        ("zh/index.html", "FutureWrapper"),
        ("zh/tour/09-message-queue.html", "共享内存"),
    ]
    (site / "search.html").write_text(SEARCH.replace("QUERIES", json.dumps(queries)), encoding="utf-8")
    handler = type("Handler", (_Waiting,), {"done": threading.Event()})
    with serving(partial(handler, directory=str(site))) as address:
        done = browse(f"{address}/search.html", tmp_path, "--enable-logging=stderr")
    found = re.search(r"<pre id=\"?out\"?>(.*?)</pre>", done.stdout, re.S)
    assert found is not None and found.group(1), done.stderr[-2000:]
    english, chinese, words = json.loads(found.group(1))
    # In the language of the page, and nothing in the other one where there is a translation.
    assert english[0] == "/tour/10-collective-rpc.html"
    assert not [page for page in english if page.startswith("/zh/")]
    assert chinese[0] == "/zh/tour/10-collective-rpc.html"
    assert "/tour/10-collective-rpc.html" not in chinese
    assert any(page.startswith("/reference/") for page in chinese)
    assert "/zh/tour/09-message-queue.html" in words
    assert "CONSOLE" not in done.stderr, done.stderr


def test_links_of_chinese_pages_lead_somewhere(site: Path) -> None:
    """To Chinese pages, or to English ones where there is no translation; the strict build can only check sources."""
    for page in sorted((site / "zh").rglob("*.html")):
        for link in re.findall(
            r"<(?:a|link|img|script)\b[^>]*\b(?:href|src)=\"([^\"]+)\"", page.read_text("utf-8")
        ):
            target = link.partition("#")[0]
            if target and "://" not in target:
                assert (page.parent / target).is_file(), f"{page.relative_to(site)}: {link}"


def test_names_in_diagrams_are_those_of_the_code() -> None:
    """A class, method or attribute that is drawn exists in the package."""
    words: set[str] = set()
    for path in (ROOT / "minivllm").rglob("*.py"):
        words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    for picture in ("classes", "busy-loop", "topology"):
        text = (ROOT / "docs" / "assets" / "diagrams" / f"{picture}.svg").read_text(encoding="utf-8")
        drawn = re.findall(r'<text class="mono"[^>]*>([A-Za-z_]\w+)(?:\(|<|\[)', text)
        assert len(drawn) > 4
        assert not set(drawn) - words - {"func", "words"}
