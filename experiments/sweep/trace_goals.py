"""Real agents' traces in the simulator: ours against the other policies, and against memory without end.

A row is a trace, the tiers below the GPU, a load, and whether steps wait for loads and stores. The GPU's KV
cache holds KV_CONTEXTS mean final contexts. Programs are those of one half of a trace: tune on the half
"tune", report "report". "fitted" stands for the half that programs were fitted to, where there is no trace;
chat has no such programs. A row's bound is program order on a GPU that evicts nothing (ENDLESS), which
depends on no tier and no wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import mean

from experiments.sim.trace_programs import FITTED
from experiments.sweep.cases import ENDLESS, Point
from experiments.sweep.goals import ORDER, OURS, PAPER, row_of, with_error
from experiments.sweep.grids import CODING, KV_CONTEXTS, TIERS, Size
from experiments.sweep.rows import Row, Rows

AGENTS = (CODING, "mini-swe", "claude-code", "bfcl")
LOADS = (0.6, 1.0, 1.5)  # seconds of work a second
CONTROL = "chat"
STATIC = "static-ttl"
CONTENDERS = (ORDER, STATIC, PAPER, OURS, ENDLESS)
PROGRAMS = {Size.QUICK: 12, Size.DEFAULT: 40, Size.FULL: 80}
ROW_TIERS = TIERS | {"large DRAM": (8.0, 0.0)}
HEADER = (
    *("trace, tiers, load", "best of order and published / ours", "by seed", "order / ours"),
    *("published / ours", "static TTL / ours", "no eviction / ours", "ours, mean s"),
    *("P99 of first tokens, s: published, ours", "ours / published"),
)
Runs = Mapping[str, Row]  # one seed's, by contender


def points(size: Size, part: str, seeds: Sequence[int], machines: Sequence[str]) -> list[Point]:
    """Each trace with each tier at each load; chat, where there is nothing to gain, at one of each."""
    settings = [
        Point(OURS, PROGRAMS[size], 0.0, 0, f"trace:{name}:{part}", card, load=load, kv_contexts=KV_CONTEXTS)
        for card, name, load in product(machines, AGENTS, LOADS if size is not Size.QUICK else (1.0,))
    ]
    tiered = [replace(p, dram_kv=dram, ssd_kv=ssd) for p in settings for dram, ssd in ROW_TIERS.values()]
    chat = replace(settings[0], workload=f"trace:{CONTROL}:{part}", programs=4 * PROGRAMS[size], load=1.0)
    every = [*tiered, *([] if part == FITTED else [chat])]
    return [replace(p, seed=seed, contender=OURS) for seed, p in product(seeds, every)]


def contended(setting: Point) -> dict[str, Point]:
    """All contenders on the same setting. ENDLESS needs no tier, so it is run once for all tiers."""
    found = {name: replace(setting, contender=name) for name in CONTENDERS}
    found[ENDLESS] = replace(found[ENDLESS], dram_kv=0.0, ssd_kv=0.0)
    return found


def cases(settings: Iterable[Point]) -> list[Point]:
    """The cases to run."""
    return list(dict.fromkeys(point for setting in settings for point in contended(setting).values()))


def name_of(point: Point) -> str:
    """A row's name."""
    tiers = next(name for name, sizes in ROW_TIERS.items() if sizes == (point.dram_kv, point.ssd_kv))
    name = f"{point.machine}, {point.workload.split(':')[1]}, {tiers}, {point.load:g}"
    return name + ", ends not told" * point.untold_ends


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


def ratios(seeds: Sequence[Runs], rival: str) -> list[float]:
    """The rival's mean job time over ours, by seed: above 1 ours is faster."""
    return [float(runs[rival]["job_mean_s"]) / float(runs[OURS]["job_mean_s"]) for runs in seeds]


def leads(seeds: Sequence[Runs]) -> list[float]:
    """The better of program order and published over ours, by seed."""
    return [min(pair) for pair in zip(ratios(seeds, ORDER), ratios(seeds, PAPER), strict=True)]


def of(seeds: Sequence[Runs], contender: str, column: str) -> float:
    """A column's mean over the seeds."""
    return mean(float(runs[contender][column]) for runs in seeds)


def tail_ratio(seeds: Sequence[Runs]) -> float:
    """P99 of first tokens over published's, of the means: a seed where both are short says little."""
    return of(seeds, OURS, "ttft_p99_s") / of(seeds, PAPER, "ttft_p99_s")


def line(name: str, seeds: Sequence[Runs]) -> list[str]:
    """One row's figures over its seeds."""
    best = leads(seeds)
    return [
        name,
        with_error(best),
        " ".join(f"{ratio:.3f}" for ratio in best),
        *(f"{mean(ratios(seeds, rival)):.3f}" for rival in (ORDER, PAPER, STATIC, ENDLESS)),
        f"{of(seeds, OURS, 'job_mean_s'):.1f}",
        ", ".join(f"{of(seeds, who, 'ttft_p99_s'):.1f}" for who in (PAPER, OURS)),
        f"{tail_ratio(seeds):.2f}",
    ]


def verdicts(rows: Rows, settings: Iterable[Point]) -> list[str]:
    """The means and the worst rows, at LOADS[0] and above it."""
    light: dict[str, Sequence[Runs]] = {}
    pressed: dict[str, Sequence[Runs]] = {}
    for name, seeds in by_name(rows, settings).items():
        (light if f", {LOADS[0]:g}" in name else pressed)[name] = seeds
    return [words(what, found) for what, found in (("Pressed", pressed), ("Light", light)) if found]


def words(what: str, found: Mapping[str, Sequence[Runs]]) -> str:
    lead = {name: mean(leads(seeds)) for name, seeds in found.items()}
    tail = {name: tail_ratio(seeds) for name, seeds in found.items()}
    worst, slowest = min(lead, key=lead.__getitem__), max(tail, key=tail.__getitem__)
    return (
        f"{what} rows ({len(lead)}), the better of program order and published over ours: mean "
        f"{mean(lead.values()):.3f}, least {lead[worst]:.3f} in {worst}. P99 of first tokens over "
        f"published's: most {tail[slowest]:.2f} in {slowest}."
    )
