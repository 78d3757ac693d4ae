"""The figures of --engine live: the paper's proportions at the size of a small machine.

Tiers are multiples of the GPU's own KV cache, as the paper's 100 GB are 1.7 times the 59 GB that an
A100 has beside an 8B model. Every case starts a new server, so that no cache is warm; a case takes a
minute. The arrival rates make memory short on two cores of an AMD EPYC; a faster machine needs another rate
(`paced`), or nothing is evicted and all policies are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from experiments.sweep.cases import PEERS, ROUTER_WARM, STOCK, Case, Live
from experiments.sweep.grids import Cases, Size
from experiments.sweep.live import MACHINES
from experiments.sweep.plans import LMCACHE, PEER_COLUMNS, UNTUNED, Plan, bare_name, rate, tiers

KV_GB = MACHINES["cpu-tiny"].kv_gb
SMALL, LARGE = 0.5 * KV_GB, 8 * KV_GB
PUBLISHED = "continuum-published"
ABLATION = (STOCK, "program-fcfs", "static-ttl", PUBLISHED, "continuum")
CONTENDERS = (
    STOCK,
    "program-fcfs",
    "plas",
    "infercept",
    "mean-threshold",
    "static-ttl",
    PUBLISHED,
    "continuum",
)


Memory = tuple[float, float]  # GB of DRAM and disk


def cases_of(contenders: Sequence[str], memory_gb: Sequence[Memory], bare: bool = False) -> Cases:
    """The contenders at (DRAM, disk) sizes, along the arrival rate; `bare`: also fcfs without tiers."""

    def cases(size: Size, seeds: Sequence[int]) -> list[Case]:
        programs = {Size.QUICK: 6, Size.DEFAULT: 20, Size.FULL: 40}[size]
        names = (STOCK, "continuum") if size is Size.QUICK else contenders
        rates = (0.5, 1.0) if size is Size.FULL else (1.0,)
        chosen = memory_gb[-1:] if size is Size.QUICK else memory_gb
        found: list[Case] = []
        for seed, jps in product(seeds, rates):
            base = Live(STOCK, programs, jps, seed)
            found += [base] if bare else []
            for (dram_gb, ssd_gb), name in product(chosen, names):
                found.append(replace(base, contender=name, dram_gb=dram_gb, ssd_gb=ssd_gb))
        return found

    return cases


AGENTS = ("claude-code-swe:report", "mini-swe:report")
RIVALS = (STOCK, *PEERS, PUBLISHED, "continuum")
Setting = tuple[str, str]  # workload and machine
PAPER: tuple[Setting, ...] = (("swe", "cpu-tiny"),)
BOTH_TRACES: tuple[Setting, ...] = tuple((trace, "cpu-tiny") for trace in AGENTS)
FEW = (STOCK, ROUTER_WARM, PUBLISHED, "continuum")
PAPERS = dict.fromkeys(Size, PAPER)
TRACED = {Size.QUICK: BOTH_TRACES[:1], Size.DEFAULT: BOTH_TRACES, Size.FULL: BOTH_TRACES}


def in_turns(
    contenders: Sequence[str],
    memory_gb: Sequence[Memory],
    settings: Mapping[Size, Sequence[Setting]],
    programs: Mapping[Size, int],
    jps: float,
) -> Cases:
    """The contenders in each setting, under pressure. QUICK: six programs, at most one a second,
    the largest memory.

    The first contender changes with the seed.
    """

    def cases(size: Size, seeds: Sequence[int]) -> list[Case]:
        count, rate = (6, min(jps, 1.0)) if size is Size.QUICK else (programs[size], jps)
        chosen = memory_gb[-1:] if size is Size.QUICK else memory_gb
        found: list[Case] = []
        for seed, (workload, machine), (dram_gb, ssd_gb) in product(seeds, settings[size], chosen):
            first = seed % len(contenders)
            base = Live(STOCK, count, rate, seed, workload, machine, dram_gb, ssd_gb)
            found += [replace(base, contender=name) for name in (*contenders[first:], *contenders[:first])]
        return found

    return cases


def everything(case: Case) -> str:
    return f"{case.workload}, {case.machine}, {tiers(case)}"


def paced(plan: Plan, jps: float) -> Plan:
    """The plan with this arrival rate, programs a second, instead of its own."""

    def cases(size: Size, seeds: Sequence[int]) -> list[Case]:
        given = [case for case in plan.cases(size, seeds) if isinstance(case, Live)]
        return list(dict.fromkeys(replace(case, jps=jps) for case in given))

    return replace(plan, cases=cases)


DISKS = tuple((SMALL, times * KV_GB) for times in (0, 2, 8))
OF_TRACES = partial(
    Plan,
    panel=everything,
    label=bare_name,
    baseline="continuum",
    shows=("job_mean_s", "ttft_p99_s", "end_s", "ttft_max_s"),
    drawn=("job_mean_s", "ttft_max_s"),
    by_seed=True,
    seeds=UNTUNED,
)
LIVE_PLANS: dict[str, Plan] = {
    "fig8": Plan("No offloading", cases_of(CONTENDERS, [(0.0, 0.0)]), rate),
    "fig9": Plan("DRAM 8x the KV cache", cases_of(CONTENDERS, [(LARGE, 0.0)], True), rate, baseline=LMCACHE),
    "fig10": Plan(
        "Tails, DRAM 8x the KV cache",
        cases_of(CONTENDERS, [(LARGE, 0.0)], True),
        rate,
        baseline=LMCACHE,
        shows=("job_p90_s", "job_p95_s"),
    ),
    "fig14": Plan(
        "DRAM half the KV cache, and disks",
        cases_of(ABLATION, DISKS),
        tiers,
        bare_name,
        shows=("job_mean_s",),
    ),
    "pressure": Plan(
        "DRAM half the KV cache, and a disk of twice it or none",
        cases_of((STOCK, PUBLISHED, "continuum"), [(SMALL, 2 * KV_GB), (SMALL, 0.0)]),
        tiers,
        bare_name,
        shows=("job_mean_s", "ttft_max_s"),
    ),
    "agents": OF_TRACES(
        "Traces of agents, DRAM half the KV cache, and a disk of twice it or none",
        in_turns((*RIVALS, "program-fcfs"), DISKS[:2], TRACED, dict.fromkeys(Size, 20), 1.0),
    ),
    "agents-mp": OF_TRACES(
        "Traces of agents, DRAM 8x the KV cache",
        in_turns(FEW, [(LARGE, 0.0)], TRACED, {Size.DEFAULT: 20, Size.FULL: 40}, 1.0),
    ),
    "peers": Plan(
        "Other projects' schedulers, DRAM half the KV cache, and a disk of twice it or none",
        in_turns(RIVALS, DISKS[:2], PAPERS, {Size.DEFAULT: 40, Size.FULL: 40}, 2.0),
        everything,
        bare_name,
        baseline="continuum",
        shows=PEER_COLUMNS,
        drawn=("job_mean_s", "ttft_max_s"),
        by_seed=True,
        seeds=UNTUNED,
    ),
    "fig15": Plan("Ablation", cases_of(ABLATION, [(0.0, 0.0), (LARGE, 0.0)]), tiers, bare_name),
}
