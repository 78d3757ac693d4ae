"""Measures the extra cost of our scheduler over vLLM's own.    python -m experiments.overhead

All contenders run in one process and alternate, step by step or turn by turn, so that a drift of the machine
affects all of them alike; Python's garbage collector is off. Times are CPU times of the thread: a busy
machine adds nothing to them, though it makes all of them longer. A figure is the median over the repeats of
each repeat's median; in brackets the least and the greatest of these. "stock again" is stock's own
scheduler a second time: its difference to stock is the error of a difference. All have the fake
connector of size 0.

The steps are decode steps. A turn is its arrival, a step with its prompt, one decode step, and the step
without tokens in which vLLM tells its worker that it is over; between turns the engine is idle. Its tool is
named by the client, or read off the answer's last 512 tokens. No gap of the tool is known at first, or as
many as are ever remembered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.tools.durations import WINDOW
from experiments.sweep.cases import ON_DEMAND, STOCK
from experiments.sweep.timed import (
    WARM_UP_ROUNDS,
    Bench,
    StepCost,
    no_collections,
    shared_clock,
    timed_schedulers,
)
from experiments.sweep.timed_turn import TimedTurns

PARTS = ("whole_us", "schedule_us", "update_us", "stats_us")
SIZES = ((1, 0, 0), (1, 16, 16), (16, 0, 0), (16, 64, 256), (256, 0, 0), (256, 1000, 200))
STEP_GOAL_MS, TURN_GOAL_MS = 0.02, 0.3  # more than stock's
GOAL_RUNNING = 16  # steps with up to this many running turns have a goal
Costs = Mapping[str, Sequence[StepCost]]  # by contender


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the repeats, and their range."""

    middle: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.least:.3f} to {self.greatest:.3f})"


def contenders(running: int, waiting: int, pinned: int, rounds: int) -> dict[str, Bench]:
    """By their names in the table; the others are compared with the first."""
    cases = {"stock": (STOCK, 0), "stock again": (STOCK, 0), "continuum": ("continuum", 0)}
    if pinned:
        cases[f"continuum, {pinned} pins"] = (ON_DEMAND, pinned)
    return {name: Bench(policy, running, waiting, pins, rounds) for name, (policy, pins) in cases.items()}


def measured(benches: Mapping[str, Bench], rounds: int, repeats: int) -> Iterator[Costs]:
    """Every contender's steps of each repeat. The first contender changes from step to step."""
    with timed_schedulers(*benches.values()) as found, no_collections():
        for _ in range(WARM_UP_ROUNDS):
            for timed in found:
                timed.step()
        for _ in range(repeats):
            yield in_turns({name: timed.step for name, timed in zip(benches, found, strict=True)}, rounds)


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Each call's answers in this many rounds. The first call changes from round to round."""
    names = list(calls)
    answers: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(rounds):
        for at in (*range(number % len(names), len(names)), *range(number % len(names))):
            answers[names[at]].append(calls[names[at]]())
    return answers


def middle_us(costs: Sequence[StepCost], part: str) -> float:
    return median(getattr(cost, part) for cost in costs)


def ratio(repeats: Sequence[Costs], name: str, part: str) -> Spread:
    """The contender's part of a step over stock's."""
    return Spread.of(
        [middle_us(costs[name], part) / middle_us(next(iter(costs.values())), part) for costs in repeats]
    )


def more_ms(repeats: Sequence[Costs], name: str, part: str) -> Spread:
    """The contender's part of a step less stock's."""
    stocks = (next(iter(costs.values())) for costs in repeats)
    return Spread.of(
        [
            (middle_us(costs[name], part) - middle_us(stock, part)) / 1e3
            for costs, stock in zip(repeats, stocks, strict=True)
        ]
    )


