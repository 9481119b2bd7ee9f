"""The site: it builds strictly, its generated pages hold what the code holds, and nothing on it comes from elsewhere."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

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
