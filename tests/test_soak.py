"""The soak's report: growth after the warm-up, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.soak_report import Sample, growth, report, verdict


def run(leak_mib: float) -> list[Sample]:
    """Two minutes in which the engine warms up for 30 s and then leaks so much a sample."""
    return [
        Sample(
            at_s=2.0 * i,
            mib={"engine": min(500.0 + 20 * i, 800.0) + leak_mib * i},
            files={"engine": 40 + i % 2},
            programs=20.0,
            pinned_blocks=float(i % 5),
            gaps=1000,
            started=i,
            turns=4 * i,
        )
        for i in range(61)
    ]


@pytest.mark.parametrize(("leak_mib", "said"), [(0.0, "flat"), (3.0, "+12.1%")])
def test_a_warm_up_is_no_leak_and_a_leak_is_reported(leak_mib: float, said: str, tmp_path: Path) -> None:
    report(run(leak_mib), failed=0, docs=tmp_path)
    (row,) = [line for line in (tmp_path / "soak.md").read_text().splitlines() if "memory" in line]
    assert row.endswith(f"| {said} |")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_two_more_open_files_are_no_growth_and_three_are() -> None:
    assert verdict("open files of the engine", 40, 42) == "flat"
    assert verdict("open files of the engine", 40, 43) == "+7.5%"


def test_growth_is_taken_from_medians_so_that_one_spike_says_nothing() -> None:
    values = [10.0] * 100
    values[-1] = values[34] = 99.0
    assert growth(values) == (10.0, 10.0)
