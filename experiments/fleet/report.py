"""Makes tables of a fleet's rows: sections, goals, conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from experiments.fleet.plans import (
    AFFINITY,
    DIES_AT_S,
    FLEET,
    HOT,
    NO_LINE,
    PEER_GBPS,
    REGIMES,
    SWE_HOT,
    Section,
    at,
    cases,
)
from experiments.sweep.cases import STOCK, FleetPoint
from experiments.sweep.goals import OURS
from experiments.sweep.grids import Size
from experiments.sweep.readout import BySeed, Found, found, ratios
from experiments.sweep.rows import Row, Rows
from experiments.tables import shown, spread

HEADER = (
    *("", "router", "n", "mean job, s", "{} / this", "P99 of later TTFT, s", "worst first TTFT, s"),
    *("TTFT P90 of replicas: median, max, s", "turn, s", "amplification", "closed loop", "GPU hits"),
    *("moved", "right", "thrash"),
)


def table(rows: Rows, section: Section, size: Size, seeds: Sequence[int]) -> list[list[str]]:
    """A header, then a line per panel and label: n seeds, the median and range of job times, else means."""
    pairs = found(rows, cases(section, size, seeds))
    lines = [[cell.format(section.baseline or "-") for cell in HEADER]]
    for panel, labels in grouped(section, pairs).items():
        base = of(labels.get(section.baseline, []), "job_mean_s")
        lines += [line(panel, label, those, base) for label, those in labels.items()]
    return lines


def grouped(section: Section, pairs: Found) -> dict[str, dict[str, list[Row]]]:
    """Rows by panel and label."""
    laid: dict[str, dict[str, list[Row]]] = {}
    for case, row in pairs:
        assert isinstance(case, FleetPoint)
        laid.setdefault(section.panel(case), {}).setdefault(section.label(case), []).append(row)
    return laid


def line(panel: str, label: str, rows: Sequence[Row], base: BySeed) -> list[str]:
    """One router's figures."""

    def average(column: str) -> float:
        return mean(float(row[column]) for row in rows)

    jobs = of(rows, "job_mean_s")
    return [
        panel,
        label,
        f"{len(jobs)}",
        spread(list(jobs.values())),
        spread(ratios(base, jobs)),
        shown(average("later_ttft_p99_s")),
        shown(average("first_ttft_max_s")),
        f"{shown(average('ttft_p90_median_s'))}, {shown(average('ttft_p90_max_s'))}",
        shown(average("e2e_mean_s")),
        f"{average('amplification'):.2f}",
        f"{100 * average('closed_share'):.0f} %",
        f"{100 * average('gpu_share'):.1f} %",
        f"{100 * average('moves_share'):.1f} %",
        f"{100 * average('moves_accurate_share'):.0f} %" if average("moves") else "",
        f"{sum(int(row['thrash']) for row in rows)}",
    ]


def of(rows: Iterable[Row], column: str) -> BySeed:
    """A figure by seed."""
    return {int(row["seed"]): float(row[column]) for row in rows}


def conditions(pairs: Found) -> str:
    """The conditions of the run, for a caption."""
    points = [case for case, _ in pairs if isinstance(case, FleetPoint)]
    measured = {row["measured"] for _, row in pairs} == {"True"}

    def values(name: str) -> str:
        kinds = sorted({getattr(point, name) for point in points})
        return ", ".join(value if isinstance(value, str) else f"{value:g}" for value in kinds)

    turns = sum(int(row["turns"]) for _, row in pairs)
    return (
        f"simulated, {len(pairs)} runs, {turns:,} turns: {values('replicas')} replicas, {values('machine')}, "
        f"{'measured' if measured else 'NOT measured: data sheet and assumed shares'}, the last one at "
        f"{values('slow')} of the speed, DRAM {values('dram_gb')} GB each; "
        f"{values('programs')} programs in bursts, seeds {values('seed')}; "
        "each request names its program, last turn and tool correctly; decode steps merged"
    )


