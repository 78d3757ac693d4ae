"""The report as a person sees it, in a real browser. Without one these tests are skipped."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from browser import DEVICES, Browser, Page
from recorded import ABOUT, EPOCH_S, Run, written

pytest.importorskip("plotly")
pytest.importorskip("vllm")

from test_report import HOSTILE
from test_sim import SMALL, many_programs

from continuum_lmcache.recordings.reader import Recording, load
from continuum_lmcache.report import charts
from continuum_lmcache.report.page import page as report
from continuum_lmcache.telemetry.recorder import EventRecorder
from experiments.sim.engine import simulate

LEGIBLE = 4.5  # WCAG 2, AA: text
SEEN = 3.0  # and lines
TEXTS = """[...document.querySelectorAll('.js-plotly-plot')].map(plot => {
  const rectangle = e => (b => [b.left, b.top, b.right, b.bottom])(e.getBoundingClientRect())
  const texts = [...plot.querySelectorAll('text')].filter(t => t.getBoundingClientRect().width)
  return [rectangle(plot), texts.map(t => [t.textContent, rectangle(t)])]
})"""
MARKUP = "<b>&lt;</b><a href='https://x.y'>z</a>"  # of the kind that plotly reads
PLOT = ".js-plotly-plot"
FITS = "Math.abs(e.clientWidth - e.querySelector('.main-svg').clientWidth) < 2"  # plotly draws it anew


def each(selector: str, expression: str) -> str:
    """JavaScript for a list: an expression of each element e that a selector finds."""
    return f"[...document.querySelectorAll('{selector}')].map(e => {expression})"


def simulated(folder: Path, policy: str, tiers: dict[str, float] | None) -> Recording:
    """Nine programs on vLLM's own scheduler, in virtual time."""
    programs = [
        replace(program, turns=tuple(replace(turn, tool="pytest") for turn in program.turns))
        for program in many_programs(9, every_s=0.5, turns=4)
    ]
    continuum = {"run_output_dir": str(folder / policy), "record_ids": True}
    simulate(programs, replace(SMALL, policy=policy, tiers=tiers, continuum=continuum))
    return load(folder / policy)


def hostile(folder: Path) -> Recording:
    """Whatever a client, a model or a folder can be called is a piece of HTML, also beyond 40 characters."""
    run = Run()
    run.recorder = EventRecorder(EPOCH_S, {**ABOUT, "model": HOSTILE})
    for number, name in enumerate((HOSTILE, "<svg onload=document.title='taken'>", "w" * 300, "&lt;")):
        run.turn(name, f"{number}a", (0, 1, 4), served=(10, 10, 0), tool=(MARKUP,))
        run.turn(name, f"{number}b", (6, 7, 9))
    (folder / "<img src=x onerror=alert(1)>").mkdir()
    return load(written(folder / "<img src=x onerror=alert(1)>", run.recorder))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Recording]]:
    """Recordings by report: two of vLLM's scheduler, with loads and with pins; one alone; the hostile one."""
    folder = tmp_path_factory.mktemp("runs")
    loads = simulated(folder, "program-fcfs", {"dram_gb": 1.0, "ssd_gb": 8.0})
    pins = simulated(folder, "continuum", None)
    return {"two runs": [loads, pins], "one run": [pins], "hostile": [hostile(folder)]}


