"""The lab against real servers, without a server: what is told to the lab, and how the two are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.fidelity import figures, selection
from experiments.fidelity_lab import Told, behind_a_hop, predicted, slowed
from experiments.fidelity_tables import comparison, order, ranking, write_csv
from experiments.sim.step_time import Machine

PROFILE = Path(__file__).resolve().parent.parent / "profiles" / "cpu-tiny.yaml"


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.from_profile(yaml.safe_load(PROFILE.read_text()), PROFILE.name, kv_tokens=119 * 128)


def told(machine: Machine, hop_s: float, slower: float) -> Told:
    """What a server of that hop and speed shows."""
    short_s, probe_s = (slower * machine.seconds([(tokens, 0)]) for tokens in (16, 1024))
    return Told(short_s + hop_s, probe_s + hop_s, 16, 1024)


def test_a_hop_and_a_speed_are_read_from_two_prefills(machine: Machine) -> None:
    seen = told(machine, hop_s=0.02, slower=1.0)
    assert seen.slower(machine) == pytest.approx(1.0)
    assert seen.hop_s(machine) == pytest.approx(0.02)
    assert told(machine, 0.02, 1.5).slower(machine) == pytest.approx(1.5)
    assert replace(seen, probe_s=None).slower(machine) == 1.0


def test_a_slower_machine_takes_every_step_longer(machine: Machine) -> None:
    for batch in ([(1, 500)], [(512, 128), (1, 2000)]):
        assert slowed(machine, 2.0).seconds(batch) == pytest.approx(2 * machine.seconds(batch))


def test_a_hop_lengthens_every_gap_and_no_program_ends_with_one() -> None:
    plain = selection(seed=1, programs=2).programs(lambda _: None)
    for before, after in zip(plain, behind_a_hop(plain, 0.5), strict=True):
        grown = [b.gap_s - a.gap_s for a, b in zip(before.turns[:-1], after.turns[:-1], strict=True)]
        assert grown == pytest.approx([0.5] * len(grown)) and after.turns[-1].gap_s is None


def test_a_prediction_has_the_columns_of_a_measurement_and_follows_the_speed(machine: Machine) -> None:
    run = (selection(seed=1, programs=3), machine)
    plain = predicted(*run, told(machine, 0.0, 1.0), "continuum", True, 2048, 64)
    slow = predicted(*run, told(machine, 0.0, 2.0), "continuum", True, 2048, 64)
    assert slow["mean_s"] > 1.5 * plain["mean_s"]
    assert sum(plain[f"{name}_share"] for name in ("gpu", "offload", "computed")) == pytest.approx(1.0)
    summary = {
        "tokens_by_source": {"gpu": 60, "dram": 10, "ssd": 10, "computed": 20},
        "prompt_tokens": 100,
        "job_time_s": {"mean": 5.0, "p95": 9.0},
    }
    assert figures(summary).keys() - {"way"} == plain.keys()
    assert figures(summary)["offload_share"] == pytest.approx(0.2)


def test_the_comparison_takes_ratios_seed_by_seed_and_tells_the_ranking(tmp_path: Path) -> None:
    shares = {"gpu_share": 0.5, "offload_share": 0.0, "computed_share": 0.5}
    means_s = {"measured": {"a": (10, 20), "b": (20, 30)}, "predicted": {"a": (11, 33), "b": (20, 30)}}
    rows = [
        {"label": label, "seed": seed, "way": way, "mean_s": mean_s, "p95_s": mean_s, **shares}
        for way, labels in means_s.items()
        for label, pair in labels.items()
        for seed, mean_s in enumerate(pair, 1)
    ]
    line = next(line for line in comparison(rows) if line[:2] == ["a", "predicted"])
    assert line[3] == "1.38 (1.1..1.65)"
    assert order(rows, "predicted", 2) == ["b", "a"]
    assert ranking(rows).endswith("predicted: the measured order in 1 of 2 seeds")
    write_csv(rows, tmp_path / "rows.csv")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(rows)
