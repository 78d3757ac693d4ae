"""Would continuum help with these programs? The simulator's answer for a user's own trace, model and card.

    python -m experiments.estimate my.jsonl --model Qwen3-8B --gpu h100 --dram-gb 200

experiments/workload.py has the trace's format. Costs are the card's by its data sheet, so the ratios are
worth more than the seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.console.doctor import DoctorQuery, planned
from continuum_lmcache.console.machine_specs import machine
from continuum_lmcache.errors import ConfigError, ContinuumError, TraceError
from experiments.selection import Selection
from experiments.sim.datasheets import sections
from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sim.serving import STOCK, Setup
from experiments.sim.step_time import Machine
from experiments.tables import markdown
from experiments.workload import Program

GAIN, TIE = 1.1, 1.03  # ratios of mean job times; on a real server a row run again differs by more than a tie
MOST_PROGRAMS = 40  # the first to arrive: enough to fill a card, and some minutes of a core


def machine_of(model: str, gpu: str) -> tuple[Machine, int]:
    """The model on one card, by the doctor's arithmetic, and the model's window. Raises ConfigError."""
    on = machine(None, gpu)
    (plan, _), card = planned(DoctorQuery(model, gpu=gpu), on), on.card
    if card is None or plan.costs is None or not plan.budget.blocks:
        raise ConfigError(f"--gpu is {gpu!r}: give a card whose memory holds {model or 'the --model'}")
    read_bytes = min(plan.shape.weight_bytes, 2 * plan.shape.active_parameters)  # of bf16
    profile = sections(card, plan.costs, read_bytes, plan.budget.tokens)
    return Machine.from_profile(profile, gpu), plan.shape.window_tokens


def programs_of(trace: Path, most_tokens: int) -> tuple[Program, ...]:
    """The first programs of the trace that the server can hold. Raises TraceError."""
    every = Selection(1, trace).programs(lambda note: print(note, file=sys.stderr))
    fitting = [program for program in every if program.context_tokens <= most_tokens]
    if not fitting:
        raise TraceError(f"{trace}: no program has a context of at most {most_tokens:,} tokens")
    if len(fitting) < len(every):
        print(
            f"{len(every) - len(fitting)} programs need more than {most_tokens:,}: left out", file=sys.stderr
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


def main(
    trace: Annotated[Path, typer.Argument(help="JSON lines (experiments/workload.py)")],
    model: Annotated[str, typer.Option(help="a config.json, a folder with one, or a known name")],
    gpu: Annotated[str, typer.Option(help="a card: h100, a100-80gb, ...")],
    dram_gb: Annotated[float, typer.Option(min=0, help="LMCache's, 0 for none")] = 0.0,
) -> None:
    """Simulate the trace under stock vLLM and under continuum."""
    try:
        machine, window_tokens = machine_of(model, gpu)
        programs = programs_of(trace, min(window_tokens, machine.kv_tokens - Setup().block_tokens))
        found = results(programs, machine, dram_gb)
    except ContinuumError as error:
        raise SystemExit(f"estimate: {error}") from error
    rows = [["", "mean job time, s", "first token, P95, s", "longest, s"]]
    for name, one in found.items():
        times_s = (one.mean_job_s, one.ttft_percentile_s(95), max(turn.ttft_s for turn in one.turns))
        rows.append([name, *(f"{time_s:.3g}" for time_s in times_s)])
    *stock_s, ours_s = (one.mean_job_s for one in found.values())
    print(f"{answer(stock_s[-1], ours_s)} (simulated, {len(programs)} programs, {gpu} by its data sheet)\n")
    print(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
