"""Makes tables of rows: medians and ranges over seeds, ratios seed by seed, and a machine's capacity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments.sweep.cases import Case, Live, Point, inputs
from experiments.sweep.plans import WORDS, Plan
from experiments.sweep.rows import Row, Rows
from experiments.tables import spread

BySeed = dict[int, float]
Panels = dict[str, dict[str, BySeed]]  # panel -> label -> seed -> figure
Found = list[tuple[Case, Row]]


def found(rows: Rows, cases: Iterable[Case]) -> Found:
    """The cases that have a row, with their rows."""
    return [(case, row) for case in dict.fromkeys(cases) for row in rows.of([case])]


def panels(plan: Plan, pairs: Found, figure: str) -> Panels:
    """One figure of the rows, as the plan divides them."""
    laid: Panels = {}
    for case, row in pairs:
        by_seed = laid.setdefault(plan.panel(case), {}).setdefault(plan.label(case), {})
        by_seed[case.seed] = float(row[figure])
    return laid


def ratios(baseline: BySeed, other: BySeed) -> list[float]:
    """Baseline over other, for each seed that both ran: how many times as fast the other is."""
    return [baseline[seed] / other[seed] for seed in sorted(baseline.keys() & other.keys())]


def table(plan: Plan, pairs: Found) -> list[list[str]]:
    """A header, then a line per panel and label: the median with its range, and the ratio's."""
    lines = [["", "", *(WORDS[f] for f in plan.shows), f"{plan.baseline} / this"]]
    laid = {figure: panels(plan, pairs, figure) for figure in plan.shows}
    first = plan.shows[0]
    for panel, labels in laid[first].items():
        for label, by_seed in labels.items():
            cells = [spread(list(laid[figure][panel][label].values())) for figure in plan.shows]
            ratio = spread(ratios(labels.get(plan.baseline, {}), by_seed))
            lines.append([panel, label, *cells, ratio])
    return lines


def figures_by_case(plan: Plan, pairs: Found) -> list[list[str]]:
    """Every case, a line each, with the plan's figures and its row's source, for a CSV."""
    known = ("code", "commit", "measured_on", "ended", "probe_s")
    columns = [name for name in known if name in pairs[0][1]]
    lines = [["setting", "contender", "seed", *plan.shows, *columns]]
    for case, row in pairs:
        figures = [f"{float(row[figure]):.4g}" for figure in plan.shows]
        lines.append(
            [plan.panel(case), plan.label(case), f"{case.seed}", *figures, *(row[n] for n in columns)]
        )
    return lines


def caption(pairs: Found) -> str:
    """The conditions: sizes, rates, seeds, machine, and whether its numbers were measured."""
    cases, counts = [case for case, _ in pairs], sorted({int(row["jobs"]) for _, row in pairs})
    jobs = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    loaded = [case for case in cases if isinstance(case, Point) and case.load]
    timed = [case for case in cases if case not in loaded]
    arrivals = [f"{_values(timed, 'jps')} a second"] if timed else []
    arrivals += [f"load {_values(loaded, 'load')}"] if loaded else []
    words = (
        f"{_values(cases, 'workload')}, n = {jobs} programs, {' and '.join(arrivals)}, "
        f"seeds {_values(cases, 'seed')}"
    )
    if any(isinstance(case, Live) for case in cases):
        return f"real servers: {words}{_speed(pairs)}"
    measured = {row["measured"] for _, row in pairs} == {"True"}
    merged = {case.merge_steps for case in cases if isinstance(case, Point)} != {1}
    return (
        f"simulated: {words}\nmachine {_values(cases, 'machine')}, "
        f"{'measured' if measured else 'NOT measured: data sheet and assumed shares'}"
        f"{'; decode steps merged' if merged else ''}"
    )


def _speed(pairs: Found) -> str:
    """How much the machine's speed changed between rows; "" where it was not measured."""
    probes_s = [float(row["probe_s"]) for _, row in pairs if row.get("probe_s")]
    if not probes_s:
        return ""
    return f", the machine's slowest probe took {max(probes_s) / min(probes_s):.2f} times its fastest"


def _values(cases: Sequence[Case], name: str) -> str:
    values = sorted({inputs(case)[name] for case in cases})
    return ", ".join(value if isinstance(value, str) else f"{value:g}" for value in values)