@dataclass(frozen=True, slots=True)
class FleetGoal:
    """A goal that the simulator can check."""

    name: str
    asked: str
    points: tuple[FleetPoint, ...]  # of any seed; the last is what is judged, unless `judge` says otherwise
    judge: Callable[
        [Sequence[list[Row]]], tuple[str, bool]
    ]  # of each point's rows by seed, in the same order


def ratio(
    least_mean: float, least_seed: float, column: str = "job_mean_s"
) -> Callable[..., tuple[str, bool]]:
    """The first over the last, by seed: its mean and its worst."""

    def judge(rows: Sequence[list[Row]]) -> tuple[str, bool]:
        by_seed = ratios(of(rows[0], column), of(rows[-1], column))
        each = " ".join(f"{value:.2f}" for value in by_seed)
        good = mean(by_seed) >= least_mean and min(by_seed) >= least_seed
        return f"{mean(by_seed):.2f} ({each})", good

    return judge


def at_most(most: float, column: str) -> Callable[..., tuple[str, bool]]:
    """The last over the first, of the means over seeds."""

    def judge(rows: Sequence[list[Row]]) -> tuple[str, bool]:
        before, after = (mean(of(those, column).values()) for those in (rows[0], rows[-1]))
        return f"{after / before:.2f} ({shown(after)} for {shown(before)} s)", after <= most * before

    return judge


def balanced(rows: Sequence[list[Row]]) -> tuple[str, bool]:
    """For ours: the worst replica is near the median, and the median near hash's."""
    middle, worst, rival = (
        mean(of(those, column).values())
        for those, column in (
            (rows[-1], "ttft_p90_median_s"),
            (rows[-1], "ttft_p90_max_s"),
            (rows[0], "ttft_p90_median_s"),
        )
    )
    rival_worst = mean(of(rows[0], "ttft_p90_max_s").values())
    text = f"({middle:.1f}, {worst:.1f}) s; hash ({rival:.1f}, {rival_worst:.1f})"
    return text, worst <= 2 * middle and middle <= 1.4 * rival


def moves(rows: Sequence[list[Row]]) -> tuple[str, bool]:
    """Few moves, accurate ones, and no thrash."""
    share = mean(of(rows[-1], "moves_share").values())
    right = mean(of(rows[-1], "moves_accurate_share").values())
    thrash = sum(of(rows[-1], "thrash").values())
    text = f"{100 * share:.1f} % of turns, {100 * right:.0f} % right, thrash {thrash:.0f}"
    return text, share <= 0.05 and right >= 0.9 and not thrash


def survived(most: float) -> Callable[..., tuple[str, bool]]:
    """Mean job time with a dead replica over that without, and how soon lost turns ran elsewhere."""

    def judge(rows: Sequence[list[Row]]) -> tuple[str, bool]:
        longer = [1 / value for value in ratios(of(rows[0], "job_mean_s"), of(rows[-1], "job_mean_s"))]
        last_s = max(of(rows[-1], "rehomed_s").values())
        lost = sum(of(rows[-1], "lost_turns").values())
        text = (
            f"{100 * (mean(longer) - 1):+.0f} %; {lost:.0f} turns sent again, elsewhere within {last_s:.1f} s"
        )
        return text, mean(longer) <= most and last_s <= 10.0

    return judge


