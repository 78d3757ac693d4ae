"""The paper's figures, and further ones: from vLLM's own scheduler in virtual time, or from real servers.

    python -m experiments.offload_sweep fig8 fig9 fig15        no offloading, DRAM, the ablation
    python -m experiments.offload_sweep all                    every figure, in minutes
    python -m experiments.offload_sweep fig9 --quick           seconds; a check that everything works
    python -m experiments.offload_sweep fig9 --full --jobs 16  what a claim needs; hours on two cores
    python -m experiments.offload_sweep fig14 --engine live    a real server per case; a minute each
    python -m experiments.offload_sweep fig14 --engine live --jps 3     on a machine where 1 evicts nothing

Figures: fig8 no offload, fig9 DRAM, fig10 tails, fig14 disks, fig15 ablation,
peers, tiers, cards; --engine live has fig8, fig9, fig10, fig14,
fig15, peers, agents and agents-mp, at a small machine's size (sweep/live_plans.py). `goals` is
the table of the policy's goals, with seeds it was not tuned on (--full: all of them; --regimes: some).
`traces` is the table on real agents' traces, which are not part of the project (sim/trace_programs.py).
Rows are appended to OUT/offload_sweep.csv (of --engine live OUT/live_sweep.csv), and
finished ones are skipped: stop it and start it again as you like. --seeds, --contenders and --tiers choose
among a figure's rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.errors import ConfigError, TraceError, nearest
from experiments.sim.trace_programs import refuse_unknown
from experiments.sweep import closed_loop, goals
from experiments.sweep.cases import Case, Live, SweepError
from experiments.sweep.grids import Size, installed, named, own
from experiments.sweep.live_plans import LIVE_PLANS
from experiments.sweep.plans import PLANS, Plan
from experiments.sweep.readout import caption, figures_by_case, found, table
from experiments.sweep.rows import LIVE, Rows
from experiments.sweep.runner import complete
from experiments.tables import publish, write_lines

ALL = "all"
GOALS = "goals"
TRACES = "traces"
SESSIONS = "sessions"
TABLES = (GOALS, TRACES, SESSIONS)
NAMES = f"sim: {', '.join([*PLANS, *TABLES])}; live: {', '.join(LIVE_PLANS)}; either: {ALL}"
TIERS = ("none", "dram", "disk")  # the slowest that a case has


class Engine(Enum):
    """The engine that runs the programs."""

    SIM = "sim"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted cases of a figure; an empty field excludes none."""

    parts: str = ""  # of names, between semicolons
    contenders: tuple[str, ...] = ()
    tiers: tuple[str, ...] = TIERS
    jps: float | None = None  # live: arrivals a second, in place of the figure's

    def has(self, case: Case, name: str) -> bool:
        """Whether the case, which the figure calls `name`, is wanted."""
        has_dram, has_ssd = (
            any(getattr(case, f"{tier}_{unit}", 0.0) for unit in ("gb", "kv")) for tier in ("dram", "ssd")
        )
        tiers = TIERS[2 if has_ssd else 1 if has_dram else 0]
        return (
            goals.is_wanted(name, self.parts)
            and case.contender in (self.contenders or (case.contender,))
            and tiers in self.tiers
        )


def wanted(parts: str, contenders: str, tiers: str) -> Wanted:
    """From the command line. Raises SweepError."""
    return Wanted(parts, tuple(filter(None, contenders.split(","))), tuple(named(tiers, TIERS, "--tiers")))


def plans_named(names: list[str], engine: Engine = Engine.SIM) -> dict[str, Plan]:
    """The engine's plans of those names. Raises SweepError with the known names."""
    plans = LIVE_PLANS if engine is Engine.LIVE else PLANS
    known = [*plans, *(TABLES if engine is Engine.SIM else []), ALL]
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise SweepError(f"figure {name!r} is not known to --engine {engine.value}; {hint}")
    return plans if ALL in names else {n: plans[n] for n in dict.fromkeys(names) if n not in TABLES}


