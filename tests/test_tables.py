"""Tables and figures from summaries."""

import csv
import json

import pytest

from experiments.figures import OTHER, OURS, RECORDS, STOCK, draw, draw_job_times, draw_tiers, plt
from experiments.summary import figures
from experiments.tables import RATIO, SummaryError, comparison, load, main, markdown, shown, spread, write_csv


def summary(label, seed, jobs, **changes):
    return {
        "schema": 1,
        "label": label,
        "seed": seed,
        "jps": 0.5,
        "time_scale": 1.0,
        "workload": "w",
        "programs": len(jobs),
        "job_time_s": figures(jobs),
        "ttft_s": figures([1.0]),
        "job_times_s": sorted(jobs),
        "tokens_by_source": {"gpu": 10, "dram": 20, "ssd": 0, "computed": 70},
        "pins": {},
        "errors": 0,
        "server": {},
    } | changes


@pytest.fixture
def runs(tmp_path):
    every = [
        summary("fcfs", 1, [4.0, 8.0]),
        summary("fcfs", 2, [2.0, 2.0]),
        summary("fcfs", 3, [9.0]),
        summary("continuum", 2, [4.0, 4.0], pins={"taken": 3}),
        summary("continuum", 1, [2.0, 4.0], pins={"taken": 5}),
    ]
    paths = [tmp_path / f"{i}.json" for i in range(len(every))]
    for path, content in zip(paths, every, strict=True):
        path.write_text(json.dumps(content))
    return load(paths)


def row(rows, name):
    return next(cells[1:] for cells in rows if cells[0] == name)


def test_a_cell_is_the_median_and_the_range_over_the_seeds(runs):
    rows = comparison(runs)
    assert rows[0] == ["", "fcfs", "continuum"]
    assert row(rows, "job time mean, s") == ["6 (2..9)", "3.5 (3..4)"]


def test_the_ratio_is_paired_by_seed_and_not_by_order(runs):
    # seed 1: 6 / 3, seed 2: 2 / 4; seed 3 has no partner
    assert row(comparison(runs), RATIO) == ["1 (1..1)", "1.25 (0.500..2)"]


def test_figures_that_no_run_has_get_no_row(runs):
    rows = comparison(runs)
    names = [cells[0] for cells in rows]
    assert "pins taken" in names and "pins reused" not in names and "jobs/s" not in names
    assert row(rows, "pins taken") == ["", "4 (3..5)"]


def test_a_figure_that_is_zero_everywhere_is_still_shown(runs):
    assert row(comparison(runs), "failed turns") == ["0 (0..0)", "0 (0..0)"]


def test_markdown_has_a_column_for_every_label(runs):
    lines = markdown(comparison(runs)).splitlines()
    assert {line.count("|") for line in lines} == {4}
    assert lines[1] == "|---|---:|---:|"


def test_the_csv_has_every_run_unrounded(runs, tmp_path):
    write_csv(runs, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["label"], r["seed"]) for r in rows] == [
        *(("fcfs", s) for s in "123"),
        ("continuum", "2"),
        ("continuum", "1"),
    ]
    assert float(rows[0]["job time mean, s"]) == 6.0 and rows[0]["pins taken"] == ""


def test_the_figure_is_drawn_as_png_and_svg(runs, tmp_path):
    png, svg = draw(runs, tmp_path / "figure")
    assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in svg.read_text()


def test_a_curve_of_programs_that_were_cut_off_ends_below_one():
    axes = plt.figure().subplots()
    whole, cut = (
        summary("continuum", 1, [1.0, 2.0]),
        summary("fcfs", 1, [3.0, 4.0, 9.0, 9.0], cut_s=[9.0, 9.0]),
    )
    draw_job_times(axes, {"fcfs + LMCache": [cut], "continuum + LMCache": [whole], "other": [whole]})
    assert [line.get_ydata()[-1] for line in axes.lines] == [0.5, 1.0, 1.0]
    assert [line.get_color() for line in axes.lines] == [STOCK, OURS, OTHER]


def test_readmes_figure_is_drawn_from_the_records(tmp_path):
    png, svg = draw_tiers(RECORDS / "tiers.csv", tmp_path / "figure")
    assert png.exists() and "<svg" in svg.read_text()


def test_the_figure_is_drawn_without_finished_jobs_or_metrics_too(tmp_path):
    empty = summary("none", 1, [], tokens_by_source={})
    assert all(path.exists() for path in draw({"none": [empty]}, tmp_path / "empty"))


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 99}'])
def test_a_file_that_is_no_summary_is_named(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(SummaryError, match=r"bad\.json: not a summary"):
        load([path])


def test_the_command_prints_markdown_with_a_caption(runs, tmp_path, capsys):
    del runs  # they lie in tmp_path
    paths = sorted(tmp_path.glob("*.json"))
    main(paths, as_markdown=True, table=tmp_path / "t.csv", figure=tmp_path / "f")
    said = capsys.readouterr().out
    assert said.startswith("w: 1 programs, 0.5 a second, gaps x 1; w: 2 programs")
    assert "| job time mean, s | 6 (2..9) | 3.5 (3..4) |" in said
    assert (tmp_path / "t.csv").exists() and (tmp_path / "f.svg").exists()


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.1234, "0.123"), (1.234, "1.23"), (56.78, "56.8"), (12345.6, "12,346")]
)
def test_figures_are_shown_short(value, text):
    assert shown(value) == text
    assert spread([]) == "" and spread([value]) == text
