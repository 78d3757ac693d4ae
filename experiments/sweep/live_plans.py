"""The figures of --engine live: the paper's proportions at the size of a small machine.

Tiers are multiples of the GPU's own KV cache, as the paper's 100 GB are 1.7 times the 59 GB that an
A100 has beside an 8B model. Every case starts a new server, so that no cache is warm; a case takes a
minute. The arrival rates make memory short on two cores of an AMD EPYC; a faster machine needs another rate
(--jps), or nothing is evicted and all policies are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from experiments.sweep.cases import PEERS, ROUTER_WARM, STOCK, Case, Live
from experiments.sweep.grids import Cases, Size
from experiments.sweep.live import KV_GB
from experiments.sweep.plans import LMCACHE, OF_PEERS, TAILS, Plan, bare_name, rate, tiers

SMALL, LARGE = 0.5 * KV_GB, 8 * KV_GB
PUBLISHED = "continuum-published"
ABLATION = (STOCK, "program-fcfs", "static-ttl", PUBLISHED, "continuum")
CONTENDERS = (*ABLATION[:2], "plas", "infercept", "mean-threshold", *ABLATION[2:])
QUICK = (STOCK, *PEERS, "continuum")
AGENTS = ("claude-code-swe:report", "mini-swe:report")
RIVALS = (STOCK, *PEERS, PUBLISHED, "continuum")
FEW = (STOCK, ROUTER_WARM, PUBLISHED, "continuum")
DISKS = tuple((SMALL, times * KV_GB) for times in (0, 2, 8))


def cases_of(
    contenders: Sequence[str],
    memory_gb: Sequence[tuple[float, float]],
    rates: Sequence[float] = (0.5, 1.0),
    programs: tuple[int, int] = (20, 40),
    workloads: Sequence[str] = ("swe",),
    bare: bool = False,
) -> Cases:
    """The contenders at sizes of DRAM and disk, at the last of `rates`; `bare`: also fcfs without tiers.

    `programs` of the default and of FULL, which has all rates. QUICK: six programs, at most one a second, the
    first workload, the last memory. The first contender changes with the seed.
    """

    def cases(size: Size, seeds: Sequence[int]) -> list[Case]:
        count, names, works, memory = programs[size is Size.FULL], contenders, workloads, memory_gb
        given = rates if size is Size.FULL else rates[-1:]
        if size is Size.QUICK:
            count, names, works, memory = 6, [c for c in contenders if c in QUICK], works[:1], memory[-1:]
            given = [min(given[0], 1.0)]
        found: list[Case] = []
        for seed, jps, workload in product(seeds, given, works):
            base = Live(STOCK, count, jps, seed, workload)
            found += [base] if bare else []
            first = seed % len(names)
            for (dram_gb, ssd_gb), name in product(memory, (*names[first:], *names[:first])):
                found.append(replace(base, contender=name, dram_gb=dram_gb, ssd_gb=ssd_gb))
        return found

    return cases


def everything(case: Case) -> str:
    return f"{case.workload}, {tiers(case)}"


OF_TRACES = partial(OF_PEERS, panel=everything, shows=("job_mean_s", "ttft_p99_s", "end_s", "ttft_max_s"))
ON_DRAM = cases_of(CONTENDERS, [(LARGE, 0.0)], bare=True)
LIVE_PLANS: dict[str, Plan] = {
    "fig8": Plan("No offloading", cases_of(CONTENDERS, [(0.0, 0.0)]), rate),
    "fig9": Plan("DRAM 8x the KV cache", ON_DRAM, rate, baseline=LMCACHE),
    "fig10": Plan("Tails, DRAM 8x the KV cache", ON_DRAM, rate, baseline=LMCACHE, shows=TAILS),
    "fig14": Plan("DRAM half the KV cache, and disks", cases_of(ABLATION, DISKS), tiers, bare_name),
    "agents": OF_TRACES(
        "Traces of agents, DRAM half the KV cache, and a disk of twice it or none",
        cases_of((*RIVALS, "program-fcfs"), DISKS[:2], (1.0,), (20, 20), AGENTS),
    ),
    "agents-mp": OF_TRACES(
        "Traces of agents, DRAM 8x the KV cache",
        cases_of(FEW, [(LARGE, 0.0)], (1.0,), workloads=AGENTS),
    ),
    "peers": OF_PEERS(
        "Other projects' schedulers, DRAM half the KV cache, and a disk of twice it or none",
        cases_of(RIVALS, DISKS[:2], (2.0,), (40, 40)),
        everything,
    ),
    "fig15": Plan("Ablation", cases_of(ABLATION, [(0.0, 0.0), (LARGE, 0.0)]), tiers, bare_name),
}