def seeds_of(text: str) -> list[int]:
    """From "3", "1,4" or "1..5". Raises SweepError."""
    first, dots, last = text.partition("..")
    try:
        seeds = list(range(int(first), int(last) + 1)) if dots else [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds:
        raise SweepError(f"--seeds {text!r} names no seed; write 1..5, or 1,4,7")
    return seeds


def sweep(
    plans: dict[str, Plan],
    size: Size,
    seeds: list[int] | None,
    wants: Wanted,
    jobs: int,
    out: Path,
    suffix: str,
    is_live: bool = False,
) -> None:
    """Run the missing cases, then write each figure, its table and its CSV, as NAME-SUFFIX.

    `seeds` replace each figure's own; only wanted cases are run.
    """
    rows = Rows(out / "live_sweep.csv", LIVE) if is_live else Rows(out / "offload_sweep.csv")
    of_each = {name: cases_of(plan, size, seeds, wants) for name, plan in plans.items()}
    wanted = {name: cases for name, cases in of_each.items() if cases}
    if not wanted:
        raise SweepError(
            f"{', '.join(plans)}: no row is left by --regimes, --contenders and --tiers together"
        )
    complete(rows, [case for cases in wanted.values() for case in cases], jobs)
    from experiments.sweep.drawing import draw  # matplotlib takes a second to import

    for name, cases in wanted.items():
        plan, pairs = plans[name], found(rows, cases)
        path = out / f"{name}-{suffix}"
        publish(table(plan, pairs), f"{name}. {plan.title}", [caption(pairs)], path)
        write_lines(figures_by_case(plan, pairs), path.with_suffix(".csv"))
        draw(plan, pairs, path)


def cases_of(plan: Plan, size: Size, seeds: list[int] | None, wants: Wanted) -> list[Case]:
    """The plan's cases that can run here. A contender that is not installed is left out, with the reason."""
    chosen = seeds or plan.seeds
    cases = plan.cases(size, chosen[:1] if size is Size.QUICK else chosen)
    mine = own(wants.contenders)
    cases += [replace(c, contender=name) for name in mine for c in cases if c.contender == goals.OURS]
    named(",".join(wants.contenders), dict.fromkeys(case.contender for case in cases), "--contenders")
    cases = [case for case in cases if wants.has(case, f"{plan.label(case)}, {plan.panel(case)}")]
    if wants.jps is not None:
        cases = [replace(case, jps=wants.jps) for case in cases if isinstance(case, Live)]
    return installed(dict.fromkeys(cases))


def reach(chosen: Sequence[goals.Goal], seeds: Sequence[int], title: str, jobs: int, path: Path) -> None:
    """Run missing cases of the goals; then print their table, and write it at `path`."""
    rows, cases = Rows(path.parent / "offload_sweep.csv"), goals.cases(chosen, seeds)
    complete(rows, cases, jobs)
    title += f", seeds {', '.join(map(str, seeds))} (tuned on 1 and 2)"
    publish(goals.table(rows, chosen, seeds), title, [caption(found(rows, cases))], path)


def main(
    figures: Annotated[list[str], typer.Argument(help=NAMES)],
    engine: Annotated[Engine, typer.Option(help="the simulator, or a real server")] = Engine.SIM,
    quick: Annotated[bool, typer.Option("--quick", help="small: under a minute a figure")] = False,
    full: Annotated[bool, typer.Option("--full", help="large: for claims")] = False,
    seeds: Annotated[str, typer.Option(help="1..5, or 1,4,7; default: the figure's own")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = os.cpu_count() or 1,
    out: Annotated[Path, typer.Option(help="where rows, tables and figures go")] = Path("results"),
    jps: Annotated[float | None, typer.Option(help="--engine live: arrivals a second", min=1e-6)] = None,
    regimes: Annotated[str, typer.Option(help="parts of rows' names, between semicolons")] = "",
    contenders: Annotated[str, typer.Option(help="of a figure: these, or module:name, between commas")] = "",
    tiers: Annotated[str, typer.Option(help=f"of a figure: of {', '.join(TIERS)}, between commas")] = "",
    half: Annotated[str, typer.Option(help="of a trace: report, tune; fitted needs none")] = "report",
    machines: Annotated[str, typer.Option(help="traces: cards, between commas")] = "a100,h200",
    untold_ends: Annotated[
        bool, typer.Option("--untold-ends", help="traces: clients do not say which turn is their last")
    ] = False,
    sessions: Annotated[str, typer.Option(help="sessions: how many are live, as 12,24")] = "",
    programs: Annotated[
        int, typer.Option(min=0, help="sessions: a batch of so many, by --sessions workers")
    ] = 0,
    trace: Annotated[str, typer.Option(help="sessions: the trace")] = "claude-code",
    longest_waits: Annotated[
        str, typer.Option(help="sessions: continuum.longest_wait_s, in seconds, as 240,600")
    ] = "",
) -> None:
    """Draw the figures; run missing cases."""
    try:
        if quick and full:
            raise SweepError("--quick and --full contradict each other; give one")
        chosen = seeds_of(seeds) if seeds else None
        size = Size.QUICK if quick else Size.FULL if full else Size.DEFAULT
        plans = plans_named(figures, engine)
        if jps is not None and engine is not Engine.LIVE:
            raise SweepError("--jps is for --engine live: the simulator's rates are fixed; leave it out")
        suffix = f"live-{size.value}" if engine is Engine.LIVE else size.value
        untuned, part = chosen or goals.SEEDS[size], "-some" * bool(regimes)
        if GOALS in figures:
            reach(goals.goals(size, regimes), untuned, "Goals", jobs, out / f"goals-{size.value}{part}")
        if TRACES in figures:
            every = goals.traces(size, half, machines.split(","), untold_ends, regimes)
            name = f"traces-{half}-{size.value}{'-untold' * untold_ends}{part}"
            reach(every, untuned, f"Traces, half {half!r}", jobs, out / name)
        if regimes and SESSIONS in figures:
            raise SweepError("--regimes chooses rows of figures, goals and traces; leave it out for sessions")
        if SESSIONS in figures:
            refuse_unknown(trace, half)
            loops = closed_loop.points(
                size, sessions, programs, f"{trace}:{half}", tiers, contenders, chosen, longest_waits
            )
            closed_loop.tabulate(loops, jobs, out)
        if plans:
            wants, is_live = replace(wanted(regimes, contenders, tiers), jps=jps), engine is Engine.LIVE
            sweep(plans, size, chosen, wants, jobs, out, suffix, is_live)
    except (SweepError, ConfigError, TraceError) as error:
        raise SystemExit(f"offload_sweep: {error}") from error


if __name__ == "__main__":
    typer.run(main)
