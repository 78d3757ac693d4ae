"""The comparison with another simulator: its programs as described, and a table of paired ratios."""

from __future__ import annotations

from statistics import fmean, median

from experiments.agreement import CHOICES, POLICIES, programs, table


def test_the_programs_are_as_described_whichever_tools_they_call() -> None:
    for choice in (CHOICES["base"], CHOICES["tools-4"]):
        drawn = [p for seed in range(1, 6) for p in programs(seed, choice)]
        gaps_s = [t.gap_s for p in drawn for t in p.turns if t.gap_s is not None]
        assert 10.5 < fmean(len(p.turns) for p in drawn) < 11.3
        assert 67_000 < fmean(p.context_tokens for p in drawn) < 74_000
        assert 0.7 < fmean(gaps_s) < 1.1 and 0.1 < median(gaps_s) < 0.25
        assert all(p.turns[-1].gap_s is None for p in drawn)
    assert len({t.tool for p in drawn for t in p.turns}) == 4


def test_ratios_to_program_order_are_taken_on_the_same_seed() -> None:
    means_s = {"fcfs": [900.0, 2000.0], "program-fcfs": [300.0, 500.0], "continuum": [330.0, 500.0]}
    found = {("base", name): means_s.get(name, [300.0, 500.0]) for name in POLICIES}
    line = next(line for line in table(found) if line[1] == "continuum")
    assert line == ["base", "continuum", "415 +- 85", "401", "+3 %", "1.050 +- 0.050", "0.985"]
