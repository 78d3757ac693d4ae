"""Real agents' traces in the simulator: ours against the other policies, and the possible gain.

A row is a trace, the tiers below the GPU, a load, and whether steps wait for loads and stores: with LMCache
in-process they do, with its server they do not. The GPU's KV cache holds KV_CONTEXTS mean final contexts.
Programs are those of one half of a trace: tune on the half "tune", report "report". "fitted" stands for
the half that programs were fitted to, where there is no trace; chat has no such programs.

Each row has two bounds: `continuum` with each program's true mean context (TRUE_SIZES), and program order on
a GPU that evicts nothing (ENDLESS), which depends on no tier and no wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import mean

from experiments.sim.trace_programs import FITTED
from experiments.sweep.cases import ENDLESS, TRUE_SIZES, Point
from experiments.sweep.goals import AGENTS, LOADS, ORDER, OURS, PAPER, row_of, with_error
from experiments.sweep.grids import KV_CONTEXTS, TIERS, Size
from experiments.sweep.rows import Row, Rows

CONTROL = "chat"
STATIC = "static-ttl"
CONTENDERS = (ORDER, STATIC, PAPER, OURS, TRUE_SIZES, ENDLESS)
PROGRAMS = {Size.QUICK: 12, Size.DEFAULT: 40, Size.FULL: 80}
WAITS = ", steps wait"
UNTOLD = ", ends not told"
ROW_TIERS = TIERS | {"large DRAM": (8.0, 0.0)}
LEAST_GAP = 0.02  # of a rival's time: where a bound is nearer than this, there is nothing to close
HEADER = (
    *("trace, tiers, load", "best of order and published / ours", "by seed"),
    *("order / ours", "published / ours", "static TTL / ours"),
    *("mean s: published, ours, true sizes, no eviction", "gap closed to true sizes, to no eviction"),
    *(
        "ours, first quarter and rest, s",
        "P99 of first tokens, s: published, ours",
        "ratio",
        "end / published's",
    ),
)


def points(size: Size, part: str, seeds: Sequence[int], machines: Sequence[str]) -> list[Point]:
    """Each trace with each tier at each load; chat, where there is nothing to gain, at one of each."""
    settings = [
        Point(OURS, PROGRAMS[size], 0.0, 0, f"trace:{name}:{part}", card, load=load, kv_contexts=KV_CONTEXTS)
        for card, name, load in product(machines, AGENTS, LOADS if size is not Size.QUICK else (1.0,))
    ]
    tiered = [replace(p, dram_kv=dram, ssd_kv=ssd) for p in settings for dram, ssd in ROW_TIERS.values()]
    waiting = [replace(p, blocking=True) for p in tiered if p.offloads]
    chat = replace(settings[0], workload=f"trace:{CONTROL}:{part}", programs=4 * PROGRAMS[size], load=1.0)
    every = [*tiered, *waiting, *([] if part == FITTED else [chat])]
    return [replace(p, seed=seed, contender=OURS) for seed, p in product(seeds, every)]


def contended(setting: Point) -> dict[str, Point]:
    """All contenders on the same setting. ENDLESS needs no tier, so it is run once for all tiers."""
    found = {name: replace(setting, contender=name) for name in CONTENDERS}
    found[ENDLESS] = replace(found[ENDLESS], dram_kv=0.0, ssd_kv=0.0, blocking=False)
    return found


def cases(settings: Iterable[Point]) -> list[Point]:
    """The cases to run."""
    return list(dict.fromkeys(point for setting in settings for point in contended(setting).values()))


def name_of(point: Point) -> str:
    """A row's name."""
    tiers = next(name for name, sizes in ROW_TIERS.items() if sizes == (point.dram_kv, point.ssd_kv))
    name = f"{point.machine}, {point.workload.split(':')[1]}, {tiers}, {point.load:g}"
    return name + (WAITS if point.blocking else "") + (UNTOLD if point.untold_ends else "")


Runs = Mapping[str, Row]  # one seed's, by contender


def by_name(rows: Rows, settings: Iterable[Point]) -> dict[str, list[Runs]]:
    """Each row's seeds, in their order."""
    found: dict[str, list[Runs]] = {}
    for setting in settings:
        runs = {name: row_of(rows, point) for name, point in contended(setting).items()}
        found.setdefault(name_of(setting), []).append(runs)
    return found


def table(rows: Rows, settings: Iterable[Point]) -> list[list[str]]:
    """A header, then a line per card, trace, tier and load."""
    return [list(HEADER), *(line(name, seeds) for name, seeds in by_name(rows, settings).items())]


