"""Measures the gain of switches, one or several together: the same programs with them off and on.

    python -m experiments.switches priced_pins --regimes "no offloading; DRAM 20 GB alone"
    python -m experiments.switches priced_pins,measured_chunk --regimes "fig8"      # a joint ablation
    python -m experiments.switches load_or_recompute --regimes "tools x 10, slow disk" --ssd-gbps 0.05
    python -m experiments.switches my_policies:twice_mean     # on: a policy of one's own, off: continuum
    python -m experiments.switches                  # each switch in each regime: about an hour of a core

A switch is one of policies.SWITCHES, or a setting that is true or false. infer_programs is run
with clients that name no program. In the simulator: an assumed A100 unless the regime has another machine,
decode steps merged. The ratio is that of mean job times, off / on, seed by seed: above 1 the switch gains.
Rows are printed as they end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Annotated

import typer

from continuum_lmcache.config import KEYS
from continuum_lmcache.policy.named import policy_named
from experiments import policies
from experiments.offload_sweep import seeds_of
from experiments.policies import registered, without
from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sweep.cases import Point
from experiments.sweep.goals import is_wanted, papers, swe
from experiments.sweep.simulated import programs_of, setup_of

SWITCHES = (*policies.SWITCHES, "infer_programs")
WITHOUT = "without"  # a policy's name while its run lasts


@dataclass(frozen=True, slots=True)
class Pair:
    """One seed's two runs."""

    off: Result
    on: Result

    @property
    def ratio(self) -> float:
        return self.off.mean_job_s / self.on.mean_job_s

    @property
    def tail(self) -> float:
        """P99 of job times, on / off: below 1 the switch helps the tail too."""
        return self.on.job_percentile_s(99) / self.off.job_percentile_s(99)


def with_switches(point: Point, switches: Sequence[str], are_on: bool) -> Result:
    """One run of the point with these on or off; a policy of one's own is on in the other's place."""
    programs = programs_of(point)
    if ":" in switches[0]:
        setup = setup_of(point, programs)
        return simulate(programs, replace(setup, policy=switches[0]) if are_on else setup)
    if "infer_programs" in switches:
        programs = tuple(replace(program, source="unnamed") for program in programs)
    setup = setup_of(point, programs)
    if are_on:
        return simulate(programs, setup)
    of_policy = [name for name in switches if name in policies.SWITCHES]
    settings = dict.fromkeys((name for name in switches if name not in policies.SWITCHES), False)
    with registered(WITHOUT, without(setup.policy, *of_policy)):
        return simulate(programs, replace(setup, policy=WITHOUT, continuum={**setup.continuum, **settings}))


def pair(point: Point, switches: Sequence[str], seed: int) -> Pair:
    point = replace(point, seed=seed)
    off, on = (with_switches(point, switches, are_on) for are_on in (False, True))
    return Pair(off, on)


def regimes(programs: int) -> dict[str, Point]:
    """The goals' settings, and two with a disk that is slower than computing."""
    slow = {
        "fig14, slow disk": replace(swe(programs, 0.06, 20.0, 200.0), ssd_gbps=0.5),
        "tools x 10, slow disk": replace(swe(programs, 0.05, 20.0, 400.0), tool_factor=10.0, ssd_gbps=0.5),
    }
    return {goal.regime: goal.ours for goal in papers(programs)} | slow


def line(name: str, pairs: Sequence[Pair]) -> str:
    """A row of markdown."""
    ratios, tails = [p.ratio for p in pairs], [p.tail for p in pairs]
    shown = " ".join(f"{p.off.mean_job_s:.0f}>{p.on.mean_job_s:.0f}" for p in pairs)
    pins = " ".join(f"{p.on.pins['taken']}/{p.on.pins.get('reused', 0)}" for p in pairs)
    return f"| {name} | {mean(ratios):.3f} ({min(ratios):.3f}) | {mean(tails):.3f} | {shown} | {pins} |"


def chosen(names: str | None) -> Sequence[tuple[str, ...]]:
    """The sets of switches to run, each set off together. Raises typer.BadParameter for unknown ones."""
    if names is None:
        return [(name,) for name in SWITCHES]
    switches = tuple(names.split(","))
    if ":" in names:
        policy_named(names)
        return [(names,)]
    booleans = (name for name, kind in KEYS.items() if kind == "bool")
    known = list(dict.fromkeys([*policies.SWITCHES, *booleans]))
    for name in switches:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is no switch; known: {', '.join(known)}")
    return [switches]


def jobs(
    sets: Sequence[tuple[str, ...]], parts: str, programs: int, ssd_gbps: float | None
) -> Iterator[tuple[tuple[str, ...], str, Point]]:
    """Each set in each regime whose name has one of `parts`. Raises typer.BadParameter if none has."""
    found = {name: point for name, point in regimes(programs).items() if is_wanted(name, parts)}
    if not found:
        raise typer.BadParameter(f"no regime has {parts!r} in its name; known: {', '.join(regimes(1))}")
    for switches in sets:
        for name, point in found.items():
            has_disk = ssd_gbps is not None and point.ssd_gb
            yield switches, name, replace(point, ssd_gbps=ssd_gbps) if has_disk else point


def main(
    switches: Annotated[str | None, typer.Argument(help="off together, by commas; none: each alone")] = None,
    regimes: Annotated[str, typer.Option(help="parts of their names, between semicolons")] = "",
    seeds: Annotated[str, typer.Option(help="3..7, or 1,2")] = "3..7",
    programs: Annotated[int, typer.Option(min=1)] = 60,
    ssd_gbps: Annotated[float | None, typer.Option(help="of the regimes with a disk")] = None,
    workers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the table."""
    typer.echo("| switch, regime | off / on (worst seed) | P99, on / off | mean s, off>on | pins, reused |")
    typer.echo("|---|---|---|---|---|")
    with ProcessPoolExecutor(workers) as pool:
        for names, regime, point in jobs(chosen(switches), regimes, programs, ssd_gbps):
            pairs = list(pool.map(partial(pair, point, names), seeds_of(seeds)))
            typer.echo(line(f"{' + '.join(names)}, {regime}", pairs))


if __name__ == "__main__":
    typer.run(main)
