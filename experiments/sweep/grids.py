"""The cases of each figure, by size. A case that two figures need is run once.

The default is for ten minutes on two cores: 30 programs, five seeds, decode steps merged. `full` is
for claims: 80 programs, every contender everywhere, every step its own. The figures' numbers are
those of arXiv 2511.02230's full version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import product
from typing import TypeVar

from continuum_lmcache.policy.named import policy_named
from experiments.peers.install import missing
from experiments.sim.trace_programs import FITTED
from experiments.sweep.cases import AGENTINFER, ENDLESS, ROUTERS, STOCK, Case, Live, Point, SweepError


class Size(Enum):
    """How much is run: a check that all works, the default, or enough for a claim."""

    QUICK = "quick"
    DEFAULT = "default"
    FULL = "full"


CONTENDERS = (
    *(STOCK, "program-fcfs", "plas", "infercept", "mean-threshold", "static-ttl", "three-way"),
    *("continuum-published", "continuum"),
    ENDLESS,
)
PEER_CONTENDERS = (STOCK, AGENTINFER, *ROUTERS, "continuum-published", "continuum")
FEW = (STOCK, "program-fcfs", "infercept", "continuum-published", "continuum")
ABLATION = (STOCK, "program-fcfs", "static-ttl", "continuum-published", "no-pins", "continuum")
DRAM_GB = 100.0  # the paper's, for an A100
SLOW_DRAM_GB = 20.0  # in front of a disk
TIERS = {"none": (0.0, 0.0), "DRAM": (1.5, 0.0), "DRAM, disk": (0.5, 4.0)}  # in sizes of the GPU's KV cache
KV_CONTEXTS = 6.0  # mean final contexts in that, as 480k tokens are to Table 1's mean program
BY_MEMORY = ("a10", "rtx-5090", "l40s", "a100")  # 24, 32, 48, 80 GB
CARD_DRAM_GB = 64.0
CODING = "claude-code-swe"  # a shape of sim/fitted_programs.py
Cases = Callable[[Size, Sequence[int]], list[Case]]
Some = TypeVar("Some", bound=Case)


def named(text: str, known: Iterable[str], option: str) -> Sequence[str]:
    """The names in an option, between commas, or all. Raises SweepError with the known ones."""
    names = tuple(filter(None, text.split(",")))
    if unknown := set(names) - set(known):
        raise SweepError(f"{option} {', '.join(sorted(unknown))} is not known; known: {', '.join(known)}")
    return names or tuple(known)


def own(names: Iterable[str]) -> list[str]:
    """Of these the policies of one's own, module:name. Raises ConfigError for one that is none."""
    return [name for name in names if ":" in name and policy_named(name)]


def installed(cases: Iterable[Some]) -> list[Some]:
    """The cases that can run here. A contender that is not installed is left out, with the reason. Raises
    SweepError if all are."""
    cases = list(cases)
    reasons = {case.contender: missing(case.contender, not isinstance(case, Live)) for case in cases}
    for contender, reason in reasons.items():
        if reason:
            print(f"offload_sweep: {contender} is left out: {reason}", file=sys.stderr)
    if cases and all(reasons.values()):
        raise SweepError(f"no contender is installed: {'; '.join(map(str, reasons.values()))}")
    return [case for case in cases if not reasons[case.contender]]


def points(size: Size, seeds: Sequence[int], contenders: Sequence[str], *settings: Point) -> list[Case]:
    """Each of `settings` for each contender and seed, at the size's number of programs."""
    programs = {Size.QUICK: 12, Size.DEFAULT: 30, Size.FULL: 80}[size]
    merge_steps = 1 if size is Size.FULL else 8
    return [
        replace(setting, contender=name, seed=seed, programs=programs, merge_steps=merge_steps)
        for seed, setting, name in product(seeds, settings, contenders)
    ]


def setting(jps: float, dram_gb: float = 0.0, ssd_gb: float = 0.0) -> Point:
    """A setting that points() completes."""
    return Point(STOCK, 1, jps, 0, dram_gb=dram_gb, ssd_gb=ssd_gb)


def rates_of(size: Size) -> Sequence[float]:
    """Programs a second: on an A100 below its capacity of about 0.04, and above."""
    return {Size.QUICK: (0.1,), Size.DEFAULT: (0.03, 0.08)}.get(size, (0.02, 0.03, 0.04, 0.05, 0.06))


def by_rate(dram_gb: float) -> Cases:
    """Along the arrival rate. With tiers, stock vLLM without them is added."""

    def cases(size: Size, seeds: Sequence[int]) -> list[Case]:
        names = FEW if size is Size.QUICK else CONTENDERS
        bare = [setting(jps) for jps in rates_of(size)] if dram_gb else []
        tiered = [setting(jps, dram_gb) for jps in rates_of(size)]
        return [*points(size, seeds, [STOCK], *bare), *points(size, seeds, names, *tiered)]

    return cases


def with_peers(size: Size, seeds: Sequence[int]) -> list[Case]:
    """Loads below and above a machine's capacity, without tiers and with DRAM."""
    rates = (0.1,) if size is Size.QUICK else (0.03, 0.05, 0.08)
    sized = [setting(jps, dram_gb) for jps in rates for dram_gb in (0.0, DRAM_GB)]
    return points(size, seeds, PEER_CONTENDERS, *sized)


def ablation(size: Size, seeds: Sequence[int]) -> list[Case]:
    """The ablation without tiers and with DRAM, at the highest rate."""
    return points(size, seeds, ABLATION, *(setting(rates_of(size)[-1], gb) for gb in (0.0, DRAM_GB)))


def by_tiers(size: Size, seeds: Sequence[int]) -> list[Case]:
    """Programs like Claude Code's, as much work as the machine can do, with each tier below the GPU."""
    agents = Point(STOCK, 1, 0.0, 0, f"trace:{CODING}:{FITTED}", load=1.0, kv_contexts=KV_CONTEXTS)
    tiered = [replace(agents, dram_kv=dram, ssd_kv=ssd) for dram, ssd in TIERS.values()]
    return points(size, seeds, ABLATION, *tiered)


def by_card(size: Size, seeds: Sequence[int]) -> list[Case]:
    """A published sweep's jobs on cards of 24 to 80 GB, with and without DRAM."""
    rates = (1.0,) if size is Size.QUICK else (0.3, 1.0)
    sized = [
        Point(STOCK, 1, jps, 0, "seeds-sweep", card, gb)
        for jps, card, gb in product(rates, BY_MEMORY, (0.0, CARD_DRAM_GB))
    ]
    return points(size, seeds, (STOCK, "continuum-published", "no-pins", "continuum"), *sized)


def by_ssd(size: Size, seeds: Sequence[int]) -> list[Case]:
    """A small DRAM, and disks of several sizes below it."""
    sizes_gb = (0.0, 50.0, 100.0, 200.0, 400.0, 800.0) if size is Size.FULL else (0.0, 200.0)
    sized = [setting(rates_of(size)[-1], SLOW_DRAM_GB, ssd_gb) for ssd_gb in sizes_gb]
    return points(size, seeds, FEW if size is Size.QUICK else CONTENDERS, *sized)
