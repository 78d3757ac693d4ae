"""The figures by name: their cases, their columns, and their panels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from experiments.sweep.cases import STOCK, Case, Point
from experiments.sweep.grids import (
    DRAM_GB,
    SLOW_DRAM_GB,
    Cases,
    ablation,
    by_batch,
    by_memory,
    by_rate,
    by_ssd,
    by_tiers,
    by_turns,
    published,
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
    by_seed: bool = False  # also seed by seed, and where others are ahead of the baseline
    published: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by panel and label
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # unless others are asked for


def rate(case: Case) -> str:
    return f"{case.jps:g} programs/s"


def of_field(name: str, words: str) -> Callable[[Case], str]:
    """Panels by one field's value."""
    return lambda case: f"{words} {getattr(case, name):g}"


def batch(case: Case) -> str:
    assert isinstance(case, Point)
    return f"chunk {case.step_tokens}, batch {case.max_seqs}"


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


def with_tiers(case: Case) -> str:
    return f"{case.contender}, {tiers(case)}"


UNTUNED = (3, 4, 5, 6, 7)  # what is tuned is tuned on 1 and 2
LMCACHE = f"{STOCK}+LMCache"
SURVEY: dict[str, dict[str, tuple[float, ...]]] = {
    "h1": {
        STOCK: (8.55, 28.11, 192.15, 416.92, 702.50),
        "mean-threshold": (8.67, 20.67, 66.00, 119.39, 185.08),
        LMCACHE: (9.75, 24.29, 63.22, 158.69, 684.80),
    },
    "h2": {
        STOCK: (9.01, 68.85, 244.07, 456.30, 739.24),
        "mean-threshold": (8.75, 39.75, 100.38, 172.89, 259.52),
        LMCACHE: (10.21, 27.51, 65.85, 165.19, 689.47),
    },
    "h3": {
        STOCK: (7.3, 24.5, 226.6, 453.1),
        "mean-threshold": (7.7, 23.2, 75.2, 125.8),
        LMCACHE: (9.4, 25.5, 226.0, 516.4),
    },
}
"""Mean job time in s at 1, 3, 6, 10 and 15 programs/s, from hungchun0201/agentic-ai-survey. Its
"Continuum" is the public prototype: mean-threshold here."""


def survey(name: str) -> dict[tuple[str, str], float]:
    """The published figures by panel and label."""
    rates = (1, 3, 6, 10, 15)
    return {
        (f"{jps} programs/s", label): mean_s
        for label, means_s in SURVEY[name].items()
        for jps, mean_s in zip(rates, means_s, strict=False)
    }


def of_survey(name: str, machine: str, dram_gb: float) -> Plan:
    title = f"Published sweep, {machine.upper()} with {dram_gb:g} GB of DRAM"
    return Plan(title, published(machine, dram_gb), rate, published=survey(name))


PEER_COLUMNS = ("job_mean_s", "job_p50_s", "job_p99_s", "ttft_max_s")  # of other projects' schedulers
DRAM = f"{DRAM_GB:g} GB of DRAM"
PLANS: dict[str, Plan] = {
    "tiers": Plan(
        "Programs like Claude Code's, a machine's whole work",
        by_tiers,
        in_kv_caches,
        bare_name,
        shows=("job_mean_s", "ttft_max_s"),
        seeds=UNTUNED,
    ),
    "fig8": Plan("No offloading", by_rate(0.0), rate),
    "fig9": Plan(DRAM, by_rate(DRAM_GB), rate, baseline=LMCACHE),
    "fig10": Plan(
        f"Tails, {DRAM}", by_rate(DRAM_GB), rate, baseline=LMCACHE, shows=("job_p90_s", "job_p95_s")
    ),
    "fig12": Plan(f"Chunk and batch, {DRAM}", by_batch, batch, baseline=LMCACHE),
    "fig13": Plan(
        f"More and shorter turns, {DRAM}", by_turns, of_field("turns_factor", "turns x"), baseline=LMCACHE
    ),
    "fig14": Plan(
        f"{SLOW_DRAM_GB:g} GB of DRAM and a disk", by_ssd, of_field("ssd_gb", "disk, GB:"), baseline=LMCACHE
    ),
    "fig15": Plan("Ablation", ablation, tiers, label=bare_name),
    "h1": of_survey("h1", "h200", 400.0),
    "h2": of_survey("h2", "h100", 400.0),
    "h3": of_survey("h3", "h200", 64.0),
    "peers": Plan(
        "Other projects' schedulers",
        with_peers,
        rate_and_tiers,
        bare_name,
        baseline="continuum",
        shows=PEER_COLUMNS,
        drawn=("job_mean_s", "ttft_max_s"),
        by_seed=True,
        seeds=UNTUNED,
    ),
    "whatif": Plan(
        "What a machine holds", by_memory, rate, with_tiers, f"{STOCK}, no offloading", ("job_p95_s",)
    ),
}
