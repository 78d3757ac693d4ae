"""What does our scheduler cost beside vLLM's own?    python -m experiments.overhead

All contenders live in one process, full, and take turns step by step, so that a machine's moods fall on
all of them alike; Python's collector rests meanwhile. Each repeat gives a ratio of medians for every
contender over stock; the table shows the median of these ratios, and the least and the greatest. Stock
stands there twice: how far its second copy is from 1 is what a ratio can be wrong by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments.sweep.cases import ON_DEMAND, STOCK, Bench
from experiments.sweep.timed import WARM_UP_ROUNDS, StepCost, no_collections, rigs

PARTS = ("whole_us", "schedule_us", "update_us", "stats_us")
Costs = Mapping[str, Sequence[StepCost]]  # by contender


@dataclass(frozen=True, slots=True)
class Ratio:
    """A contender's step over stock's: the median of the repeats, and their range."""

    middle: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.least:.3f} to {self.greatest:.3f})"


def contenders(running: int, waiting: int, pinned: int, rounds: int) -> dict[str, Bench]:
    """By their names in the table; the first is what the others are compared with."""
    cases = {
        "stock": (STOCK, 0),
        "stock again": (STOCK, 0),
        "continuum": ("continuum", 0),
        f"continuum, {pinned} pins": (ON_DEMAND, pinned),
        f"without a door, {pinned} pins": ("static-ttl", pinned),
    }
    return {name: Bench(policy, running, waiting, pins, rounds, 1) for name, (policy, pins) in cases.items()}


def measured(benches: Mapping[str, Bench], rounds: int, repeats: int) -> Iterator[Costs]:
    """Of each repeat every contender's steps. Who goes first changes from step to step."""
    names = list(benches)
    with rigs(*benches.values()) as found, no_collections():
        for _ in range(WARM_UP_ROUNDS):
            for rig in found:
                rig.step()
        for _ in range(repeats):
            costs: dict[str, list[StepCost]] = {name: [] for name in names}
            for number in range(rounds):
                for at in (*range(number % len(names), len(names)), *range(number % len(names))):
                    costs[names[at]].append(found[at].step())
            yield costs


def middle_us(costs: Sequence[StepCost], part: str) -> float:
    return median(getattr(cost, part) for cost in costs)


def ratio(repeats: Sequence[Costs], name: str, part: str) -> Ratio:
    """The contender's part of a step over stock's."""
    found = [middle_us(costs[name], part) / middle_us(next(iter(costs.values())), part) for costs in repeats]
    return Ratio(median(found), min(found), max(found))


def main(
    running: Annotated[int, typer.Option(help="turns that decode")] = 256,
    waiting: Annotated[int, typer.Option(help="turns that wait")] = 1000,
    pinned: Annotated[int, typer.Option(help="programs that hold a pin")] = 200,
    rounds: Annotated[int, typer.Option(help="steps that a median is taken over")] = 60,
    repeats: Annotated[int, typer.Option(help="ratios that the range is taken over")] = 7,
) -> None:
    """Print the table."""
    benches = contenders(running, waiting, pinned, (rounds + WARM_UP_ROUNDS) * repeats)
    found = list(measured(benches, rounds, repeats))
    table = Table("contender", title=f"A decode step: {running} running, {waiting} waiting")
    for part in ("whole", "schedule()", "update", "stats"):
        table.add_column(f"{part}, us", justify="right")
    table.add_column("whole / stock's, (range)")
    table.add_column("schedule() / stock's, (range)")
    for name in benches:
        middles = (median(middle_us(costs[name], part) for costs in found) for part in PARTS)
        ratios = (str(ratio(found, name, part)) for part in PARTS[:2])
        table.add_row(name, *(f"{us:.0f}" for us in middles), *ratios)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
