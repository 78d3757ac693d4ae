"""Writes one page with every named figure of the sweep's rows, and where continuum loses.

    python -m experiments.offload_sweep all --out results
    python -m experiments.gallery --results results --out docs

Writes OUT/figures.md, and PNG, SVG and the rows as CSV into OUT/figures/. The page begins with
OUT/figures-words.md, which is written by hand; all else is from the rows, and a figure that lacks one is
left out by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.offload_sweep import seeds_of
from experiments.sweep.cases import Case, Point, SweepError
from experiments.sweep.conditions import when
from experiments.sweep.drawing import draw
from experiments.sweep.grids import Size
from experiments.sweep.plans import PLANS, Plan
from experiments.sweep.readout import BySeed, Found, caption, figures_by_case, found, holds, panels, ratios
from experiments.sweep.rows import Rows, code
from experiments.tables import markdown, spread, write_lines

OURS = "continuum"
LEAST_LOSS = 1.01  # below one percent it may be noise
P95_S = 600.0  # for a machine's capacity


def section(name: str, plan: Plan, pairs: Found) -> str:
    """One figure: its command, its conditions, the picture, the path of its table."""
    parts = [f"## {name}: {plan.title}", f"    python -m experiments.offload_sweep {name}", caption(pairs)]
    parts += [f"![{name}](figures/{name}.png)", f"Its rows: [figures/{name}.csv](figures/{name}.csv)."]
    if name == "whatif":
        parts.append(markdown(holds(plan, pairs, P95_S)))
    return "\n\n".join(parts)


def losses(name: str, plan: Plan, pairs: Found) -> list[list[str]]:
    """A line per panel and contender that continuum is slower than, by the median over paired seeds."""
    lines = []
    for panel, labels in panels(plan, pairs, plan.shows[0]).items():
        mine = {label: by_seed for label, by_seed in labels.items() if label.startswith(OURS)}
        for label, by_seed in mine.items():
            for other, theirs in rivals(label, labels).items():
                times = ratios(by_seed, theirs)
                if times and median(times) >= LEAST_LOSS:
                    slower = f"{sum(t > 1 for t in times)} of {len(times)}"
                    lines.append([name, panel, label, other, spread(times), slower])
    return lines


def rivals(label: str, labels: dict[str, BySeed]) -> dict[str, BySeed]:
    """Those with the same tiers as `label`."""
    tiers = label.partition("+")[2]
    return {
        other: by_seed
        for other, by_seed in labels.items()
        if not other.startswith(OURS) and other.partition("+")[2] == tiers
    }


def page(words: str, plans: dict[str, Found], unfinished: Sequence[str]) -> str:
    """The whole page."""
    head = ["", "", "", "faster", "how many times as fast", "seeds"]
    lost = [
        line
        for name, pairs in plans.items()
        if is_simulated(pairs)
        for line in losses(name, PLANS[name], pairs)
    ]
    parts = [words.strip(), "## Where continuum is slower by 1 % or more, simulated", markdown([head, *lost])]
    parts += [section(name, PLANS[name], pairs) for name, pairs in plans.items()]
    if unfinished:
        parts.append(f"Not run at this size: {', '.join(unfinished)}.")
    return "\n\n".join([*parts, f"Made from rows of code {code('point')}, {when()}.\n"])


def is_simulated(pairs: Found) -> bool:
    """Whether the figure is about job times."""
    return all(isinstance(case, Point) for case, _ in pairs)


def main(
    results: Annotated[Path, typer.Option(help="The sweep's --out.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Where figures.md goes.")] = Path("experiments/records"),
    seeds: Annotated[str, typer.Option(help="As in the sweep.")] = "1..5",
    full: Annotated[bool, typer.Option("--full", help="Of the sweep's --full.")] = False,
) -> None:
    """Write the page and its figures."""
    size = Size.FULL if full else Size.DEFAULT
    folder = out / "figures"
    try:
        rows, chosen = Rows(results / "offload_sweep.csv"), seeds_of(seeds)
        words = (out / "figures-words.md").read_text()
    except (SweepError, OSError) as error:
        raise SystemExit(f"gallery: {error}") from error
    finished: dict[str, Found] = {}
    for name, plan in PLANS.items():
        cases: list[Case] = plan.cases(size, chosen)
        if not rows.missing(cases):
            finished[name] = found(rows, cases)
            draw(plan, finished[name], folder / name)
            write_lines(figures_by_case(plan, finished[name]), folder / f"{name}.csv")
    (out / "figures.md").write_text(page(words, finished, [name for name in PLANS if name not in finished]))
    print(f"wrote {out / 'figures.md'}: {', '.join(finished) or 'nothing'}")


if __name__ == "__main__":
    typer.run(main)
