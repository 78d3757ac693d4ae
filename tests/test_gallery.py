"""The page of figures: its text on finished rows, and that it shows where continuum loses."""

from __future__ import annotations

from experiments.gallery import losses, page
from experiments.sweep.cases import Case, Point
from experiments.sweep.plans import PLANS
from experiments.sweep.readout import Found

MEANS_S = {
    "fcfs": (200.0, 300.0),
    "program-fcfs": (98.0, 130.0),
    "continuum": (100.0, 100.0),
    "infercept": (80.0, 99.0),
}


def pairs(dram_gb: float = 0.0) -> Found:
    """Rows of a figure of two seeds, as the sweep would have written them."""
    made: Found = []
    for name, means_s in MEANS_S.items():
        for seed, mean_s in enumerate(means_s, 1):
            case: Case = Point(name, 30, 0.08, seed, dram_gb=dram_gb)
            made.append((case, {"job_mean_s": str(mean_s), "jobs": "30", "measured": "False"}))
    return made


def test_a_faster_contender_is_named_with_its_ratio_seed_by_seed() -> None:
    [line] = losses("fig8", PLANS["fig8"], pairs())
    assert line == ["fig8", "0.08 programs/s", "continuum", "infercept", "1.13 (1.01..1.25)", "2 of 2"]


def test_contenders_are_compared_on_the_same_tiers_only() -> None:
    tiered = [line[2:4] for line in losses("fig9", PLANS["fig9"], pairs(dram_gb=100.0) + pairs())]
    assert tiered == [["continuum+LMCache", "infercept+LMCache"], ["continuum", "infercept"]]


def test_the_page_has_the_words_the_command_the_sizes_and_what_is_missing() -> None:
    text = page("# Figures\n", {"fig8": pairs()}, ["h1"])
    assert text.startswith("# Figures\n\n## Where continuum is slower by 1 % or more, simulated")
    assert "python -m experiments.offload_sweep fig8" in text and "![fig8](figures/fig8.png)" in text
    assert "[figures/fig8.csv](figures/fig8.csv)" in text
    assert "n = 30 programs, 0.08 a second, seeds 1, 2" in text
    assert "Not run at this size: h1." in text
