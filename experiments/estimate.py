"""Would continuum help with these programs? The simulator's answer for a user's own trace, model and card.

    python -m experiments.estimate my.jsonl --model Qwen3-8B --gpu h100 --dram-gb 200

experiments/trace.py has the trace's format. Costs are the card's by its data sheet, so the ratios are worth
more than the seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.console.doctor import DoctorQuery, diagnosis
from continuum_lmcache.errors import ConfigError, ContinuumError, TraceError
from experiments.selection import Selection
from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sim.serving import STOCK, Setup
from experiments.sim.step_time import Machine
from experiments.tables import markdown
from experiments.workload import Program
from profiles.datasheets import VALUE_BYTES, sections

GAIN, TIE = 1.1, 1.03  # ratios of mean job times; on a real server a row run again differs by more than a tie
MOST_PROGRAMS = 40  # the first to arrive: enough to fill a card, and some minutes of a core


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to be served, and on what."""

    machine: Machine
    window_tokens: int


def planned(model: str, gpu: str) -> Planned:
    """The model on one card, by the doctor's arithmetic. Raises ConfigError."""
    found = diagnosis(DoctorQuery(model, gpu=gpu))
    plan, card = found.plan, found.machine.card
    if card is None or plan.costs is None or not plan.budget.blocks:
        raise ConfigError(f"--gpu is {gpu!r}: give a card whose memory holds {model or 'the --model'}")
    read_bytes = min(plan.shape.weight_bytes, VALUE_BYTES * plan.shape.active_parameters)
    profile = sections(card, plan.costs, read_bytes, plan.budget.tokens)
    return Planned(Machine.from_profile(profile, gpu), plan.shape.window_tokens)


def programs_of(trace: Path, on: Planned) -> tuple[Program, ...]:
    """The first programs of the trace that the server can hold. Raises TraceError."""
    every = Selection(1, trace).programs(lambda note: print(note, file=sys.stderr))
    most = min(on.window_tokens, on.machine.kv_tokens - Setup().block_tokens)
    fitting = [program for program in every if program.context_tokens <= most]
    if not fitting:
        raise TraceError(f"{trace}: no program has a context of {most:,} tokens or less, as the server needs")
    if len(fitting) < len(every):
        print(
            f"{len(every) - len(fitting)} programs need more than {most:,} tokens: left out", file=sys.stderr
        )
    return tuple(fitting[:MOST_PROGRAMS])


def results(programs: Sequence[Program], machine: Machine, dram_gb: float) -> dict[str, Result]:
    """Stock, stock with the tier, and ours on the same memory."""
    tiers = {"dram_gb": dram_gb} if dram_gb else None
    wanted = {"stock vLLM": (STOCK, None), "stock vLLM with LMCache": (STOCK, tiers)}
    if not dram_gb:
        del wanted["stock vLLM with LMCache"]
    wanted["continuum" + " with LMCache" * bool(dram_gb)] = ("continuum", tiers)
    return {
        name: simulate(programs, Setup(policy=policy, tiers=has, machine=machine, merge_steps=8))
        for name, (policy, has) in wanted.items()
    }


def answer(stock_s: float, ours_s: float) -> str:
    """By the mean job times of stock vLLM, with the tier if there is one, and of ours."""
    ratio = stock_s / ours_s
    words = f"agents finish {ratio:.2f} times as soon as with stock vLLM on the same memory"
    return f"{'yes' if ratio >= GAIN else 'little' if ratio >= TIE else 'no'}: {words}"


def figures(result: Result) -> dict[str, float]:
    """Seconds."""
    first_tokens_s = max(turn.ttft_s for turn in result.turns)
    return {
        "mean job time, s": result.mean_job_s,
        "first token, P95, s": result.ttft_percentile_s(95),
        "longest, s": first_tokens_s,
    }


def main(
    trace: Annotated[Path, typer.Argument(help="JSON lines (experiments/trace.py)")],
    model: Annotated[str, typer.Option(help="a config.json, a folder with one, or a known name")],
    gpu: Annotated[str, typer.Option(help="a card: h100, a100-80gb, ...")],
    dram_gb: Annotated[float, typer.Option(min=0, help="LMCache's, 0 for none")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of text")] = False,
) -> None:
    """Simulate the trace under stock vLLM and under continuum."""
    try:
        on = planned(model, gpu)
        programs = programs_of(trace, on)
        found = results(programs, on.machine, dram_gb)
    except ContinuumError as error:
        raise SystemExit(f"estimate: {error}") from error
    *stock, ours = (result.mean_job_s for result in found.values())
    said, rows = answer(stock[-1], ours), {name: figures(result) for name, result in found.items()}
    if as_json:
        print(json.dumps({"answer": said, "programs": len(programs), "figures": rows}))
        return
    heads: list[list[Any]] = [["", *next(iter(rows.values()))]]
    print(f"{said} (simulated, {len(programs)} programs, {gpu} by its data sheet)\n")
    print(markdown(heads + [[name, *(f"{s:.3g}" for s in row.values())] for name, row in rows.items()]))


if __name__ == "__main__":
    typer.run(main)
