"""The demo's output: one table, one figure, and whether memory was short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from experiments import tables
from experiments.demo_scenario import ARRIVALS, Measured, Proportion, Scenario, pressure
from experiments.demo_servers import FCFS, ROOT, records_of
from experiments.figures import draw
from experiments.server import fast_dtype
from experiments.sweep.conditions import machine, versions, when
from experiments.tables import (
    Rows,
    Summary,
    between,
    caption,
    comparison,
    load,
    markdown,
    plain,
    ratios,
    shown,
    write_csv,
)

Runs = dict[str, list[Summary]]  # one each, by contender
README_MARKS = ("<!-- demo figures: make demo README=1 -->", "<!-- /demo figures -->")
ROWS: Rows = {  # of the table
    name: read
    for name, read in tables.ROWS.items()
    if name.startswith(("job time", "first token", "prompt tokens", "pins"))
}
CUT = "programs cut off by the time limit"
IN_README = ("job time mean, s", "first token of a later turn, longest, s", CUT)  # rows beside the sentence
CUT_NOTE = "A program that was cut off counts with its time so far, which favours the slower."
MOST_PROBE_RATIO = 1.15  # of the slowest to the fastest: a free machine's differ by a few hundredths
MOST_OTHER_SHARE = 0.1  # of the cores
HELD = f"The pressure held, by what {FCFS.name} met:"


def scenario_words(found: Measured, scenario: Scenario) -> str:
    """The measured speed, and the scenario that follows from it."""
    return (
        f"This machine: a server starts in {found.start_s:.0f} s, a turn alone takes {found.turn_s:.2f} s, "
        f"{scenario.capacity_jps:.2f} programs a second can be finished. So {scenario.programs} programs "
        f"come, {scenario.jps:.2f} a second, none longer than {scenario.window_tokens:,} tokens. The GPU's "
        f"KV cache holds {scenario.gpu_tokens:,} tokens, DRAM {scenario.dram_tokens:,} beside its room for "
        "loads, the disk all of them"
    )


def write(paths: Mapping[str, Path], out: Path, console: Console, instead: str = "") -> str:
    """Table, CSV and figure of the summaries at `paths` into `out`; the page, without its figure.

    `instead`: what to say in place of a result.
    """
    runs = {name: next(iter(load([path]).values())) for name, path in paths.items()}
    is_cut = any(summary["cut_s"] for found in runs.values() for summary in found)
    conclusion = f"{CUT_NOTE}\n\n" * is_cut + verdict(proportions(paths[FCFS.name], runs))
    cut = {CUT: lambda summary: float(len(summary["cut_s"]))}
    rows = comparison(runs, ROWS | (cut if is_cut else {}))
    said = instead or gains(runs)
    console.print(said, style="bold", soft_wrap=True)
    console.print(plain(rows, caption(runs)))
    console.print(conclusion.replace("**", ""), soft_wrap=True)
    page = (
        f"{said}\n\n{sent(runs)}\n\n{machine()}; {versions()}; {fast_dtype()}; {when()}\n\n"
        f"{markdown(rows)}\n\n{conclusion}\n"
    )
    (out / "comparison.md").write_text(f"{page}\n![figure](comparison.png)\n")
    write_csv(runs, out / "comparison.csv", ROWS)
    draw(runs, out / "comparison")
    return page


def busy(probes_s: Sequence[float], others: Sequence[float]) -> str:
    """In place of a result: that the servers did not have the same machine; "" if they had.

    `probes_s`: of the same computation before, between and after the servers; `others`: of each server, the
    share of the machine's cores that other processes had.
    """
    ratio, share = max(probes_s) / min(probes_s), max(others)
    if ratio <= MOST_PROBE_RATIO and share <= MOST_OTHER_SHARE:
        return ""
    return (
        "No result: the servers did not have this machine alone, or not equally fast. Other work had up to "
        f"{share:.0%} of its cores, and the same computation took up to {ratio:.2f} times as long between "
        "the servers. Run it again when nothing else runs."
    )


def proportions(stock: Path, runs: Runs) -> tuple[Proportion, ...]:
    """How short memory was for the baseline, whose summary is at `stock`."""
    best = max(summary["jobs_per_s"] for (summary,) in runs.values())
    records = records_of(stock.with_suffix(".jsonl"))
    return pressure(runs[FCFS.name][0], [r.t_arrive for r in records if r.turn == 1], best)


def verdict(held: Sequence[Proportion]) -> str:
    """Whether the table shows the expected result."""
    lacks = {p.words: "" if p.holds else f" (**not the {p.least:g} that it takes**)" for p in held}
    lines = [f"- {p.words}: {p.value:.2f}{lacks[p.words]}" for p in held]
    if all(p.holds for p in held):
        head = HELD
    else:
        head = (
            f"**The pressure did not hold**, by what {FCFS.name} met: do not take the table for what the "
            "policy does under pressure. Run it again when nothing else runs:"
        )
    return "\n".join([head, "", *lines])


def gains(runs: Runs) -> str:
    """What the last contender brings over the first, and its price."""
    name = list(runs)[0]
    ours, stock = runs[list(runs)[-1]][0], runs[name][0]

    def of(figure: str) -> list[str]:
        return [shown(value) for one in (ours, stock) if (value := ROWS[figure](one)) is not None]

    ours_s, stock_s = of("job time mean, s")
    wait_s, stock_wait_s = of("first token of a first turn, longest, s")
    (ratio,) = ratios([stock], [ours])
    times, words = shown(ratio), name.replace("fcfs +", "stock vLLM and")
    if stock["cut_s"]:
        gain = (
            f"{ours['finished']} of {ours['programs']} agents finished within {stock['wall_s']:.0f} s, with "
            f"{words} {stock['finished']}: at least {times} times as soon."
        )
    else:
        gain = f"Agents finished {times} times as soon as with {words} ({ours_s} s for {stock_s})."
    return (
        f"{gain} The price: a new agent waited up to {wait_s} s for its first token (up to {stock_wait_s} s "
        f"with {words})."
    )


def sent(runs: Runs) -> str:
    """What the servers were sent, for a reader who does not know the demo."""
    one = runs[FCFS.name][0]
    return (
        f"{one['programs']} agent runs ({one['workload']}), {ARRIVALS:g} times as many a second as this "
        "machine finishes; tool times are shortened to fit"
    )


def publish(page: str, out: Path) -> None:
    """The page's chief rows into README.md between its marks, and everything into the records."""
    folder = ROOT / "experiments" / "records" / "demo"
    for kind in ("md", "csv", "png"):
        name = f"comparison.{kind}"
        (folder / name).write_bytes((out / name).read_bytes())
    readme = ROOT / "README.md"
    readme.write_text(between(readme.read_text(), README_MARKS, excerpt(page)))


def excerpt(page: str) -> str:
    """The rows of IN_README, then the conditions in one paragraph; a missing pressure is mentioned too."""
    before, held, _ = page.partition(HELD)
    lines = before.rstrip().splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    head, body = lines[rows[0] : rows[0] + 2], [lines[number] for number in rows[2:]]
    kept = [*head, *(row for row in body if row.split("|")[1].strip() in IN_README)]
    said, *about = (line for line in lines[: rows[0]] if line)
    conditions = " ".join(f"{line.partition('; Python')[0]}." for line in about)
    after = "\n".join(lines[rows[-1] + 1 :]).strip()
    if held:
        cut_note = f"{CUT_NOTE} " * (CUT_NOTE in after)
        words = (
            f"{conditions} {cut_note}The pressure held. [All rows](experiments/records/demo/comparison.md)."
        )
    else:
        words = f"{conditions}\n\n{after}"
    return "\n".join([f"**{said}**", "", *kept, "", words]) + "\n"
