"""The figures of a recorded run, and the same in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from email.utils import formatdate
from statistics import fmean, quantiles
from typing import Any

from continuum_lmcache.recordings.reader import SOURCES, Recording
from continuum_lmcache.telemetry.findings import counted

RANKS = {"median": 50, "p95": 95, "p99": 99}


def figures(run: Recording) -> dict[str, Any]:
    """All figures, units in the names; None where the run has no case."""
    turns, pins = run.turns, [pin for program in run.programs for pin in program.pins]
    complete = [program for program in run.programs if program.complete]
    outcomes = Counter(pin.outcome for pin in pins)
    return {
        **run.about,
        "start": formatdate(run.start_s, usegmt=True),
        "end": formatdate(run.end_s, usegmt=True),
        "seconds": run.end_s - run.start_s,
        "programs": len(run.programs),
        "programs_complete": len(complete),
        "turns": len(turns),
        "job_time_s": spread([program.job_time_s for program in complete]),
        "first_token_s": {name: spread(waits) for name, waits in first_tokens_s(run).items()},
        "queue_wait_s": spread([t.started_s - t.arrival_s for t in turns if t.started_s is not None]),
        "prompt_tokens": {
            place: sum(turn.sources.get(place, 0) for turn in turns) for place in (*SOURCES, "computed")
        },
        "lost_tokens": run.lost,
        "preemptions": sum(turn.preemptions for turn in turns),
        "pins": {"taken": len(pins), "reused": outcomes["reused"]},
        "pins_by_outcome": dict(outcomes.most_common()),
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and tail (interpolated linearly): a policy with a better mean may have a worse tail."""
    if not values:
        return dict.fromkeys(("mean", *RANKS, "max"))
    cuts = quantiles([*values, *values[:1]] if len(values) == 1 else values, n=100, method="inclusive")
    ranks = {name: cuts[rank - 1] for name, rank in RANKS.items()}
    return {"mean": fmean(values), **ranks, "max": max(values)}


def first_tokens_s(run: Recording) -> dict[str, list[float]]:
    """Seconds from a turn's arrival to its first token, of programs' first and later turns."""
    firsts = {id(program.turns[0]) for program in run.programs if not program.is_cut}
    waits: dict[str, list[float]] = {"first turns": [], "later turns": []}
    for turn in run.turns:
        if turn.first_token_s is not None:
            waits["first turns" if id(turn) in firsts else "later turns"].append(turn.first_token_s)
    return waits


def summary(run: Recording) -> str:
    """What ran, how long it took, where prompts came from, and what pins brought."""
    found = figures(run)
    about = [f"policy {run.about['policy'] or 'not recorded'}", run.about["machine"], run.about["versions"]]
    parts = [
        f"{counted(found['programs'], 'program')} with {counted(found['turns'], 'turn')} ran on "
        f"{run.about['model'] or 'a model that is not recorded'} ({', '.join(filter(None, about))}) from "
        f"{found['start']}, for {found['seconds']:,.0f} s."
    ]
    if unfinished := found["programs"] - found["programs_complete"]:
        parts.append(
            f"{unfinished:,} of them did not end in it, or events are missing: they have no job time."
        )
    if found["programs_complete"]:
        parts.append(
            "A program took {mean:.3g} s on average, {max:.3g} s at most.".format(**found["job_time_s"])
        )
    for name, waits in found["first_token_s"].items():
        if waits["mean"] is not None:
            tail = "{median:.3g} s in the median, {p95:.3g} s for the slowest twentieth".format(**waits)
            parts.append(f"First tokens of {name} came after {tail}.")
    if total := sum(found["prompt_tokens"].values()):
        shares = [f"{tokens / total:.0%} {where}" for where, tokens in found["prompt_tokens"].items()]
        parts.append(f"Prompt tokens by the source of their KV: {', '.join(shares)}.")
    parts.append("Pins: {taken:,} taken, {reused:,} reused.".format(**found["pins"]))
    if run.dropped:
        parts.append(f"The recorder's bound left out the oldest {run.dropped:,} events.")
    return " ".join(parts)
