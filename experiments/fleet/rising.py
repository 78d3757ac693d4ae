"""Load that rises and falls, and the signal to scale.

    python -m experiments.fleet.rising      # --folder experiments/records/figures: its rows and picture

Skewed programs come faster and faster for an hour, then slower. The product's signal, asked each EVERY_S,
says how many replicas would do. It is followed when it has said so for some time, as autoscalers do: then a
replica is started, or one gets no more turns. Down it is followed half of the way (Ray's downscaling_factor).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import numpy as np
import typer

from continuum_lmcache.admission.served import engines_for
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.serve.scaling import FULL
from experiments.fleet.replica import Replica, Turn
from experiments.fleet.routers import Ours, Router
from experiments.fleet.run import FleetSetup, run_fleet
from experiments.fleet.table import DEMANDED, MACHINE
from experiments.fleet.workloads import rate_of, skewed
from experiments.sim.result import TurnResult, percentile
from experiments.sim.serving import Setup
from experiments.sim.step_time import Machine
from experiments.tables import markdown, write_lines
from experiments.workload import ARRIVALS, Program

EVERY_S = 10.0
LIMIT_S = ContinuumConfig().first_token_limit_s
SIGNAL = ("live", "in_time", "wanted", "up")
ROW_S, WINDOW_S = 60.0, 300.0  # between two rows; P90 is of the turns that came so long before


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Its settings."""

    up_s: float = 30.0  # for so long the signal asks for more replicas before they are started,
    down_s: float = 300.0  # or for fewer before they are given back
    start_s: float = 120.0  # a replica's start
    full: float = FULL  # the share of the programs served in time at which one more is wanted


@dataclass(frozen=True, slots=True)
class Asked:
    """The signal at one moment."""

    at_s: float
    live: float  # programs
    in_time: float  # of one replica, at the mean
    wanted: int  # replicas
    up: int  # replicas that answer


@dataclass(frozen=True, slots=True)
class Row:
    """The signal's means since the row before, and P90 of first tokens in the last WINDOW_S."""

    until_s: float
    live: float
    in_time: float
    wanted: float
    up: float
    p90_s: float
    alone_p90_s: float  # of one replica alone


