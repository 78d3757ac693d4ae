"""The routers by name, each made for one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from continuum_lmcache.fleet.fleet import Fleet, FleetConfig
from experiments.fleet.ours import Ours
from experiments.fleet.program_scheduling import ProgramScheduling
from experiments.fleet.routers import (
    Each,
    Ear,
    LeastOutstanding,
    RoundRobin,
    Router,
    Sticky,
    by_hash,
    fewest_pending,
    fewest_requests,
    hits_and_load,
    lmetric,
)
from experiments.sim.step_time import MACHINES
from experiments.sweep.cases import FleetPoint

Make = Callable[[FleetPoint], Router]


def ours(mover: str, **settings: float) -> Make:
    """The product's, with a mover of fleet/moves.py and settings of FleetConfig."""

    def make(point: FleetPoint) -> Router:
        config = FleetConfig(mover=mover, cooldown_s=point.cool_s)
        return Ours(Fleet(replace(config, **settings), b"lab"), point.report_s)

    return make


def program_scheduling(point: FleetPoint) -> Router:
    return ProgramScheduling(MACHINES[point.machine].costs.prefill_s)


ROUTERS: dict[str, Make] = {
    "round-robin": lambda _: RoundRobin(),
    "least": lambda _: LeastOutstanding(),
    "lmetric": lambda _: Each(lmetric),
    "hits-load": lambda _: Each(hits_and_load),
    "hash": lambda _: Each(by_hash),
    "sticky": lambda _: Sticky(fewest_requests),
    "ear-affinity": lambda _: Sticky(fewest_pending),
    "ear": lambda p: Ear(fewest_pending, hot_tokens=p.hot_tokens, cool_s=p.cool_s),
    "ear-migration": lambda _: Each(fewest_pending),
    "program-sched": program_scheduling,
    "fleet": ours("cost"),
    "fleet-affinity": ours("never"),
    "fleet-no-line": ours("never", max_wait_s=0.0),
}
