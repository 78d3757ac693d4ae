"""The policy's goals, the cases that each needs, and whether it is reached; real agents' traces among them.

Simulated: an assumed A100 and Llama-3.1-8B unless a row says otherwise; nothing is measured. The
policy was tuned on seeds 1 and 2; the seeds here are others. Programs of a trace are those of one half: tune
on the half "tune", report "report". "fitted" stands for the half that programs were fitted to, where there is
no trace; chat has no such programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from statistics import mean, stdev

from experiments.sim.trace_programs import FITTED, refuse_unknown
from experiments.sweep.cases import STOCK, Point, SweepError
from experiments.sweep.grids import CODING, DRAM_GB, KV_CONTEXTS, SLOW_DRAM_GB, TIERS, Size
from experiments.sweep.rows import Rows
from experiments.tables import spread

OURS, PAPER, ORDER = "continuum", "continuum-published", "program-fcfs"
SEEDS = {Size.QUICK: (3,), Size.DEFAULT: (3, 4), Size.FULL: (3, 4, 5, 6, 7)}
PROGRAMS = {Size.QUICK: 12, Size.DEFAULT: 60, Size.FULL: 80}
TRACED = {Size.QUICK: 12, Size.DEFAULT: 40, Size.FULL: 80}  # programs of a trace
AGENTS, CONTROL = (CODING, "mini-swe", "claude-code", "bfcl"), "chat"
LOADS = (0.6, 1.0, 1.5)  # seconds of work a second
TRACED_TIERS = TIERS | {"large DRAM": (8.0, 0.0)}
MOST_P99 = 1.05  # times program-fcfs's P99 of job times, on the mean of the seeds


@dataclass(frozen=True, slots=True)
class Goal:
    """Ours against the best of some rivals, seed by seed."""

    regime: str
    ours: Point
    rivals: tuple[Point, ...]
    least: float  # times as fast, in mean job time
    aim: float
    worst_seed: bool = False  # must hold for each seed, not for their mean
    tail: bool = True  # P99 must be near program-fcfs's

    @property
    def order(self) -> Point:
        """Program order on the same machine: the reference of the tail."""
        return replace(self.ours, contender=ORDER, max_ttl_s=None)

    @property
    def points(self) -> tuple[Point, ...]:
        return (self.ours, *self.rivals, self.order)

    def at(self, seed: int) -> Goal:
        """The same with this seed everywhere."""
        return replace(
            self,
            ours=replace(self.ours, seed=seed),
            rivals=tuple(replace(point, seed=seed) for point in self.rivals),
        )


def against(
    regime: str, setting: Point, rivals: Sequence[str], least: float, aim: float, worst_seed: bool = False
) -> Goal:
    """All contenders on the same setting."""
    ours = replace(setting, contender=OURS)
    return Goal(regime, ours, tuple(replace(setting, contender=r) for r in rivals), least, aim, worst_seed)


def swe(programs: int, jps: float, dram_gb: float = DRAM_GB, ssd_gb: float = 0.0) -> Point:
    return Point(OURS, programs, jps, 0, dram_gb=dram_gb, ssd_gb=ssd_gb)


def papers(programs: int) -> list[Goal]:
    """The paper's regimes, beyond saturation."""
    both, slow = (ORDER, PAPER), {"tool_factor": 10.0}
    b200 = replace(swe(programs, 0.35, 200.0), machine="b200")
    return [
        against("fig9, DRAM 100 GB, 0.05", swe(programs, 0.05), both, 1.07, 1.12),
        against("fig9, DRAM 100 GB, 0.1", swe(programs, 0.1), both, 1.08, 1.12),
        against("fig8, no offloading, 0.05", swe(programs, 0.05, 0.0), (PAPER,), 1.25, 1.40),
        against("fig14, + SSD 200 GB", swe(programs, 0.06, SLOW_DRAM_GB, 200.0), (PAPER,), 1.06, 1.10),
        against("fig14, DRAM 20 GB alone", swe(programs, 0.06, SLOW_DRAM_GB), (PAPER,), 1.12, 1.18),
        against("tools x 10, DRAM 100 GB", replace(swe(programs, 0.05), **slow), both, 1.15, 1.22),
        against("tools x 10, no offloading", replace(swe(programs, 0.05, 0.0), **slow), both, 1.35, 1.45),
        against("B200, DRAM 200 GB, 0.35", b200, both, 1.00, 1.08),
        against("B200, no offloading, 0.35", replace(b200, dram_gb=0.0), both, 1.00, 1.08),
        against("BFCL, DRAM 100 GB, 0.12", replace(swe(programs, 0.12), workload="bfcl"), both, 1.00, 1.08),
        against("BFCL, no offloading", replace(swe(programs, 0.12, 0.0), workload="bfcl"), both, 1.00, 1.08),
    ]


def harmless(programs: int) -> list[Goal]:
    """No loss where nothing can be gained, nor where learned values become wrong."""
    tiny = replace(swe(3 * programs, 3.0), workload="tiny")
    chat = replace(swe(5 * programs, 6.0), workload="chat")
    midway = replace(swe(programs, 0.05), tool_factor=10.0, tool_from_s=programs / 0.05 / 2)
    hints = replace(swe(programs, 0.05), wrong_hints=True)
    return [
        against("below saturation, 0.02", swe(programs, 0.02), (STOCK,), 0.99, 1.00),
        against("every TTL 0", replace(swe(programs, 0.03), max_ttl_s=0.0), (STOCK,), 0.99, 1.00),
        against("tiny contexts", tiny, (STOCK,), 0.99, 1.00),
        against("one-turn chat", chat, (STOCK,), 0.99, 1.00),
        against("tools turn x 10 midway", midway, (ORDER,), 0.98, 1.05),
        against("wrong client hints", hints, (ORDER,), 0.98, 1.05),
    ]


