"""The documentation site builds strictly, in four parts, with a search, and asks no other host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "Makefile",
)
FOLDERS = ("docs", "experiments", "profiles", "tests", "continuum_lmcache", "connectors", "requirements")
PARTS = ("Start", "How-to", "Concepts", "Reference")

pytest.importorskip("mkdocs")


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(target)]
    return subprocess.run(
        [*command, "--config-file", str(root / "mkdocs.yml")], capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    ran = build(ROOT, target)
    assert ran.returncode == 0, ran.stderr
    return target


def test_the_first_page_has_the_four_parts_and_a_search(site: Path) -> None:
    page = (site / "index.html").read_text()
    for part in PARTS:
        assert re.search(rf"md-tabs__link\">\s*{part}\s*<", page), part
    assert (site / "search" / "search_index.json").is_file()


def test_pictures_of_results_are_dark_in_the_dark_scheme(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if '.png"' in page.read_text()]
    assert pages and all("dark.css" in page.read_text() for page in pages)
    assert 'img[src$=".png"]' in (site / "dark.css").read_text()


def test_every_page_of_docs_is_in_it_and_loads_nothing_from_another_host(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        built = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (built.with_name("index.html") if page.stem == "README" else built)).is_file(), page
    for page in site.rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?https?:", page.read_text()), page


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    for name in (*SOURCES, "Makefile", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in FOLDERS:  # the files that pages lead to; their content is not needed
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for dead in ("[x](nowhere.md)", "[x](settings.md#nowhere)", "[x](../tests/nowhere.py)"):
        page = tmp_path / "docs" / "gpu.md"
        page.write_text((ROOT / "docs" / "gpu.md").read_text() + f"\n{dead}\n")
        ran = build(tmp_path, tmp_path / "site")
        assert ran.returncode != 0 and "nowhere" in ran.stderr, dead