def turn_costs_ms(rounds: int, repeats: int) -> Iterator[dict[str, float]]:
    """Of each repeat, the median of a finished turn's CPU time by contender."""
    cases = {
        "stock": (STOCK, True, 0),
        "stock again": (STOCK, True, 0),
        "continuum, tool named": ("continuum", True, 0),
        "continuum, tool read off the text": ("continuum", False, 0),
        f"the same, {WINDOW:,} gaps known": ("continuum", False, WINDOW),
    }
    with shared_clock() as (clock, until), no_collections():
        found = {
            name: TimedTurns(policy, named, clock, until, n) for name, (policy, named, n) in cases.items()
        }
        for timed in found.values():
            for _ in range(WARM_UP_ROUNDS):
                timed.turn()
        for _ in range(repeats):
            costs_us = in_turns({name: timed.turn for name, timed in found.items()}, rounds)
            yield {name: median(us) / 1e3 for name, us in costs_us.items()}


def step_table(running: int, waiting: int, found: Sequence[Costs]) -> Table:
    table = Table("contender", title=f"A decode step: {running} running, {waiting} waiting; CPU ms")
    for part in ("whole", "schedule()", "update", "stats"):
        table.add_column(part, justify="right")
    table.add_column("whole, more than stock")
    table.add_column("schedule() / stock's")
    for name in found[0]:
        middles = (median(middle_us(costs[name], part) for costs in found) / 1e3 for part in PARTS)
        compared = (str(more_ms(found, name, "whole_us")), str(ratio(found, name, "schedule_us")))
        table.add_row(name, *(f"{ms:.3f}" for ms in middles), *compared)
    return table


def turn_more_ms(found: Sequence[Mapping[str, float]], name: str) -> Spread:
    """The contender's finished turn less stock's."""
    return Spread.of([costs[name] - costs["stock"] for costs in found])


def turn_table(found: Sequence[Mapping[str, float]]) -> Table:
    table = Table("contender", title="A finished turn, from its arrival to the idle engine; CPU ms")
    table.add_column("whole", justify="right")
    table.add_column("more than stock")
    for name in found[0]:
        middle_ms = median(costs[name] for costs in found)
        table.add_row(name, f"{middle_ms:.3f}", str(turn_more_ms(found, name)))
    return table


def verdict(what: str, more: Spread, goal_ms: float) -> str:
    """The extra cost beside its goal, in a line."""
    found = "met" if more.middle <= goal_ms else "MISSED"
    return f"{what}: {more} ms more than stock's, goal {goal_ms:g}: {found}"


def main(
    running: Annotated[int | None, typer.Option(help="turns that decode; default: a row of sizes")] = None,
    waiting: Annotated[int, typer.Option(help="turns that wait, with --running")] = 0,
    pinned: Annotated[int, typer.Option(help="programs that hold a pin, with --running")] = 0,
    rounds: Annotated[int, typer.Option(help="steps that a median is taken over")] = 60,
    repeats: Annotated[int, typer.Option(help="medians that the range is taken over")] = 7,
) -> None:
    """Print the tables, then each figure that has a goal beside it."""
    console, verdicts = Console(width=140), []
    for size in SIZES if running is None else ((running, waiting, pinned),):
        steps = list(measured(contenders(*size, (rounds + WARM_UP_ROUNDS) * repeats), rounds, repeats))
        console.print(step_table(*size[:2], steps))
        if size[0] <= GOAL_RUNNING:
            what = f"a decode step, {size[0]} running, {size[1]} waiting"
            verdicts.append(verdict(what, more_ms(steps, "continuum", "whole_us"), STEP_GOAL_MS))
    turns = list(turn_costs_ms(rounds, repeats))
    console.print(turn_table(turns))
    for name in turns[0]:
        if not name.startswith("stock"):
            verdicts.append(verdict(f"a finished turn, {name}", turn_more_ms(turns, name), TURN_GOAL_MS))
    console.print("\n".join(verdicts), highlight=False)


if __name__ == "__main__":
    typer.run(main)