class Scaled(Ours):
    """The product's router over one replica at first, and as many as the signal asks for, up to `most`."""

    def __init__(self, most: int, settings: Autoscaler = Autoscaler()) -> None:  # noqa: B008
        super().__init__()
        self.asked: list[Asked] = []
        self._settings, self._target, self._agreed_s = settings, 1, 0.0
        self._ready_s = [0.0, *[math.inf] * (most - 1)]  # when each replica answers; infinite: it does not

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        if not self.asked or now_s - self.asked[-1].at_s >= EVERY_S:
            self._follow(now_s, [each for each in replicas if self._ready_s[each.index] <= now_s])
        up = [each for each in replicas if self._ready_s[each.index] <= now_s]
        self.gone = {str(each.index) for each in replicas} - {str(each.index) for each in up}
        return super().place(now_s, turn, up)

    def _follow(self, now_s: float, up: Sequence[Replica]) -> None:
        """Ask the signal. Change the target when it was above, or below, the signal for long."""
        engines = {each.index: each.scheduler._engine for each in up}
        found = {at: each.admission.programs_in_time for at, each in engines.items()}
        in_time = {at: most for at, most in found.items() if most is not None}
        live = {at: float(engines[at].programs.live) for at in in_time}
        full = engines_for(live, in_time) or 0.0
        wanted = min(max(math.ceil(full / self._settings.full), 1), len(self._ready_s))
        before = self.asked[-1].wanted if self.asked else wanted
        mean_in_time = mean(in_time.values() or [0.0])
        self.asked.append(Asked(now_s, sum(live.values()), mean_in_time, wanted, len(up)))
        if not min(before, wanted) > self._target and not max(before, wanted) < self._target:
            self._agreed_s = now_s
        lasts_s = self._settings.up_s if wanted > self._target else self._settings.down_s
        if now_s - self._agreed_s < lasts_s:
            return
        if wanted < self._target:
            wanted = min((wanted + self._target + 1) // 2, self._target - 1)
        for at in range(len(self._ready_s)):
            if at >= wanted:
                self._ready_s[at] = math.inf
            elif at >= self._target:
                self._ready_s[at] = now_s + self._settings.start_s
        self._target, self._agreed_s = wanted, now_s


def ramp_s(seed: int, highest: float, lasts_s: float) -> Sequence[float]:
    """When programs arrive: `highest` a second in the middle, a tenth of that at the beginning and end."""
    times_s = np.linspace(0.0, lasts_s, 1000)
    rates = highest * (1 - 0.9 * np.abs(2 * times_s / lasts_s - 1))
    expected = np.concatenate(([0.0], np.cumsum(rates[1:] * np.diff(times_s))))
    at = np.cumsum(np.random.default_rng([seed, ARRIVALS]).exponential(size=int(3 * expected[-1])))
    return [float(at_s) for at_s in np.interp(at[at < expected[-1]], expected, times_s)]


def arriving(programs: Sequence[Program], arrivals_s: Sequence[float]) -> tuple[Program, ...]:
    """The programs, one at each time."""
    return tuple(replace(p, arrival_s=s) for p, s in zip(programs, arrivals_s, strict=True))


def p90_s(turns: Sequence[TurnResult], since_s: float, until_s: float) -> float:
    """Of first tokens of the turns that came then; 0 for none."""
    found = [turn.ttft_s for turn in turns if since_s <= turn.arrival_s < until_s]
    return percentile(found, 90) if found else 0.0


def run(
    programs: Sequence[Program], router: Router, replicas: int, machine: Machine = MACHINE
) -> Sequence[TurnResult]:
    """The turns of a run over that many replicas at most, with DRAM of 20 GB each."""
    engine = Setup(policy="continuum", tiers={"dram_gb": 20.0}, machine=machine, merge_steps=32)
    return run_fleet(programs, FleetSetup(engine, (1.0,) * replicas), router).result.turns


def rows_of(
    asked: Sequence[Asked], turns: Sequence[TurnResult], alone: Sequence[TurnResult], every_s: float = ROW_S
) -> list[Row]:
    """A row each `every_s`, but for spans in which no turn came and so nobody asked."""
    rows = []
    for until_s in np.arange(every_s, asked[-1].at_s + every_s, every_s).tolist():
        if then := [each for each in asked if until_s - every_s <= each.at_s < until_s]:
            means = [mean(getattr(each, name) for each in then) for name in SIGNAL]
            late = [p90_s(found, until_s - WINDOW_S, until_s) for found in (turns, alone)]
            rows.append(Row(until_s, *means, *late))
    return rows


def in_words(asked: Sequence[Asked], rows: Sequence[Row]) -> str:
    """Whether the signal came in time, and what it cost; a row is a window."""
    late, alone = (
        [row.until_s for row in rows if getattr(row, name) > LIMIT_S] for name in ("p90_s", "alone_p90_s")
    )
    wanted, more = (
        [each.at_s for each in asked if getattr(each, name) > 1] or [math.nan] for name in ("wanted", "up")
    )
    hours = sum(a.up * (b.at_s - a.at_s) for a, b in pairwise(asked)) / 3600
    return (
        f"P90 above {LIMIT_S:g} s: {len(late)} of {len(rows)} windows, and {len(alone)} of one alone,"
        f" first at {min(alone, default=math.nan):.0f} s.\nA second replica: wanted at {min(wanted):.0f} s,"
        f" there from {min(more):.0f} to {max(more):.0f} s; {hours:.2f} replica-hours."
    )


def main(
    seed: int = 3,
    highest: float = 2.0,
    lasts_s: float = 7200.0,
    most: int = 6,
    target: float = FULL,
    folder: Path | None = None,
) -> None:
    """Run with the signal and with one replica alone, and print a table in Markdown. `highest`: the load in
    the middle, in times what one replica can do at its best. `target`: the share of the programs served in
    time at which one more is wanted. `folder`: for rising.csv and its picture."""
    arrivals_s = ramp_s(seed, rate_of(skewed(DEMANDED, seed), highest, MACHINE, 1.0), lasts_s)
    programs = arriving(skewed(len(arrivals_s), seed), arrivals_s)
    scaled = Scaled(most, Autoscaler(full=target))
    turns, alone = run(programs, scaled, most), run(programs, Ours(), 1)
    rows = rows_of(scaled.asked, turns, alone)
    print(in_words(scaled.asked, rows), end="\n\n")
    lines = [["until, s", "live", "in time, each", "wanted", "replicas", "P90, s", "P90 of one alone, s"]]
    for until_s, *values in map(astuple, rows_of(scaled.asked, turns, alone, WINDOW_S)):
        lines.append([f"{until_s:.0f}", *(f"{value:.1f}" for value in values)])
    print(markdown(lines))
    if folder is not None:
        from experiments.figures import draw_rising  # matplotlib takes a second to import

        shown = [[f"{value:.4g}" for value in astuple(row)] for row in rows]
        write_lines([[each.name for each in fields(Row)], *shown], folder / "rising.csv")
        print(*draw_rising(folder / "rising.csv", folder / "rising"), sep="\n")


if __name__ == "__main__":
    typer.run(main)
