"""Tables and figures from summaries."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from experiments import figures as pictures
from experiments.figures import OTHER, OURS, STOCK, draw_job_times, plt
from experiments.summary import figures
from experiments.tables import RATIO, SummaryError, between, load, main


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
    return paths


def test_no_label_of_the_frontier_lies_on_another_or_on_the_frame(monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, _: drawn.append(figure))
    pictures.draw_frontier(pictures.RECORDS / "frontier.csv", Path("not-written"))
    (figure,) = drawn
    figure.draw_without_rendering()
    for axes in figure.axes:
        frame, labels = axes.get_window_extent(), [text.get_window_extent() for text in axes.texts]
        assert all(frame.x0 < box.x0 and box.x1 < frame.x1 and box.y1 < frame.y1 for box in labels)
        assert not [pair for pair in combinations(labels, 2) if pair[0].overlaps(pair[1])]
    plt.close(figure)


def test_a_curve_of_programs_that_were_cut_off_ends_below_one():
    axes = plt.figure().subplots()
    whole, cut = (
        summary("continuum", 1, [1.0, 2.0]),
        summary("fcfs", 1, [3.0, 4.0, 9.0, 9.0], cut_s=[9.0, 9.0]),
    )
    draw_job_times(axes, {"fcfs + LMCache": [cut], "continuum + LMCache": [whole], "other": [whole]})
    assert [line.get_ydata()[-1] for line in axes.lines] == [0.5, 1.0, 1.0]
    assert [line.get_xdata()[-1] for line in axes.lines] == [9.0, 9.0, 9.0]
    assert [line.get_color() for line in axes.lines] == [STOCK, OURS, OTHER]


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 99}'])
def test_a_file_that_is_no_summary_is_named(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(SummaryError, match=r"bad\.json: not a summary"):
        load([path])


def test_a_cell_is_the_median_and_the_range_over_the_seeds_and_the_ratio_is_paired_by_seed(
    runs, tmp_path, capsys
):
    """Seed 1: 6 / 3, seed 2: 2 / 4; seed 3 has no partner."""
    paths = sorted(runs)
    main(paths, as_markdown=True, table=tmp_path / "t.csv", figure=tmp_path / "f")
    said = capsys.readouterr().out
    assert said.startswith("w: 1 programs, 0.5 a second, gaps x 1; w: 2 programs")
    assert "| job time mean, s | 6 (2..9) | 3.5 (3..4) |" in said
    assert f"| {RATIO} | 1 (1..1) | 1.25 (0.500..2) |" in said
    assert (tmp_path / "t.csv").exists() and (tmp_path / "f.svg").exists()


def test_a_page_takes_a_table_between_its_marks_and_keeps_the_rest():
    marks = ("<!-- a -->", "<!-- /a -->")
    assert between("a\n<!-- a -->\nold\n<!-- /a -->\nb\n", marks, "new") == (
        "a\n<!-- a -->\nnew\n<!-- /a -->\nb\n"
    )
    with pytest.raises(ValueError, match="has no lines"):
        between("nothing", marks, "new")
