"""The soak counts every table, also new ones, and names those that grow."""

from __future__ import annotations

from collections import Counter

from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.types import ProgramId
from experiments.trust.soak_scheduler import LIMITS, SMALL, growing, soak, tables


def test_every_container_that_our_objects_hold_is_counted_under_its_path() -> None:
    programs = ProgramTable(100)
    for name in "abc":
        programs.add(0.0, ProgramId(name), "", 0.0, one_turn=False).prompt_hashes = [1, 2]
    counted = tables(programs)
    assert counted[".records"] == 3 and counted[".records[].prompt_hashes"] == 6


def test_a_table_that_grows_after_the_warm_up_is_named_and_one_below_its_bound_is_not() -> None:
    bound, limit = next(iter(LIMITS.items()))
    samples = [
        (float(s), Counter({"leak": s, "flat": 500 + s % 2, "small": s * SMALL // 1000, bound: s}))
        for s in range(0, 1000, 10)
    ]
    assert limit > 1000
    assert growing(samples, 200.0, 1000.0) == {"leak": (390, 990)}


def test_a_short_soak_serves_everybody_and_samples_every_minute() -> None:
    run = soak(150.0, 5.0)
    assert len(run.samples) >= 3 and len(run.agents.jobs) == len(run.agents.programs)
    assert all(counted[".engine.programs.records"] for _, counted in run.samples[1:])
    _, counted = run.samples[-1]
    assert LIMITS.keys() <= counted.keys(), "a table that moved is not looked for where it was"
