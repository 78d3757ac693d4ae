"""The documentation site builds strictly, in four parts, with a search, and asks no other host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import DEVICES, Browser, Page, luminance

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
LOOKED_AT = ("index.html", "results.html", "how-it-works.html", "policy/places.html")
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
    assert pages and all("site.css" in page.read_text() for page in pages)
    assert 'img[src$=".png"]' in (site / "site.css").read_text()


def test_every_page_of_docs_is_in_it_and_loads_nothing_from_another_host(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        built = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (built.with_name("index.html") if page.stem == "README" else built)).is_file(), page
    for page in site.rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?https?:", page.read_text()), page


# in a browser ---------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Of the site on a server: from a file its search may not start."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def page(chromium: Browser) -> Page:
    found = Page(chromium)
    found.shown_on("desk")
    return found


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_page_shows_its_pictures_fits_the_window_and_finds_all_that_it_asks_for(
    page: Page, address: str, name: str
) -> None:
    for device, (width, _, _) in DEVICES.items():
        page.shown_on(device)
        page.open(address + name)
        page.until(f"innerWidth == {width}")
        whole = "document.documentElement"
        assert page.js(f"{whole}.scrollWidth") <= page.js(f"{whole}.clientWidth"), device
    images = page.js("[...document.images].map(e => [e.src, e.naturalWidth])")
    assert all(width > 0 for _, width in images) and (images or name == "results.html")
    assert page.said == []
    assert [asked for asked in page.asked if not asked.startswith((address, "data:"))] == []
    assert {asked: status for asked, status in page.answers.items() if status >= 400} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_follows_the_systems_scheme_also_at_a_later_visit_and_can_be_read(
    page: Page, address: str, scheme: str
) -> None:
    for system in ("dark" if scheme == "light" else "light", scheme):  # the first visit's does not stay
        page.shown_on("desk", system)
        page.open(f"{address}index.html")
        page.until(f"document.body.dataset.mdColorScheme == '{'slate' if system == 'dark' else 'default'}'")
    for text in ("article h1", "article p", "article td", "article pre code"):
        assert page.contrast(text) >= 4.5, text
    assert areas_are_dark(page, "article img")[0] == (scheme == "dark")


@pytest.mark.parametrize("system", ["light", "dark"])
def test_a_drawing_has_the_colours_that_the_reader_chose_whatever_the_system_has(
    page: Page, address: str, system: str
) -> None:
    page.shown_on("desk", system)
    page.open(f"{address}how-it-works.html")
    for scheme, dark in (("default", False), ("slate", True)):  # as the toggle goes: system, light, dark
        page.js("document.querySelector('[data-md-component=palette] label:not([hidden])').click()")
        page.until(f"document.body.dataset.mdColorScheme == '{scheme}'")
        page.until("!document.body.dataset.mdColorSwitching")
        assert areas_are_dark(page, "article img")[:2] == [dark, dark]  # the page's own, and a box's


def areas_are_dark(page: Page, selector: str) -> list[bool]:
    """Of an element's colours, whether each is dark, by how much of it they cover."""
    picture = page.picture(selector)
    colours: Any = picture.getcolors(picture.width * picture.height)
    return [luminance(colour) < 0.25 for _, colour in sorted(colours, reverse=True)]


def test_the_search_finds_a_setting(page: Page, address: str) -> None:
    page.open(f"{address}index.html")
    page.js("document.querySelector('.md-search__input').focus()")
    page.send("Input.insertText", text="longest_wait_s")
    page.until("document.querySelector('.md-search-result__link')")
    links = page.js("[...document.querySelectorAll('.md-search-result__link')].map(e => e.href)")
    assert any("settings.html" in link for link in links), links


def test_the_words_of_the_drawing_lie_within_their_boxes(page: Page) -> None:
    page.open((ROOT / "docs" / "pictures" / "architecture.svg").as_uri())
    texts, boxes = (
        page.js(
            f"[...document.querySelectorAll('{kind}')].map(e => (b => [b.left, b.top, b.right, b.bottom, "
            "e.textContent])(e.getBoundingClientRect()))"
        )
        for kind in ("text", "rect")
    )
    within = 0
    for left, top, right, bottom, text in texts:
        for x0, y0, x1, y1, _ in boxes:
            if x0 <= left <= x1 and y0 <= (top + bottom) / 2 <= y1:
                within += 1
                assert right <= x1 - 4 and y0 <= top and bottom <= y1, text
    assert within > 20


# ------------------------------------------------------------------------------------


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
