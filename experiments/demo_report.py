"""The demo's output: one table, one figure, and whether memory was short."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from experiments.demo_scenario import ARRIVALS, Measured, Proportion, Scenario, pressure
from experiments.demo_servers import FCFS, ROOT, records_of
from experiments.figures import draw
from experiments.server import fast_dtype
from experiments.sweep.conditions import machine, versions, when
from experiments.tables import (
    PINS,
    Rows,
    Summary,
    at,
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

Paths = Mapping[str, Sequence[Path]]  # summaries by contender
Runs = dict[str, list[Summary]]
README_MARKS = ("<!-- demo figures: make demo README=1 -->", "<!-- /demo figures -->")
FROM = {
    "gpu": "still on the GPU",
    "dram": "from DRAM",
    "ssd": "from disk",
    "again": "computed again",
    "computed": "new",
}
ROWS: Rows = {
    "job time mean, s": at("job_time_s", "mean"),
    "job time P50, s": at("job_time_s", "p50"),
    "job time P95, s": at("job_time_s", "p95"),
    "first token of a first turn, median, s": at("first_ttft_s", "p50"),
    "first token of a first turn, longest, s": at("first_ttft_s", "max"),
    "first token of a later turn, median, s": at("later_ttft_s", "p50"),
    "first token of a later turn, longest, s": at("later_ttft_s", "max"),
    **{f"prompt tokens {words}": at("tokens_by_source", name) for name, words in FROM.items()},
    **{f"pins {name}": at("pins", name) for name in PINS},
}
CUT = "programs cut off by the time limit"
IN_README = ("job time mean, s", "first token of a later turn, longest, s", CUT)  # rows beside the sentence
CUT_NOTE = "A program that was cut off counts with its time so far, which favours the slower."
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


def write(paths: Paths, out: Path, console: Console) -> str:
    """Table, CSV and figure into `out`; the page, without its figure."""
    runs = {name: next(iter(load(found).values())) for name, found in paths.items()}
    is_cut = any(summary["cut_s"] for found in runs.values() for summary in found)
    conclusion = f"{CUT_NOTE}\n\n" * is_cut + verdict(proportions(paths, runs))
    cut = {CUT: lambda summary: float(len(summary["cut_s"]))}
    rows = comparison(runs, ROWS | (cut if is_cut else {}))
    console.print(gains(runs), style="bold", soft_wrap=True)
    console.print(plain(rows, caption(runs)))
    console.print(conclusion.replace("**", ""), soft_wrap=True)
    page = (
        f"{gains(runs)}\n\n{sent(runs)}\n\n{machine()}; {versions()}; {fast_dtype()}; {when()}\n\n"
        f"{markdown(rows)}\n\n{conclusion}\n"
    )
    (out / "comparison.md").write_text(f"{page}\n![figure](comparison.png)\n")
    write_csv(runs, out / "comparison.csv", ROWS)
    draw(runs, out / "comparison")
    return page


def proportions(paths: Paths, runs: Runs) -> tuple[Proportion, ...]:
    """How short memory was for the baseline; medians over the seeds."""
    by_seed = []
    for number, summary in enumerate(runs[FCFS.name]):
        best = max(found[number]["jobs_per_s"] for found in runs.values())
        records = records_of(paths[FCFS.name][number].with_suffix(".jsonl"))
        by_seed.append(pressure(summary, [r.t_arrive for r in records if r.turn == 1], best))
    return tuple(
        Proportion(one[0].words, statistics.median(p.value for p in one), one[0].least)
        for one in zip(*by_seed, strict=True)
    )


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
    """What the last contender brings over the first, and its price; medians over the seeds."""
    stock, ours = list(runs)[0], list(runs)[-1]

    def of(figure: str) -> list[str]:
        read = ROWS[figure]
        values = ([v for s in runs[who] if (v := read(s)) is not None] for who in (ours, stock))
        return [shown(statistics.median(each)) for each in values]

    ours_s, stock_s = of("job time mean, s")
    wait_s, stock_wait_s = of("first token of a first turn, longest, s")
    times = shown(statistics.median(ratios(runs[stock], runs[ours])))
    words = stock.replace("fcfs +", "stock vLLM and")
    if any(summary["cut_s"] for summary in runs[stock]):
        programs, ended = (sum(summary[key] for summary in runs[ours]) for key in ("programs", "finished"))
        stock_ended = sum(summary["finished"] for summary in runs[stock])
        gain = (
            f"{ended} of {programs} agents finished within {runs[stock][0]['wall_s']:.0f} s, with {words} "
            f"{stock_ended}: at least {times} times as soon."
        )
    else:
        gain = f"Agents finished {times} times as soon as with {words} ({ours_s} s for {stock_s})."
    return (
        f"{gain} The price: a new agent waited up to {wait_s} s for its first token (up to {stock_wait_s} s "
        f"with {words})."
    )


def sent(runs: Runs) -> str:
    """What the servers were sent, for a reader who does not know the demo."""
    every = [summary for found in runs.values() for summary in found]
    runs_of = f"{every[0]['programs']} agent runs ({every[0]['workload']})"
    words = f"{runs_of}, {ARRIVALS:g} times as many a second as this machine"
    repeated = len({summary["seed"] for summary in every})
    return f"{words} finishes; tool times are shortened to fit" + f"; {repeated} draws" * (repeated > 1)


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
