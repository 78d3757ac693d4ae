"""The comparison of TTLs by tiers, without a server: what is run for it is experiments/live_tiers.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum_lmcache.errors import ContinuumError
from experiments.live_tiers import Decisions, comparison, draw, settings


def decided(*ttl_s: float) -> Decisions:
    """One decision a turn, where bringing the KV back costs as much as the pin lasts."""
    return {("p", n): {"ttl_s": t, "reload_s": t, "benefit_s": 2 * t} for n, t in enumerate(ttl_s)}


SAME = [0.0] * 20
FOUND = {"all": decided(*SAME), "disk": decided(*[0.0] * 10, *[0.2] * 10), "little": decided(*[0.4] * 20)}


def test_each_server_is_compared_with_the_one_whose_reload_is_cheaper() -> None:
    _, whole, disk, little = comparison(FOUND)
    assert whole[0] == "all (n = 20)" and whole[1] == "0.000" and whole[-2:] == ["", ""]
    assert disk[1] == "0.100" and disk[3] == "0.50" and disk[-2] == "0.50 (shorter 0.00)"
    assert little[-2] == "1.00 (shorter 0.00)" and float(little[-1]) < 0.01


def test_a_shorter_ttl_is_shown_as_one() -> None:
    rows = comparison({"first": FOUND["little"], "second": FOUND["disk"]})
    assert rows[2][-2] == "0.00 (shorter 1.00)" and float(rows[2][-1]) > 0.99


def test_turns_that_were_not_decided_everywhere_are_left_out() -> None:
    assert comparison({"a": decided(0.0, 0.0, 9.0), "b": decided(0.1, 0.1)})[1][0] == "a (n = 2)"
    with pytest.raises(ContinuumError, match="no turn was decided on all servers"):
        comparison({"a": decided(0.0), "b": {}})


def test_the_memory_below_the_gpu_grows_from_too_little_to_enough() -> None:
    whole, disk, little = settings(1.0)
    assert little.dram_gb == disk.dram_gb == 0.2 and little.ssd_gb == 0.0
    assert disk.ssd_gb > 1.0 and whole.dram_gb > 1.0


def test_the_distributions_are_drawn(tmp_path: Path) -> None:
    draw(FOUND, tmp_path / "ttl.png")
    assert (tmp_path / "ttl.png").stat().st_size > 5000