@pytest.fixture(scope="module")
def pages(
    chromium: Browser, runs: dict[str, list[Recording]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Page]:
    """The three reports, each in a tab."""
    folder, tabs = tmp_path_factory.mktemp("pages"), {}
    for name, of in runs.items():
        file = folder / f"{name}.html"
        file.write_text(report(of))
        tabs[name] = Page(chromium)
        tabs[name].shown_on("desk")
        tabs[name].open(file.as_uri())
    return tabs


@pytest.fixture(params=["two runs", "one run", "hostile"])
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def page(pages: dict[str, Page], name: str) -> Page:
    pages[name].shown_on("desk")
    pages[name].js("scrollTo(0, 0)")
    pages[name].mouse("Moved", 0, 0)
    pages[name].until("!document.querySelector('.hovertext')")
    return pages[name]


def test_the_tests_see_what_a_page_asks_for_and_what_goes_wrong_in_it(
    chromium: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "bad.html"
    file.write_text("<img src='https://example.com/x.png'><script>console.error('said'); thrown()</script>")
    page = Page(chromium)
    page.open(file.as_uri())
    assert page.asked == [file.as_uri(), "https://example.com/x.png"]
    said = "\n".join(page.said)
    assert "said" in said and "thrown is not defined" in said and "ERR_NAME_NOT_RESOLVED" in said


def test_it_asks_for_nothing_and_no_script_fails(page: Page) -> None:
    assert page.said == []
    assert [address for address in page.asked if not address.startswith(("data:", "blob:"))] == [
        page.js("location.href")
    ]


def test_every_picture_is_drawn_with_every_state_and_every_run(
    page: Page, name: str, runs: dict[str, list[Recording]]
) -> None:
    mine = runs[name]
    assert page.js(f"document.querySelectorAll('{PLOT}').length") == len(mine) + 6
    sizes = page.js(each(f"{PLOT} .main-svg:first-child", "[e.clientWidth, e.clientHeight]"))
    assert all(width > 200 and height > 150 for width, height in sizes), sizes
    drawn = page.js(each(PLOT, "e.querySelectorAll('.bars path').length"))
    spans = [[s for p in run.programs for s in charts.spans(p, run.end_s)] for run in mine]
    assert drawn[: len(mine)] == [len(found) for found in spans] and min(drawn[: len(mine)]) > 10
    lines = page.js(each(PLOT, "e.querySelectorAll('.scatterlayer .js-line').length"))
    assert lines[: len(mine)] == [0] * len(mine)
    pinned = sum(any(p.pins for p in run.programs) for run in mine)
    assert lines[len(mine) :] == [len(mine)] * 3 + [pinned] + [len(mine)] * 2


def test_names_of_programs_and_of_tools_are_text(
    page: Page, name: str, runs: dict[str, list[Recording]]
) -> None:
    names = page.js(
        f"[...document.querySelector('{PLOT}').querySelectorAll('.ytick')].map(e => e.textContent)"
    )
    ids = [program.id for program in runs[name][0].programs]
    assert names == [each if len(each) <= 40 else each[:39] + "…" for each in ids]
    bar = page.box(f"{PLOT} .trace.bars:nth-child(3) .point")  # the first tool's time
    page.mouse("Moved", bar.x + bar.width / 2, bar.y + 2)  # above its pin
    page.until("document.querySelector('.hovertext')")
    said = page.js("document.querySelector('.hovertext').textContent")
    assert names[0] in said and (MARKUP if name == "hostile" else "pytest") in said


def test_a_hostile_name_is_shown_and_neither_runs_nor_becomes_an_element(pages: dict[str, Page]) -> None:
    page = pages["hostile"]
    title = "<img src=x onerror=alert(1)>"
    assert page.js("document.title") == page.js("document.querySelector('h1').textContent") == title
    assert page.js("document.querySelectorAll('body b, body img, body svg svg, body [onload]').length") == 1
    assert HOSTILE in page.js("document.querySelector('table').innerText")


@pytest.mark.parametrize("device", ["desk", "phone"])
def test_the_page_is_as_wide_as_the_window_and_no_text_is_cut_or_lies_on_another(
    page: Page, device: str
) -> None:
    page.shown_on(device)
    page.until(f"innerWidth == {DEVICES[device][0]}")
    page.until(each(PLOT, FITS) + ".every(fits => fits)")
    whole = "document.documentElement"
    assert page.js(f"{whole}.scrollWidth") <= page.js(f"{whole}.clientWidth")
    for (left, top, right, bottom), texts in page.js(TEXTS):
        for text, box in texts:
            assert left <= box[0] and top <= box[1] and box[2] <= right and box[3] <= bottom, text
        for (one, a), (other, b) in combinations(texts, 2):
            beside = a[2] <= b[0] + 4 or b[2] <= a[0] + 4 or a[3] <= b[1] + 3 or b[3] <= a[1] + 3
            assert beside, f"{one} lies on {other}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_in_the_light_and_in_the_dark(page: Page, name: str, scheme: str) -> None:
    page.shown_on("desk", scheme)
    for text in ("h1", "h2", "p", "th:last-child", "td", ".ytick", ".xtick", ".xtitle", ".legendtext"):
        assert page.contrast(text) >= LEGIBLE, text
    assert page.contrast(".scatterlayer") >= SEEN
    for number in range(1, 3 if name == "two runs" else 1):  # each run's line, in the legend
        assert page.contrast(f".figures:nth-of-type(3) .traces:nth-of-type({number}) .legendlines", 3) >= SEEN
    ground = page.picture("h1").getpixel((0, 0))
    assert (sum(ground) < 3 * 64) == (scheme == "dark")


def test_loads_and_pins_are_seen_between_what_is_longer(pages: dict[str, Page]) -> None:
    pages["two runs"].shown_on("desk")
    for number, state in enumerate(("loading", "pinned"), 1):
        colour = charts.STATES[state][0]
        wanted = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
        picture = pages["two runs"].picture(f".figures:nth-of-type({number}) .barlayer")
        count = sum(n for n, each in picture.getcolors(1 << 20) or [] if each == wanted)
        assert count > 100, f"{state}: {count} pixels"


def test_a_wheel_over_a_picture_scrolls_the_page(page: Page) -> None:
    x, y = page.box(f"{PLOT} .nsewdrag").middle
    page.mouse("Moved", x, y)
    page.mouse("Wheel", x, y, deltaX=0, deltaY=200)
    page.until("scrollY > 100")


def test_a_finger_on_a_picture_scrolls_the_page(chromium: Browser, pages: dict[str, Page]) -> None:
    page = Page(chromium)
    page.shown_on("phone")
    page.open(pages["one run"].js("location.href"))
    page.js(f"document.querySelector('{PLOT}').scrollIntoView()")
    page.settle()
    before = page.js("scrollY")
    x, y = page.box(f"{PLOT} .nsewdrag")[:2]
    page.touch((x + 50, y + 140), (x + 50, y + 20))
    page.until(f"scrollY > {before} + 50")


def test_a_drag_zooms_and_a_double_click_shows_all_again(page: Page) -> None:
    seen = f"document.querySelector('{PLOT}')._fullLayout.xaxis.range.map(x => Math.round(x * 100) / 100)"
    whole = page.js(seen)
    x, y = page.box(f"{PLOT} .nsewdrag").middle
    page.mouse("Moved", x, y)
    page.mouse("Pressed", x, y, button="left", clickCount=1)
    page.mouse("Moved", x + 100, y, button="left", buttons=1)
    page.mouse("Released", x + 100, y, button="left", clickCount=1)
    page.until(f"{seen}[1] < {whole[1]}")
    for clicks in (1, 2):
        page.mouse("Pressed", x, y, button="left", clickCount=clicks)
        page.mouse("Released", x, y, button="left", clickCount=clicks)
    page.until(f"String({seen}) == '{','.join(f'{x:g}' for x in whole)}'")
