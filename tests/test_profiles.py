"""The profiles in profiles/: each can be read, names its source, and has no private data."""

from pathlib import Path

import pytest
import yaml

from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.types import Residency
from experiments.sim.datasheets import KV_TOKENS, derived, path_of

FOLDER = Path(__file__).resolve().parent.parent / "profiles"
PROFILES = sorted(FOLDER.glob("*.yaml"))
ORIGIN = {"date", "command", "device", "driver", "versions", "python", "repetitions", "model"}


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_can_be_read_and_says_whether_it_was_measured(path):
    profile = yaml.safe_load(path.read_text())
    assert CostModel.from_mapping(profile, path.name).measured is profile["provenance"]["measured"]
    if profile["provenance"]["measured"]:
        assert set(profile["provenance"]) >= ORIGIN
        assert profile["provenance"]["prefill_fit"]["r2"] >= 0.98


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_names_no_place(path):
    """No absolute path: profiles are shared."""
    words = path.read_text().replace("'", " ").replace('"', " ").split()
    assert not [word for word in words if word.startswith("/")]


@pytest.mark.parametrize("name", KV_TOKENS)
def test_a_derived_profile_is_what_its_data_sheet_gives(name):
    assert yaml.safe_load(path_of(name).read_text()) == derived(name)


@pytest.mark.parametrize(("name", "from_disk"), [(name, name != "b200") for name in KV_TOKENS])
def test_every_card_gains_by_dram_and_all_but_the_fastest_by_a_disk(name, from_disk):
    """32,000 tokens of Llama 3.1 8B are 4.2 GB: 0.84 s from a disk of 5 GB/s; a B200 computes them sooner."""
    costs = CostModel.from_mapping(derived(name))
    compute_s = costs.prefill_s(32_000)
    assert costs.reload_s(Residency(0, 32_000, 0, 32_000)) < compute_s
    assert (costs.reload_s(Residency(0, 0, 32_000, 32_000)) < compute_s) is from_disk
