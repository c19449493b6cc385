"""The site builds without warnings and without a network, its links have targets, and it loads no other site."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 1200
# Elements whose address the browser loads when it opens the page.
LOADS = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:href|src)=\"?((?:https?:)?//[^\s\">]+)")
# Names of objects, not of modules.
SHOWN = re.compile(r"^::: (tfdist\.\w+\.\S+)$", re.MULTILINE)
REFERS = re.compile(r"\b(?:href|src)=\"?([^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("site")
    # A proxy that does not exist: every access to a network fails immediately.
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(output)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return output


def is_shown(path: str, reference: str) -> bool:
    """Whether the reference has a heading for a name or for its members."""
    return any(f'id="{shown}' in reference for shown in (f'{path}"', f"{path}."))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_page_is_there(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages and all((site / page).is_file() for page in pages)


def test_links_have_targets(site: Path) -> None:
    gone = set()
    for page in site.rglob("*.html"):
        for link in REFERS.findall(text_of(page)):
            name = re.split(r"[?#]", link)[0].replace("%20", " ")
            if name and ":" not in name and not name.startswith("/") and not (page.parent / name).exists():
                gone.add(f"{page.relative_to(site)}: {link}")
    assert not gone


def test_no_other_site_is_loaded(site: Path) -> None:
    loaded = {match for page in site.rglob("*.html") for match in LOADS.findall(text_of(page))}
    assert not loaded
    styles = "".join(text_of(sheet) for sheet in site.rglob("*.css"))
    assert not re.findall(r"url\(\s*['\"]?(?:https?:)?//", styles) and "@import" not in styles


def test_reference_shows_docstrings(site: Path) -> None:
    page = text_of(site / "api" / "callbacks.html")
    assert 'id="tfdist.callbacks.FailureRecovery"' in page
    # The arguments of __init__ are documented in the class, examples are code, names of pages are links.
    assert "Save after this number of training steps" in page
    assert "&gt;&gt;&gt; " in page
    assert not [path.name for path in (site / "api").glob("*.html") if "<blockquote>" in text_of(path)]
    assert 'href="../guarantees.html"' in page


def test_command_line_shows_its_help(site: Path) -> None:
    page = text_of(site / "api" / "command_line.html")
    assert "--max-restarts" in page and "--verify" in page and "<!-- tfdist" not in page


def test_every_command_is_on_the_page(site: Path) -> None:
    page = text_of(site / "api" / "command_line.html")
    assert main._COMMANDS and all(f"usage: tfdist {command}" in page for command in main._COMMANDS)


def test_every_documented_name_has_a_heading(site: Path) -> None:
    reference = "".join(text_of(path) for path in (site / "api").glob("*.html"))
    names = {name for page in (ROOT / "docs" / "api").glob("*.md") for name in SHOWN.findall(text_of(page))}
    assert len(names) > 50 and not {name for name in names if not is_shown(name, reference)}


def test_examples_of_the_building_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = ROOT / "docs" / "building"
    monkeypatch.syspath_prepend(tools)
    modules = [importlib.import_module(path.stem) for path in tools.glob("*.py")]
    results = [doctest.testmod(module) for module in modules]
    assert sum(result.attempted for result in results) > 5 and not sum(result.failed for result in results)


def test_files_of_the_repository_are_copied(site: Path) -> None:
    copy = site / "repository" / "examples" / "kubernetes" / "job.yaml.txt"
    assert copy.read_bytes() == (ROOT / "examples" / "kubernetes" / "job.yaml").read_bytes()
    assert (site / "repository" / "benchmarks" / "results" / "network.png").is_file()


def test_a_warning_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Title\n\n[nowhere](gone.md)\n")
    (tmp_path / "mkdocs.yml").write_text(text_of(ROOT / "mkdocs.yml").split("\ntheme:")[0])
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode != 0 and "gone.md" in done.stdout + done.stderr