def survey(jps: float) -> Goal:
    """The published sweep on an H200: at any rate never slower than the best of three."""
    bare = Point(OURS, 1, jps, 0, "seeds-sweep", "h200", step_tokens=8192, max_seqs=1024, merge_steps=1)
    tiered = replace(bare, dram_gb=400.0)
    rivals = (
        replace(bare, contender=STOCK),
        replace(bare, contender=PAPER),
        replace(tiered, contender=STOCK),
    )
    return Goal(f"h1, {jps:g}/s", tiered, rivals, 0.99, 1.00, worst_seed=True)


def goals(size: Size, parts: str = "") -> list[Goal]:
    """Smallest for `quick`, all rates for `full`; of these `some`. Raises SweepError."""
    programs = PROGRAMS[size]
    rates = (1.0, 3.0, 6.0, 10.0, 15.0) if size is Size.FULL else (1.0, 3.0)
    return some([*papers(programs), *harmless(programs), *map(survey, rates)], parts)


def traces(size: Size, half: str, machines: Sequence[str], untold_ends: bool, parts: str = "") -> list[Goal]:
    """Each trace with each tier at each load, and chat, where nothing is to gain, at one; of these `some`.

    Raises SweepError, and TraceError for an unknown half or where no traces are.
    """
    refuse_unknown(CODING, half)
    loads = LOADS if size is not Size.QUICK else (1.0,)
    every = [*product(machines, AGENTS, TRACED_TIERS, loads)]
    every += [] if half == FITTED else [(machines[0], CONTROL, "none", 1.0)]
    found = []
    for card, name, tier, load in every:
        count = TRACED[size] * (4 if name == CONTROL else 1)
        setting = Point(OURS, count, 0.0, 0, f"trace:{name}:{half}", card, load=load, kv_contexts=KV_CONTEXTS)
        dram_kv, ssd_kv = TRACED_TIERS[tier]
        setting = replace(setting, dram_kv=dram_kv, ssd_kv=ssd_kv, untold_ends=untold_ends)
        regime = f"{card}, {name}, {tier}, {load:g}" + ", ends not told" * untold_ends
        found.append(against(regime, setting, (ORDER, PAPER), 1.0, 1.05))
    return some(found, parts)


def some(every: Sequence[Goal], parts: str) -> list[Goal]:
    """Those with one of `parts`, between semicolons, in their names. Raises SweepError where none has."""
    chosen = [goal for goal in every if is_wanted(goal.regime, parts)]
    if not chosen:
        known = "; ".join(goal.regime for goal in every)
        raise SweepError(f"no goal has {parts!r} in its name; at this size there are: {known}")
    return chosen


def is_wanted(regime: str, parts: str) -> bool:
    """Whether its name has one of the parts between semicolons; where there is none, all are wanted."""
    wanted = [part.strip() for part in parts.split(";") if part.strip()]
    return not wanted or any(part in regime for part in wanted)


def cases(chosen: Sequence[Goal], seeds: Iterable[int]) -> list[Point]:
    """The cases to run."""
    return [point for seed in seeds for goal in chosen for point in goal.at(seed).points]


def table(rows: Rows, chosen: Sequence[Goal], seeds: Sequence[int]) -> list[list[str]]:
    """A header, then a line per goal. The mean of several seeds has its standard error."""
    header = ["", "against the best of", "least / aim", "by seed", "mean", "verdict", "P99 / order's"]
    return [[*header, "TTFT P99, max (order's)"], *(line(rows, goal, seeds) for goal in chosen)]


def line(rows: Rows, goal: Goal, seeds: Sequence[int]) -> list[str]:
    """One goal's figures."""
    ratios, tails, firsts = [], [], []
    for seed in seeds:
        by_point = {point: rows.of([point])[0] for point in goal.at(seed).points}
        ours, order = by_point[goal.at(seed).ours], by_point[goal.at(seed).order]
        best_s = min(float(by_point[p]["job_mean_s"]) for p in goal.at(seed).rivals)
        ratios.append(best_s / float(ours["job_mean_s"]))
        tails.append(float(ours["job_p99_s"]) / float(order["job_p99_s"]))
        firsts.append([float(row[f]) for f in ("ttft_p99_s", "ttft_max_s") for row in (ours, order)])
    p99, p99_order, most, most_order = (mean(column) for column in zip(*firsts, strict=True))
    return [
        goal.regime,
        ", ".join(dict.fromkeys(point.label for point in goal.rivals)),
        f"{goal.least:.2f} / {goal.aim:.2f}",
        " ".join(f"{ratio:.3f}" for ratio in ratios),
        with_error(ratios),
        verdict(goal, ratios, tails),
        spread(tails),
        f"{p99:.1f}, {most:.1f} ({p99_order:.1f}, {most_order:.1f})",
    ]


def with_error(ratios: Sequence[float]) -> str:
    """Their mean and its standard error: means that differ by less count as equal."""
    if len(ratios) == 1:
        return f"{ratios[0]:.3f}"
    return f"{mean(ratios):.3f} +- {stdev(ratios) / sqrt(len(ratios)):.3f}"


def verdict(goal: Goal, ratios: Sequence[float], tails: Sequence[float]) -> str:
    """The verdict in one or two words."""
    reached = min(ratios) if goal.worst_seed else mean(ratios)
    words = "aim" if reached >= goal.aim else "least" if reached >= goal.least else "MISSED"
    return words if mean(tails) <= MOST_P99 else f"{words}, TAIL"
