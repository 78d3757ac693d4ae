"""Agents at a limit: N live sessions in the simulator, and batches; their figures and table.

Sessions follow AgentX's rules (experiments/sessions.py): a run counts for `counted_s` from `start_s`, when
each session has had its warm-up turns. Ends are not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from experiments.sessions import figures
from experiments.sweep.cases import GATE, ROUTER_WARM, STOCK, Point, SessionPoint, SweepError
from experiments.sweep.goals import OURS, SEEDS
from experiments.sweep.grids import KV_CONTEXTS, Size, installed, named, own
from experiments.sweep.rows import SESSIONS, Row, Rows
from experiments.sweep.runner import complete
from experiments.tables import publish

Number = TypeVar("Number", int, float)
CONTENDERS = (STOCK, "continuum-published", GATE, OURS)
MORE = (ROUTER_WARM,)  # for --contenders
TRACE = "trace:"
WINDOW_TOKENS = 262_144  # Qwen3-Coder's
SESSIONS_OF = {"none": (17, 22, 28, 34, 45), "dram": (45, 90, 134, 179, 269)}
"""The public figures' 12 to 32 and 32 to 192, times 1.4: so many requests of one session are under way there
at the limit, with those of its subagents. Here each is a session."""
DRAM_KV = 3.9  # their tier, in sizes of the KV cache
SHOWN = {
    "tokens_per_s": ("tok/s", 0),
    "goodput_30": ("in 30 s", 0),
    "ttft_mean_s": ("first token mean, s", 1),
    "ttft_p50_s": ("P50", 1),
    "ttft_p90_s": ("P90", 1),
    "ttft_p99_s": ("P99", 0),
    "ttft_max_s": ("longest", 0),
    "in_time_share": ("turns in 30 s", 2),
    "sessions_in_time_share": ("sessions with 90 % in 30 s", 2),
    "interactivity_p90": ("E2E interactivity P90, tok/s", 2),
    "starved_sessions": ("starved", 1),
    "programs_in_time_share": ("programs in 15 min", 2),
    "tpot_s": ("s a token", 3),
}
SHOWN_OF_BATCHES = {
    "end_s": ("end, s", 0),
    "job_p95_s": ("P95 of job times, s", 0),
    "twice_tokens": ("tokens computed twice", 0),
    "ttft_mean_s": ("first token mean, s", 1),
    "ttft_p90_s": ("P90", 1),
    "ttft_max_s": ("longest", 0),
}


def points(
    size: Size,
    sessions: str = "",
    programs: int = 0,
    trace: str = "claude-code:report",
    tiers: str = "",
    contenders: str = "",
    seeds: Sequence[int] | None = None,
    longest_waits: str = "",
) -> list[SessionPoint]:
    """The runs, from the command line's words; an empty one stands for all. Raises SweepError.

    `programs` above 0 is a batch, on an A100 with KV for KV_CONTEXTS contexts. `longest_waits`: values of
    that setting, in seconds, for `continuum`.
    """
    counts = numbers(sessions, "--sessions", int)
    dial = numbers(longest_waits, "--longest-waits", float)
    base = SessionPoint(STOCK, 0, 0, TRACE + trace, programs=programs)
    if programs:
        base = replace(base, machine="a100", kv_contexts=KV_CONTEXTS, step_tokens=2048, block_tokens=64)
    if size is Size.QUICK:
        base = replace(base, counted_s=240.0)
    found, known = [], (*CONTENDERS, *MORE, *own(contenders.split(",")))
    for tier, seed in product(named(tiers, SESSIONS_OF, "--tiers"), seeds or SEEDS[size]):
        dram_kv = DRAM_KV if tier == "dram" else 0.0
        of_tier = counts or SESSIONS_OF[tier][: 1 if size is Size.QUICK else None]
        for count, name in product(of_tier, named(contenders or ",".join(CONTENDERS), known, "--contenders")):
            case = replace(base, contender=name, sessions=count, seed=seed, dram_kv=dram_kv)
            values = dial if name == OURS and dial else (0.0,)
            found += [replace(case, longest_wait_s=value) for value in values]
    return found


def numbers(text: str, option: str, kind: type[Number]) -> tuple[Number, ...]:
    """The numbers between commas, all above 0. Raises SweepError."""
    try:
        found = tuple(kind(part) for part in text.split(",") if part)
    except ValueError:
        found = (kind(0),)
    if not all(number > 0 for number in found):
        raise SweepError(f"{option} {text!r} is no list of numbers above 0, as 12,24")
    return found


def tabulate(cases: Sequence[SessionPoint], jobs: int, out: Path) -> None:
    """Run the missing cases, then print their table. A contender that is not installed is left out."""
    cases = installed(cases)
    rows = Rows(out / "sessions.csv", SESSIONS)
    complete(rows, cases, jobs)
    lines = table(rows, cases)
    kind = "batch" if cases[0].programs else "sessions"
    seeds = ", ".join(dict.fromkeys(str(case.seed) for case in cases))
    title = f"{cases[0].workload}, {kind} on {cases[0].machine}, seeds {seeds}; simulated"
    publish(lines, title, [], out / f"{kind}-{cases[0].workload.replace(':', '-')}")


def run(point: SessionPoint) -> dict[str, Any]:
    """Simulate the point and return its figures (rows.SESSION_FIGURES)."""
    from experiments.sim.sessions import play, play_batch  # these import vLLM
    from experiments.sim.trace_programs import drawn, half, sessions_of
    from experiments.sweep.simulated import setup_of

    name, _, part = point.workload.removeprefix(TRACE).partition(":")
    engine = Point(
        *(point.contender, 1, 0.0, point.seed, point.workload, point.machine),
        dram_kv=point.dram_kv,
        kv_contexts=point.kv_contexts,
        untold_ends=True,
        step_tokens=point.step_tokens,
        merge_steps=point.merge_steps,
    )
    if point.programs:
        programs = drawn(half(name, part, WINDOW_TOKENS), point.programs, point.seed)
    else:
        programs = sessions_of(name, part, WINDOW_TOKENS)
    setup = replace(setup_of(engine, programs), block_tokens=point.block_tokens)
    if point.longest_wait_s:
        setup = replace(setup, continuum={**setup.continuum, "longest_wait_s": point.longest_wait_s})
    if point.programs:
        ran = play_batch(programs, setup, point.sessions)
    else:
        ran = play(programs, setup, point.sessions, point.seed, point.counted_s, point.warm_up_turns)
    new_tokens = {(p.program_id, n): t.new_tokens for p in programs for n, t in enumerate(p.turns, 1)}
    twice = [
        max(0, turn.computed_tokens - new_tokens[turn.program_id, turn.number])
        for turn in ran.result.turns
        if point.programs
    ]
    return {
        **figures(ran.turns, point.sessions, ran.start_s, ran.end_s),
        "job_p95_s": ran.result.job_percentile_s(95) if ran.result.jobs else None,
        "start_s": ran.start_s,
        "end_s": ran.end_s,
        "twice_tokens": sum(twice) if twice else None,
        "measured": ran.result.measured,
    }


def table(rows: Rows, cases: Sequence[SessionPoint]) -> list[list[str]]:
    """A header, then a line for each tier, number of sessions and contender: means over the seeds."""
    batch = any(case.programs for case in cases)
    shown = SHOWN_OF_BATCHES if batch else SHOWN
    found: dict[tuple[str, str, str], list[Row]] = {}
    for case in cases:
        tier = f"DRAM, {case.dram_kv:g} x KV" if case.dram_kv else "none"
        found.setdefault((tier, str(case.sessions), case.label), []).extend(rows.of([case]))
    head = ["tier", "workers" if batch else "sessions", "contender", *(words for words, _ in shown.values())]
    return [head, *([*key, *cells(of, shown)] for key, of in found.items() if of)]


def cells(rows: Sequence[Row], shown: dict[str, tuple[str, int]]) -> list[str]:
    """Each figure's mean over the rows that have it."""
    found = []
    for name, (_, digits) in shown.items():
        values = [float(row[name]) for row in rows if row[name] != ""]
        found.append(f"{mean(values):.{digits}f}" if values else "-")
    return found