def fleet_goals(size: Size) -> list[FleetGoal]:
    """Goals A1 to A9 of records/fleet-figures.md, which virtual time can judge."""

    def pair(regime: tuple[str, float], *routers: str, engine: str = OURS) -> tuple[FleetPoint, ...]:
        return tuple(at(regime, size, *routers, engine=engine))

    warm = REGIMES[1]
    [own] = at(HOT, size, FLEET)
    pool = replace(own, pool=True)
    linked = {
        e: [replace(p, link_gbps=PEER_GBPS) for p in at(HOT, size, AFFINITY, FLEET, engine=e)]
        for e in (STOCK, OURS)
    }
    known = tuple(at(warm, size, "hits-load"))
    unknown = tuple(replace(p, starts_known=False) for p in known)
    found = [
        FleetGoal(
            "A1 affinity / vLLM's per-turn least", ">= 1.7 (1.4)", pair(warm, "least", FLEET), ratio(1.7, 1.4)
        ),
        FleetGoal(
            "A2 hash / ours, skew, continuum", ">= 1.25 (1.10)", pair(HOT, "hash", FLEET), ratio(1.25, 1.1)
        ),
        FleetGoal(
            "A2 hash / ours, skew, stock",
            ">= 1.8 (1.3)",
            pair(HOT, "hash", FLEET, engine=STOCK),
            ratio(1.8, 1.3),
        ),
        FleetGoal(
            "A3 hash / ours, swe, continuum", ">= 1.08 (1.0)", pair(SWE_HOT, "hash", FLEET), ratio(1.08, 1.0)
        ),
        FleetGoal(
            "A3 hash / ours, swe, stock",
            ">= 2.2 (1.4)",
            pair(SWE_HOT, "hash", FLEET, engine=STOCK),
            ratio(2.2, 1.4),
        ),
    ]
    for name, regime in (("skew", HOT), ("swe", SWE_HOT)):
        both = pair(regime, NO_LINE, AFFINITY)
        found += [
            FleetGoal(f"A4 one line, {name}: job time", ">= 1.04", both, ratio(1.04, 0.0)),
            FleetGoal(
                f"A4 one line, {name}: P99 of later TTFT", "<= 0.8", both, at_most(0.8, "later_ttft_p99_s")
            ),
            FleetGoal(
                f"A4 one line, {name}: worst first TTFT", "<= 0.8", both, at_most(0.8, "first_ttft_max_s")
            ),
        ]
    for regime in REGIMES if size is not Size.QUICK else ():
        found += [
            FleetGoal(
                f"A5 least-loaded affinity / ours, {regime[0]} {regime[1]:g}, {engine}",
                ">= 0.97 each",
                pair(regime, "sticky", FLEET, engine=engine),
                ratio(0.97, 0.97),
            )
            for engine in (STOCK, OURS)
        ]
    for engine, gain in ((STOCK, 1.05), (OURS, 0.98)):
        both = tuple(linked[engine])
        found += [
            FleetGoal(f"A6 without / with moves, {engine}", f">= {gain}", both, ratio(gain, 0.0)),
            FleetGoal(f"A6 moves, {engine}", "<= 5 %, >= 90 % right, thrash 0", both, moves),
        ]
    found += [
        FleetGoal(
            "A7 engines do not know / know started programs, hits-load",
            ">= 1.08",
            (*unknown, *known),
            ratio(1.08, 0.0),
        ),
        FleetGoal("A7 P99 of later TTFT", "<= 0.5", (*unknown, *known), at_most(0.5, "later_ttft_p99_s")),
        FleetGoal(
            "A8 TTFT P90 of replicas (median, max), continuum",
            "max <= 2 x, median <= 1.4 x hash's",
            pair(HOT, "hash", FLEET),
            balanced,
        ),
        FleetGoal("A8 the same, stock", "the same", pair(HOT, "hash", FLEET, engine=STOCK), balanced),
        FleetGoal(
            "A9 a replica dies, own DRAM",
            "<= +45 %, 10 s",
            (own, replace(own, dies_at_s=DIES_AT_S)),
            survived(1.45),
        ),
        FleetGoal(
            "A9 a replica dies, pool",
            "<= +25 %, 10 s",
            (pool, replace(pool, dies_at_s=DIES_AT_S)),
            survived(1.25),
        ),
    ]
    return found


def judged(rows: Rows, size: Size, seeds: Sequence[int]) -> list[list[str]]:
    """A header, then a line per goal, with what its rows show."""
    lines = [["", "asked for", "found: mean (each seed)", "n", "verdict"]]
    for goal in fleet_goals(size):
        every = [rows.of([replace(point, seed=seed) for seed in seeds]) for point in goal.points]
        n_seeds = min(len(those) for those in every)
        if n_seeds:
            text, is_met = goal.judge(every)
            lines.append([goal.name, goal.asked, text, str(n_seeds), "reached" if is_met else "MISSED"])
        else:
            lines.append([goal.name, goal.asked, "", "0", "not run"])
    return lines
