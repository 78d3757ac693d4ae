"""The cases of `offload_sweep fleet`, by section and size. A case that two sections need is run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from experiments.sweep.cases import STOCK, FleetPoint, SweepError
from experiments.sweep.goals import OURS, SEEDS, is_wanted
from experiments.sweep.grids import Size

RIVALS = (
    *("round-robin", "least", "lmetric", "hits-load", "hash", "sticky", "ear-affinity", "ear"),
    "program-sched",
)
FLEET, AFFINITY, NO_LINE = "fleet", "fleet-affinity", "fleet-no-line"
ROUTERS = (*RIVALS, AFFINITY, FLEET)
PROGRAMS = {Size.QUICK: 8, Size.DEFAULT: 60, Size.FULL: 200}
REGIMES = (("skew", 0.6), ("skew", 0.9), ("skew", 1.3), ("swe", 1.1), ("fitted:claude-code-swe", 1.1))
HOT, SWE_HOT = REGIMES[2], REGIMES[3]
DIES_AT_S = 200.0
PEER_GBPS = 12.5
Points = list[FleetPoint]


@dataclass(frozen=True, slots=True)
class Section:
    """One question."""

    title: str
    points: Callable[[Size], Points]  # of any seed
    panel: Callable[[FleetPoint], str]
    label: Callable[[FleetPoint], str]
    baseline: str  # the label that ratios are taken to


def at(regime: tuple[str, float], size: Size, *routers: str, engine: str = OURS) -> Points:
    """The routers under one load. EAR has a link, since it moves KV."""
    workload, rho = regime
    if size is Size.QUICK:
        rho = 3.0
    plain = FleetPoint("", engine, rho, 0, workload=workload, programs=PROGRAMS[size])
    links = {"ear": PEER_GBPS, "ear-migration": PEER_GBPS}
    return [replace(plain, router=router, link_gbps=links.get(router, 0.0)) for router in routers]


def regime_of(point: FleetPoint) -> str:
    return f"{point.workload}, rho {point.rho:g}, {point.engine}"


def router_of(point: FleetPoint) -> str:
    return point.router


def by_load(size: Size) -> Points:
    """Every router under every load, over both engines. Under the lightest load only common ones."""
    if size is Size.QUICK:
        few = ("least", "hash", "ear", FLEET)
        return [p for engine in (STOCK, OURS) for p in at(HOT, size, *few, engine=engine)]
    found: Points = []
    for regime, engine in product(REGIMES, (STOCK, OURS)):
        light = regime[1] < 0.9
        found += at(regime, size, *(("hash", "sticky", FLEET) if light else ROUTERS), engine=engine)
    return found


def ablation(size: Size) -> Points:
    """Affinity alone, moves alone, both: EAR's rule and ours, both with a link."""
    routers = ("ear-affinity", "ear-migration", "ear", AFFINITY, FLEET)
    found = [
        p for regime in (HOT, SWE_HOT) for e in (STOCK, OURS) for p in at(regime, size, *routers, engine=e)
    ]
    return [replace(p, link_gbps=PEER_GBPS) for p in found] if size is not Size.QUICK else []


def lines(size: Size) -> Points:
    """One line before all replicas, against a line at each, with the same placement."""
    return [] if size is Size.QUICK else [p for r in (HOT, SWE_HOT) for p in at(r, size, NO_LINE, AFFINITY)]


def known_starts(size: Size) -> Points:
    """Routers that send each turn to any replica; engines know, or do not, that a program has started."""
    known = [] if size is Size.QUICK else at(REGIMES[1], size, "least", "hits-load")
    return [*known, *(replace(point, starts_known=False) for point in known)]


def substrates(size: Size) -> Points:
    """Own DRAM, one pool, a link; and with each a replica that dies."""
    if size is Size.QUICK:
        return []
    kinds = ({}, {"pool": True}, {"link_gbps": 1.25}, {"link_gbps": PEER_GBPS})
    base = [p for kind in kinds for q in at(HOT, size, FLEET) for p in (replace(q, **kind),)]  # type: ignore[arg-type]
    dying = [replace(p, dies_at_s=DIES_AT_S) for p in base[:2]]
    others = [replace(p, dies_at_s=DIES_AT_S) for p in at(HOT, size, "hash", "sticky")]
    return [*base, *dying, *others]