def of(seeds: Sequence[Runs], contender: str, column: str = "job_mean_s") -> float:
    """A column's mean over the seeds."""
    return mean(float(runs[contender][column]) for runs in seeds)


def ratios(seeds: Sequence[Runs], rival: str, column: str = "job_mean_s") -> list[float]:
    """Rival over ours, by seed: above 1 ours is faster."""
    return [float(runs[rival][column]) / float(runs[OURS][column]) for runs in seeds]


def leads(seeds: Sequence[Runs]) -> list[float]:
    """The better of program order and published over ours, by seed."""
    return [min(pair) for pair in zip(ratios(seeds, ORDER), ratios(seeds, PAPER), strict=True)]


def closed(seeds: Sequence[Runs], bound: str) -> str:
    """Of the gap between the better of both rivals and a bound, the part that ours closes."""
    rival_s = mean(min(float(runs[name]["job_mean_s"]) for name in (ORDER, PAPER)) for runs in seeds)
    gap_s = rival_s - of(seeds, bound)
    return f"{(rival_s - of(seeds, OURS)) / gap_s:.0%}" if gap_s > LEAST_GAP * rival_s else "-"


def tail_ratio(seeds: Sequence[Runs]) -> float:
    """P99 of first tokens over published's, of the means: a seed where both are short says little."""
    return of(seeds, OURS, "ttft_p99_s") / of(seeds, PAPER, "ttft_p99_s")


def line(name: str, seeds: Sequence[Runs]) -> list[str]:
    """One row's figures over its seeds."""
    best, p99 = leads(seeds), "ttft_p99_s"
    return [
        name,
        with_error(best),
        " ".join(f"{ratio:.3f}" for ratio in best),
        *(f"{mean(ratios(seeds, rival)):.3f}" for rival in (ORDER, PAPER, STATIC)),
        ", ".join(f"{of(seeds, who):.1f}" for who in (PAPER, OURS, TRUE_SIZES, ENDLESS)),
        ", ".join(closed(seeds, bound) for bound in (TRUE_SIZES, ENDLESS)),
        ", ".join(f"{of(seeds, OURS, f'job_mean_{part}_s'):.0f}" for part in ("cold", "warm")),
        ", ".join(f"{of(seeds, who, p99):.1f}" for who in (PAPER, OURS)),
        f"{tail_ratio(seeds):.2f}",
        f"{mean(1 / r for r in ratios(seeds, PAPER, 'end_s')):.3f}",
    ]


def verdicts(rows: Rows, settings: Iterable[Point]) -> list[str]:
    """The goals and the results, in sentences."""
    found, sentences = by_name(rows, settings), []
    pressed = {name: seeds for name, seeds in found.items() if f", {LOADS[0]:g}" not in name}
    if pressed:
        lead = {name: mean(leads(seeds)) for name, seeds in pressed.items()}
        tail = {name: tail_ratio(seeds) for name, seeds in pressed.items()}
        most = [bound_lead(seeds) for seeds in pressed.values()]
        worst, slowest = min(lead, key=lead.__getitem__), max(tail, key=tail.__getitem__)
        sentences = [
            f"Pressed rows ({len(lead)}), the better of program order and published over ours: mean "
            f"{mean(lead.values()):.3f} (asked 1.08), least {lead[worst]:.3f} in {worst} (asked 0.98; "
            f"{sum(ratio < 0.98 for ratio in lead.values())} below).",
            f"A GPU that evicts nothing leads that rival by {mean(most):.3f} times, and in "
            f"{sum(ratio < 1.08 for ratio in most)} rows by less than 1.08.",
            f"P99 of first tokens over published's: {sum(ratio > 1.5 for ratio in tail.values())} rows above "
            f"1.5, most {tail[slowest]:.2f} in {slowest}.",
        ]
    light = {name: mean(leads(seeds)) for name, seeds in found.items() if name not in pressed}
    if light:
        worst = min(light, key=light.__getitem__)
        sentences.append(f"Load 0.6 ({len(light)} rows): least {light[worst]:.3f} in {worst} (asked 0.99).")
    return sentences


def bound_lead(seeds: Sequence[Runs]) -> float:
    """The better of program order and published over ENDLESS."""
    return mean(
        best * float(r[OURS]["job_mean_s"]) / float(r[ENDLESS]["job_mean_s"])
        for best, r in zip(leads(seeds), seeds, strict=True)
    )
