"""Loads that cost more than computing are not made: vLLM's scheduler over the fake tiers, in virtual time.

Six programs take turns on a GPU that holds one of their contexts, one at a time: every return finds its
context evicted. An A100 computes KV of the 8B model at about 1.4 GB/s here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from continuum_lmcache.types import Tier
from experiments import policies
from experiments.sim.agents import Agents
from experiments.sim.clock import VirtualClock, virtual_time
from experiments.sim.engine import Simulation, simulate
from experiments.sim.result import Result
from experiments.sim.serving import Setup, build_scheduler
from experiments.sim.step_time import MACHINES
from experiments.workload import Program, TurnSpec

A100 = replace(MACHINES["a100"], kv_tokens=10_240)
PROGRAMS, TURNS, FIRST_TOKENS, NEW_TOKENS = 6, 8, 6000, 256
SLOW_GBPS = 0.4


def rotation(round_s: float = 30.0) -> list[Program]:
    """The next turn of each program comes after all others' turns: at 30 s none has to wait."""
    specs = [TurnSpec(FIRST_TOKENS, FIRST_TOKENS, 4, "bash", "", round_s)]
    for _ in range(TURNS - 1):
        specs.append(TurnSpec(specs[-1].context_tokens + NEW_TOKENS, NEW_TOKENS, 4, "bash", "", round_s))
    turns = (*specs[:-1], replace(specs[-1], gap_s=None))
    return [Program(f"p{i}", i * round_s / PROGRAMS, turns) for i in range(PROGRAMS)]


def engine(tiers: dict[str, Any] | None, profile: Path) -> Setup:
    return Setup("program-fcfs", tiers, {"profile": str(profile)}, A100, shared_tokens=0)


def a_profile(folder: Path, ssd_gbps: float = SLOW_GBPS, samples: int = 30) -> Path:
    """Measured on the A100, its disk at `ssd_gbps`."""
    told = A100.policy_profile(256, ssd_gbps)
    costs = told | {s: {**told[s], "samples": samples} for s in ("prefill", "dram", "ssd")}
    path = folder / f"profile-{ssd_gbps:g}-{samples}.yaml"
    path.write_text(yaml.safe_dump(costs))
    return path


def returns(result: Result) -> list[float]:
    """Seconds to the first token of every turn but the programs' first, in the order they ended."""
    return [turn.ttft_s for turn in result.turns if turn.number > 1]


DISK_ONLY = {"dram_gb": 0.0, "ssd_gb": 200.0, "ssd_load_gbps": SLOW_GBPS}


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(some) / sum(others)


def test_a_disk_slower_than_computing_makes_no_first_token_later_than_without_it(tmp_path: Path) -> None:
    profile = a_profile(tmp_path)
    without = returns(simulate(rotation(), engine(None, profile)))
    chosen = simulate(rotation(), engine(DISK_ONLY, profile))
    with policies.registered("always loads", policies.without("program-fcfs", "load_or_recompute")):
        always = returns(simulate(rotation(), replace(engine(DISK_ONLY, profile), policy="always loads")))
    assert ratio(returns(chosen), without) < 1.05
    assert ratio(always, without) > 2, "the disk must be slow, or this proves nothing"
    assert chosen.tokens["ssd"] == 0


def test_dram_at_full_speed_is_loaded(tmp_path: Path) -> None:
    profile = a_profile(tmp_path)
    without = returns(simulate(rotation(), engine(None, profile)))
    result = simulate(rotation(), engine({"dram_gb": 200.0}, profile))
    assert ratio(returns(result), without) < 0.5
    assert result.tokens["dram"] > 0.8 * sum(result.tokens.values()) * (TURNS - 1) / TURNS


def test_a_profile_that_takes_the_disk_for_fast_is_corrected_by_three_loads(tmp_path: Path) -> None:
    profile = a_profile(tmp_path, ssd_gbps=5.0)
    without = returns(simulate(rotation(), engine(None, profile)))
    result = simulate(rotation(), engine(DISK_ONLY, profile))
    loaded = [turn.ssd_tokens > 0 for turn in result.turns if turn.number > 1]
    assert 1 <= sum(loaded) <= 4 and not any(loaded[4:])
    assert ratio(returns(result)[4:], without[4:]) < 1.05


def test_without_a_profile_the_same_is_learned_from_the_steps_and_the_loads(tmp_path: Path) -> None:
    guess = a_profile(tmp_path, ssd_gbps=5.0, samples=0)
    without = returns(simulate(rotation(), engine(None, guess)))
    result = simulate(rotation(), engine(DISK_ONLY, guess))
    assert median(a / b for a, b in zip(returns(result)[6:], without[6:], strict=True)) < 1.05


@pytest.mark.parametrize(("told_gbps", "does_gbps"), [(5.0, 0.2), (0.2, 5.0)], ids=["too fast", "too slow"])
def test_a_tier_whose_rate_the_profile_has_wrong_counts_as_room_by_what_it_does(
    told_gbps: float, does_gbps: float
) -> None:
    """Room for programs that have started, asked again as loads show the rates."""
    tiers = {"dram_gb": 0.0, "ssd_gb": 200.0, "ssd_load_gbps": does_gbps}
    lies = Setup("program-fcfs", tiers, machine=A100, shared_tokens=0, told_gbps=told_gbps)
    at_first, afterwards = (engine_after(lies, programs) for programs in ([*rotation()[:1]], rotation()))
    assert (at_first.admission.capacity.tier_tokens > 0) is (told_gbps > 1.4)
    assert (afterwards.admission.capacity.tier_tokens > 0) is (does_gbps > 1.4)


def long_answers() -> list[Program]:
    """Three prompts fit the GPU, three answers do not: the latest of them loses its memory on the way."""
    return [Program(f"p{i}", i * 0.1, (TurnSpec(2500, 2500, 2500, "bash", "", None),)) for i in range(3)]


@pytest.mark.parametrize(
    ("tiers", "decision"), [({"dram_gb": 200.0}, "load"), (DISK_ONLY, "recompute")], ids=["DRAM", "slow disk"]
)
def test_a_preempted_request_is_brought_back_the_cheaper_way(
    tmp_path: Path, tiers: dict[str, Any], decision: str
) -> None:
    """No program returns from a tool here, so LoadPolicy decides about preempted requests only."""
    setup = engine(tiers, a_profile(tmp_path))
    assert (lost := simulate(long_answers(), setup).preemptions) > 0
    assert counts(setup, long_answers()) == {decision: lost}


def test_a_tier_that_holds_what_is_not_loaded_has_not_lost_it(tmp_path: Path) -> None:
    survival = engine_after(engine(DISK_ONLY, a_profile(tmp_path))).learned.survival
    assert survival.chances() == {Tier.SSD: 1.0}


def counts(setup: Setup, programs: Sequence[Program] = ()) -> Counter[str]:
    """LoadPolicy's counts of a run."""
    found: Counter[str] = engine_after(setup, programs).load_policy.counts
    return found


def engine_after(setup: Setup, programs: Sequence[Program] = ()) -> Any:
    """The scheduler's engine at the end of a run."""
    clock = VirtualClock()
    with ExitStack() as until, virtual_time(clock):
        scheduler: Any = build_scheduler(setup, clock, 10_000, until)
        until.callback(scheduler.shutdown)
        Simulation(partial(Agents, programs or rotation()), setup, [scheduler], clock).run()
        return scheduler._engine