def no_slow(size: Size) -> Points:
    """All replicas alike."""
    found = [p for e in (STOCK, OURS) for p in at(HOT, size, "hash", "sticky", FLEET, engine=e)]
    return [] if size is Size.QUICK else [replace(p, slow=1.0) for p in found]


def eight(size: Size) -> Points:
    """Twice the replicas, the load and the programs."""
    found = [
        p for e in (STOCK, OURS) for p in at(HOT, size, "least", "hash", "sticky", "ear", FLEET, engine=e)
    ]
    return [] if size is Size.QUICK else [replace(p, replicas=8, programs=2 * p.programs) for p in found]


def sensitivity(size: Size) -> Points:
    """One setting at a time, around the skewed load: KV, skew, T_hot, T_cool, age of reports."""
    if size is Size.QUICK:
        return []
    settled = [p for e in (STOCK, OURS) for p in at(HOT, size, "hash", "ear", FLEET, engine=e)]
    found = [replace(p, kv_share=share) for p, share in product(settled, (0.5, 2.0))]
    found += [replace(p, skew=skew) for p, skew in product(settled, (0.0, 0.5))]
    ears = [p for p in settled if p.router == "ear"]
    found += [replace(p, hot_tokens=tokens) for p, tokens in product(ears, (5_000.0, 50_000.0))]
    moving = [p for p in settled if p.router != "hash"]
    found += [replace(p, cool_s=cool_s) for p, cool_s in product(moving, (5.0, 120.0))]
    ours = [p for p in settled if p.router == FLEET]
    return [*settled, *found, *(replace(p, report_s=10.0) for p in ours)]


def varied(point: FleetPoint) -> str:
    """The settings that differ from the default."""
    plain = FleetPoint(point.router, point.engine, point.rho, 0)
    names = ("kv_share", "skew", "hot_tokens", "cool_s", "report_s", "slow", "replicas")
    changed = [
        f"{name} {getattr(point, name):g}" for name in names if getattr(point, name) != getattr(plain, name)
    ]
    return f"{point.engine}, {', '.join(changed) or 'as usual'}"


def substrate_of(point: FleetPoint) -> str:
    link = f"link {point.link_gbps:g} GB/s" if point.link_gbps else "own DRAM"
    return f"{point.router}, {'one pool' if point.pool else link}"


SECTIONS = {
    "load": Section("Routers by load", by_load, regime_of, router_of, "hash"),
    "ablation": Section(
        f"Affinity, moves, both; link of {PEER_GBPS:g} GB/s", ablation, regime_of, router_of, "ear-affinity"
    ),
    "line": Section("One line or a line at each", lines, regime_of, router_of, NO_LINE),
    "started": Section(
        "Engines that know which programs have started",
        known_starts,
        regime_of,
        lambda p: f"{p.router}, {'known' if p.starts_known else 'not known'}",
        "",
    ),
    "substrate": Section(
        f"Where KV is kept, and a replica that dies at {DIES_AT_S:g} s",
        substrates,
        lambda p: "a replica dies" if p.dies_at_s else "no replica dies",
        substrate_of,
        f"{FLEET}, own DRAM",
    ),
    "alike": Section("No slow replica", no_slow, regime_of, router_of, "hash"),
    "eight": Section("Eight replicas", eight, regime_of, router_of, "hash"),
    "sensitivity": Section("One setting at a time", sensitivity, varied, router_of, "hash"),
}


def seeds_of(size: Size) -> Sequence[int]:
    """Seeds that nothing was tuned on; a claim on a router needs at least three."""
    return SEEDS[size] if size is not Size.DEFAULT else (3, 4, 5)


def chosen(parts: str) -> dict[str, Section]:
    """The sections whose names have one of the parts between semicolons; all for none. Raises SweepError."""
    found = {name: section for name, section in SECTIONS.items() if is_wanted(name, parts)}
    if not found:
        raise SweepError(f"no section has {parts!r} in its name; there are: {', '.join(SECTIONS)}")
    return found


def cases(section: Section, size: Size, seeds: Sequence[int]) -> Points:
    """The cases to run: all of a seed before the next one."""
    return [replace(point, seed=seed) for seed in seeds for point in section.points(size)]
