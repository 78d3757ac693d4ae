"""The figures by name: their cases, their columns, and their panels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from experiments.sweep.cases import STOCK, Case, Point
from experiments.sweep.grids import (
    DRAM_GB,
    SLOW_DRAM_GB,
    Cases,
    ablation,
    by_card,
    by_rate,
    by_ssd,
    by_tiers,
    with_peers,
)

WORDS = {
    "job_mean_s": "mean job time, s",
    "job_p50_s": "median job time, s",
    "job_p90_s": "P90 of the job times, s",
    "job_p95_s": "P95 of the job times, s",
    "job_p99_s": "P99 of the job times, s",
    "ttft_p99_s": "P99 of first tokens, s",
    "ttft_max_s": "longest wait for a first token, s",
    "end_s": "all programs, s",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One figure."""

    title: str
    cases: Cases
    panel: Callable[[Case], str]  # one for each text that this gives
    label: Callable[[Case], str] = lambda case: case.label  # the line within a panel
    baseline: str = STOCK  # the label that ratios are taken to
    shows: tuple[str, ...] = ("job_mean_s",)  # keys of WORDS
    drawn: tuple[str, ...] = ()  # of these; none: all
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # unless others are asked for


def rate(case: Case) -> str:
    return f"{case.jps:g} programs/s"


def of_field(name: str, words: str) -> Callable[[Case], str]:
    """Panels by one field's value."""
    return lambda case: f"{words} {getattr(case, name):g}"


def tiers(case: Case) -> str:
    if not case.dram_gb and not case.ssd_gb:
        return "no offloading"
    return f"DRAM {case.dram_gb:.3g} GB" + (f", disk {case.ssd_gb:.3g} GB" if case.ssd_gb else "")


def in_kv_caches(case: Case) -> str:
    """Tiers in sizes of the GPU's KV cache."""
    assert isinstance(case, Point)
    if not case.offloads:
        return "no offloading"
    return f"DRAM {case.dram_kv:g} x the GPU's" + (f", disk {case.ssd_kv:g} x" if case.ssd_kv else "")


def bare_name(case: Case) -> str:
    return case.contender


def rate_and_tiers(case: Case) -> str:
    return f"{rate(case)}, {tiers(case)}"


UNTUNED = (3, 4, 5, 6, 7)  # what is tuned is tuned on 1 and 2
LMCACHE = f"{STOCK}+LMCache"
TAILS, WITH_WAITS = ("job_p90_s", "job_p95_s"), ("job_mean_s", "ttft_max_s")
OF_PEERS = partial(  # other projects' schedulers
    Plan,
    label=bare_name,
    baseline="continuum",
    shows=("job_mean_s", "job_p50_s", "job_p99_s", "ttft_max_s"),
    drawn=WITH_WAITS,
    seeds=UNTUNED,
)
DRAM = f"{DRAM_GB:g} GB of DRAM"
PLANS: dict[str, Plan] = {
    "tiers": Plan(
        "Programs like Claude Code's, a machine's whole work",
        by_tiers,
        in_kv_caches,
        bare_name,
        shows=WITH_WAITS,
        seeds=UNTUNED,
    ),
    "cards": Plan(
        "A published sweep's jobs on cards of 24 to 80 GB",
        by_card,
        lambda case: f"{case.machine}, {rate_and_tiers(case)}",
        bare_name,
        shows=WITH_WAITS,
        seeds=UNTUNED,
    ),
    "fig8": Plan("No offloading", by_rate(0.0), rate),
    "fig9": Plan(DRAM, by_rate(DRAM_GB), rate, baseline=LMCACHE),
    "fig10": Plan(f"Tails, {DRAM}", by_rate(DRAM_GB), rate, baseline=LMCACHE, shows=TAILS),
    "fig14": Plan(
        f"{SLOW_DRAM_GB:g} GB of DRAM and a disk", by_ssd, of_field("ssd_gb", "disk, GB:"), baseline=LMCACHE
    ),
    "fig15": Plan("Ablation", ablation, tiers, label=bare_name),
    "peers": OF_PEERS("Other projects' schedulers", with_peers, rate_and_tiers),
}
