"""Real agents' traces in the lab: ours against what else there is, and what there was to gain.

A row is a trace, what stands behind the GPU, and a load; its KV cache holds KV_CONTEXTS mean final contexts.
The programs are those of one half of a trace: tune on the half "tune", report "report". "fitted" stands for
the half that programs were fitted to, where there is no trace; chat has no such programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from statistics import mean

from experiments.sim.trace_programs import FITTED
from experiments.sweep.cases import ENDLESS, STOCK, Point
from experiments.sweep.goals import ORDER, OURS, PAPER, row_of, with_error
from experiments.sweep.grids import Size
from experiments.sweep.rows import Row, Rows

KV_CONTEXTS = 6.0  # as 480k tokens are to Table 1's mean program
TIERS = {"none": (0.0, 0.0), "DRAM": (1.5, 0.0), "DRAM, disk": (0.5, 4.0)}  # in sizes of the GPU's KV cache
LOADS = (0.6, 1.0, 1.5)
AGENTS = ("claude-code-swe", "claude-code", "mini-swe", "bfcl")
CONTROL = "chat"
CONTENDERS = (STOCK, ORDER, "static-ttl", PAPER, OURS, ENDLESS)
PROGRAMS = {Size.QUICK: 12, Size.DEFAULT: 40, Size.FULL: 80}
HEADER = (
    *("trace, tiers, load", "best rival / ours", "", "order / ours", "published / ours"),
    *("ours, cold and warm s", "bound, s", "P99 of TTFT / published's", "end / published's"),
)


def points(size: Size, part: str, seeds: Sequence[int], machines: Sequence[str]) -> list[Point]:
    """Each trace with each tier at each load; chat, where there is nothing to gain, at one of each."""
    settings = [
        Point(OURS, PROGRAMS[size], 0.0, 0, f"trace:{name}:{part}", card, load=load, kv_contexts=KV_CONTEXTS)
        for card, name, load in product(machines, AGENTS, LOADS if size is not Size.QUICK else (1.0,))
    ]
    tiered = [replace(p, dram_kv=dram, ssd_kv=ssd) for p in settings for dram, ssd in TIERS.values()]
    chat = replace(settings[0], workload=f"trace:{CONTROL}:{part}", programs=4 * PROGRAMS[size], load=1.0)
    every = tiered if part == FITTED else [*tiered, chat]
    return [replace(p, seed=seed, contender=name) for seed, p, name in product(seeds, every, CONTENDERS)]


def name_of(point: Point) -> str:
    """A row's name."""
    tiers = next(name for name, sizes in TIERS.items() if sizes == (point.dram_kv, point.ssd_kv))
    return f"{point.machine}, {point.workload.split(':')[1]}, {tiers}, {point.load:g}"


def table(rows: Rows, cases: Iterable[Point]) -> list[list[str]]:
    """A header, then a line per card, trace, tier and load."""
    grouped: dict[str, dict[int, dict[str, Row]]] = {}
    for point in cases:
        by_seed = grouped.setdefault(name_of(point), {})
        by_seed.setdefault(point.seed, {})[point.contender] = row_of(rows, point)
    lines = [line(name, list(by_seed.values())) for name, by_seed in grouped.items()]
    return [list(HEADER), *lines]


def line(name: str, seeds: Sequence[dict[str, Row]]) -> list[str]:
    """One row's figures over its seeds."""

    def ratios(rival: str, column: str = "job_mean_s") -> list[float]:
        return [float(by[rival][column]) / float(by[OURS][column]) for by in seeds]

    def of(contender: str, column: str) -> float:
        return mean(float(by[contender][column]) for by in seeds)

    best = [min(pair) for pair in zip(ratios(ORDER), ratios(PAPER), strict=True)]
    return [
        name,
        with_error(best),
        " ".join(f"{ratio:.3f}" for ratio in best),
        f"{mean(ratios(ORDER)):.3f}",
        f"{mean(ratios(PAPER)):.3f}",
        f"{of(OURS, 'job_mean_cold_s'):.0f}, {of(OURS, 'job_mean_warm_s'):.0f}",
        f"{of(ENDLESS, 'job_mean_s'):.0f} of {of(OURS, 'job_mean_s'):.0f}",
        f"{mean(1 / r for r in ratios(PAPER, 'ttft_p99_s')):.2f}",
        f"{mean(1 / r for r in ratios(PAPER, 'end_s')):.3f}",
    ]
