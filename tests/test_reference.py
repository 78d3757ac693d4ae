"""The docs' tables match the code; the dashboard queries existing metrics, in PromQL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lmcache")

from prometheus_client import REGISTRY
from serving import OF_VLLM

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.vllm_plugin.hooks.prometheus import METRICS, metrics
from experiments import reference

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = [
    *ROOT.glob("*.md"),
    *(page for name in ("docs", "experiments", "profiles", "tests") for page in (ROOT / name).rglob("*.md")),
]
RECORDS = ROOT / "experiments" / "records"  # pages as they were: what they link to elsewhere may have gone
DASHBOARD = ROOT / "docs" / "grafana" / "continuum.json"
ALERTS = DASHBOARD.with_name("alerts.yaml")


def asked() -> list[str]:
    """Every query of the dashboard's file."""
    page = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in page["panels"] for target in panel["targets"]]


def alerts() -> dict[str, str]:
    """The rules' expressions by their names."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def names(query: str) -> set[str]:
    return set(re.findall(r"(?:continuum_|vllm:)\w+", query))


def test_the_files_are_as_the_code_has_them() -> None:
    write = "run python -m experiments.reference"
    assert reference.METRICS_PAGE.read_text() == reference.metrics_page(), write
    assert reference.README.read_text() == reference.readme(), write
    assert reference.SETTINGS_PAGE.read_text() == reference.settings_page(), write


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(reference.README.read_text().splitlines()) <= 110


def test_the_page_of_settings_names_every_one_once() -> None:
    page = reference.SETTINGS_PAGE.read_text()
    for field in fields(ContinuumConfig):
        assert len(re.findall(rf"^\| `{field.name}` \|", page, re.MULTILINE)) == 1, field.name
        assert reference.comments()[field.name], f"config.py says nothing beside {field.name}"


def links(page: Path) -> list[tuple[Path, str]]:
    """The files that a page links to, and the headings in them ("": none)."""
    found = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text())
    return [((page.parent / file).resolve() if file else page, heading) for file, heading in found]


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    is_record = page.is_relative_to(RECORDS) and page.name != "README.md"
    for file, heading in links(page):
        if is_record and not file.is_relative_to(RECORDS):
            continue
        assert file.exists(), file
        assert not heading or heading in headings(file), f"{file.name}#{heading}"


def test_the_index_of_the_records_has_a_line_for_each_file() -> None:
    named = {file for file, _ in links(RECORDS / "README.md")}
    pictures = RECORDS / "figures"
    assert {file for file in RECORDS.rglob("*.*") if pictures not in file.parents} <= named | {
        RECORDS / "README.md",
        *RECORDS.glob("demo/*.png"),
        RECORDS / "soak.png",
    }


def test_a_picture_is_on_a_page_and_there_are_at_most_eight() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    pages_own = [path for path in (ROOT / "docs").rglob("*.*") if path.suffix in (".png", ".svg")]
    drawn = RECORDS.rglob("*.png")  # the commands leave an .svg beside each, which nothing shows
    pictures = [path.name for path in (*pages_own, *drawn)]
    assert all(f"/{name})" in pages or f"({name})" in pages for name in pictures), pictures
    assert len(pictures) <= 8, pictures


def test_every_page_is_at_most_two_links_away_from_the_readme_or_the_architecture() -> None:
    first = {reference.README, ARCHITECTURE}
    second = {file for page in first for file, _ in links(page) if file.suffix == ".md"}
    third = {file for page in second for file, _ in links(page)}
    assert set(PAGES) <= first | second | third


def test_the_architecture_fits_two_screens_and_names_what_there_is() -> None:
    text = ARCHITECTURE.read_text()
    assert len(text.splitlines()) <= 100
    sources = "".join(path.read_text() for path in sorted(ROOT.glob("c*/**/*.py")))
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
        assert f"class {owner}" in sources and re.search(rf"\b{member}\b", sources), f"{owner}.{member}"
    for name in re.findall(r"`([A-Z][a-z]\w+)`", text):
        assert re.search(rf"class {name}\b", sources), name


def test_the_page_lists_what_is_exported_with_its_type() -> None:
    metrics()
    listed = {(name, kind) for name, kind, _, _ in reference.metric_rows()}
    ours = {f"continuum_{key}" for key in METRICS}
    registered = {m.name: m.type for m in REGISTRY.collect() if m.name in ours}
    assert registered.keys() == ours
    for name, kind in registered.items():
        assert (f"{name}_total" if kind == "counter" else name, kind) in listed


def test_names_follow_the_conventions_of_prometheus() -> None:
    """Words in snake case, base units, no unit that is not one; histograms are of seconds."""
    for name, kind, label, text in reference.metric_rows():
        assert re.fullmatch(r"continuum(_[a-z]+)+", name), name
        assert not re.search(r"_(ms|us|milliseconds|kb|mb|gb|percent|perc)(_|$)", name), name
        assert kind != "histogram" or name.endswith("_seconds"), name
        assert (kind == "counter") == name.endswith("_total"), name
        assert label != "le" and not text.endswith("."), name


def test_each_query_asks_for_metrics_that_there_are() -> None:
    there = set(OF_VLLM)
    for name, kind, _, _ in reference.metric_rows():
        there |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    for query in [*asked(), *alerts().values()]:
        assert names(query) and names(query) <= there, query


def test_each_panel_is_of_the_chosen_servers() -> None:
    for query in asked():
        metrics = re.findall(r"(?:continuum_|vllm:)\w+", query)
        assert query.count('{instance=~"$instance"') == len(metrics), query


def test_the_dashboard_shows_what_operators_ask_first() -> None:
    """Why is the cache full, how long do new programs wait, and what of my clients' fields is not read?"""
    shown = set().union(*map(names, asked()))
    asked_first = {"pinned_blocks", "longest_wait_seconds", "ignored_fields_total", "tier_bytes_per_second"}
    assert {f"continuum_{name}" for name in asked_first} <= shown


def test_each_tile_has_a_unit_and_the_two_that_can_be_bad_are_coloured() -> None:
    page = json.loads(DASHBOARD.read_text())
    tiles = {p["title"]: p for p in page["panels"] if p["type"] == "stat"}
    for title, tile in tiles.items():
        assert tile["fieldConfig"]["defaults"]["thresholds"]["steps"], title
        assert tile["fieldConfig"]["defaults"]["unit"] != "short" or title in ("store up", "policy")
    for title in ("wait to start", "store up"):
        assert tiles[title]["options"]["colorMode"] == "background"
        assert len(tiles[title]["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1


def test_an_alert_says_that_a_server_is_down_and_that_new_programs_wait() -> None:
    rules = alerts()
    assert rules["ServerDown"].startswith("up == 0")
    assert "continuum_longest_wait_seconds" in rules["NewProgramsWaitLong"]


def test_a_real_prometheus_parses_each_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    rules = [
        {"record": f"panel:query:{i}", "expr": query.replace("$__rate_interval", "1m")}
        for i, query in enumerate([*asked(), *alerts().values()])
    ]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    ran = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert f"{len(rules)} rules found" in ran.stdout
