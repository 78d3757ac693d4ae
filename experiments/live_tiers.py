"""Checks that the same tool gets a longer TTL where a reload costs more: three servers, one tool.

    python -m experiments.live_tiers --programs 30 --jps 0.2 --out live-tiers

The same programs at the same times against real servers with `--scheduling-policy continuum` and real
LMCache, one after the other: DRAM that holds every context; DRAM a fifth of the contexts that are
alive at a time; and that DRAM with a disk below it. Everything else is equal, so a TTL differs by
PrefillReload and by what follows from it (T, the queueing of programs that lost their KV). Read back from
the servers' own recordings, decision by decision: turn k of program p against the same turn elsewhere.
A server whose recording is in OUT already is not run again.

Arrivals are below saturation, since above it T, which is the same formula's other term, hides the
reload: a queue of 20 s makes every TTL long.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import typer
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.errors import ContinuumError
from continuum_lmcache.recordings.reader import Recording, load
from experiments.client import ServerUnusable
from experiments.replay import Job, replay
from experiments.selection import Selection
from experiments.server import ServerError, serve
from experiments.sweep.cases import Live
from experiments.sweep.live import MACHINES, ROOT, arguments
from experiments.tables import markdown
from experiments.tiny_model import make_model

BLOCKS, WINDOW_TOKENS = 40, 4096  # 5,120 tokens of GPU KV: two or three contexts
MACHINE = replace(MACHINES["cpu-tiny"], gpu_blocks=BLOCKS, window_tokens=WINDOW_TOKENS)
SMALLER = 5  # times, than the working set
DISK_TIMES = 4  # the working set
Decisions = dict[tuple[str, int], Mapping[str, Any]]  # by program and turn


@dataclass(frozen=True, slots=True)
class Tiers:
    """One server's memory below the GPU."""

    name: str
    dram_gb: float
    ssd_gb: float = 0.0


def settings(working_set_gb: float) -> tuple[Tiers, ...]:
    """The three servers, from the cheapest reload to the most expensive."""
    small_gb = working_set_gb / SMALLER
    return (
        Tiers("DRAM holds all", DISK_TIMES * working_set_gb),
        Tiers("DRAM 5x too small, disk", small_gb, DISK_TIMES * working_set_gb),
        Tiers("DRAM 5x too small", small_gb),
    )


def working_set_gb(selection: Selection, time_scale: float) -> float:
    """The mean sum of final contexts of the programs that are alive at a time, without queueing."""
    programs = selection.programs(lambda _: None)
    span_s = programs[-1].arrival_s or 1.0
    alive_s = [sum(t.gap_s or 0.0 for t in p.turns) * time_scale + SERVICE_S for p in programs]
    tokens = sum(p.context_tokens * s for p, s in zip(programs, alive_s, strict=True)) / span_s
    return tokens * MACHINE.kv_bytes_per_token / 1e9


SERVICE_S = 3.0  # what a program computes alone on one core, seen in replays


def measure(tiers: Tiers, selection: Selection, out: Path) -> Recording:
    """Serve, replay, stop; what the server recorded. Raises ServerError, ServerUnusable."""
    folder = out / tiers.name.replace(" ", "-").replace(",", "")
    if (folder / "scheduler_timestamps").exists():
        return load(folder)
    folder.mkdir(parents=True, exist_ok=True)
    case = Live("continuum", selection.count or 0, selection.jps or 0.0, selection.seed)
    case = replace(case, dram_gb=tiers.dram_gb, ssd_gb=tiers.ssd_gb)
    args, env = arguments(case, MACHINE, "continuum", folder)
    env["RUN_OUTPUT_DIR"] = str(folder.resolve())
    model = make_model(ROOT / ".work" / "tiny-model")
    with serve(model, args, log=folder / "server.log", env=env) as url:
        replay(Job(f"{url}/v1", "continuum", selection, folder))
    return load(folder)


def decisions(run: Recording) -> Decisions:
    """The decision at the end of each turn, after the cold start."""
    return {
        (program.id, number): turn.retention
        for program in run.programs
        for number, turn in enumerate(program.turns, 1)
        if turn.retention is not None and turn.retention["level"] != "cold"
    }


HEADS = ("", "TTL, mean, s", "TTL, s", "pinned", "PrefillReload, s", "T x eta, s", "longer than above", "p")


def comparison(found: Mapping[str, Decisions]) -> list[list[str]]:
    """A header, then a row per server: medians with P10..P90 over the turns decided on all of them."""
    common = sorted(set.intersection(*(set(made) for made in found.values())))
    if not common:
        raise ContinuumError("no turn was decided on all servers after the cold start; give more programs")
    rows = [list(HEADS)]
    above: list[float] = []
    for name, made in found.items():
        ttl_s, reload_s, benefit_s = (column(made, common, f) for f in ("ttl_s", "reload_s", "benefit_s"))
        queueing_s = [b - r for b, r in zip(benefit_s, reload_s, strict=True)]
        pinned = sum(t > 0 for t in ttl_s) / len(ttl_s)
        cells = (ranged(ttl_s), f"{pinned:.2f}", ranged(reload_s), ranged(queueing_s))
        rows.append([f"{name} (n = {len(common)})", f"{mean(ttl_s):.3f}", *cells, *against(above, ttl_s)])
        above = ttl_s
    return rows


def ranged(values: Sequence[float]) -> str:
    low, middle, high = np.percentile(values, (10, 50, 90))
    return f"{middle:.3f} ({low:.3f}..{high:.3f})"


def column(made: Decisions, turns: Sequence[tuple[str, int]], fact: str) -> list[float]:
    return [float(made[turn][fact]) for turn in turns]


def against(above: Sequence[float], ttl_s: Sequence[float]) -> tuple[str, str]:
    """The shares of turns with a longer and a shorter TTL than there, and Wilcoxon's one-sided p."""
    pairs = list(zip(above, ttl_s, strict=False))  # the first row has none above
    if all(a == b for a, b in pairs):
        return "", ""
    longer, shorter = (sum(sign * (b - a) > 0 for a, b in pairs) / len(pairs) for sign in (1, -1))
    p = stats.wilcoxon(ttl_s, above, alternative="greater").pvalue
    return f"{longer:.2f} (shorter {shorter:.2f})", f"{p:.1e}"


def draw(found: Mapping[str, Decisions], path: Path) -> None:
    """The TTLs' cumulative distributions, a line style per server."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, made), style in zip(found.items(), ("-", "--", ":"), strict=True):
        ttl_s = np.sort([d["ttl_s"] for d in made.values()])
        axes.step(ttl_s, np.arange(1, len(ttl_s) + 1) / len(ttl_s), style, color="black", label=name)
    axes.set(xlabel="TTL, s", ylabel="share of decisions")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    programs: Annotated[int, typer.Option(min=10, help="at least 20, to leave the cold start behind")] = 30,
    jps: Annotated[float, typer.Option(min=1e-6, help="Poisson arrivals a second")] = 0.2,
    time_scale: Annotated[float, typer.Option(min=0, help="of Table 1's tool times")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="of programs, arrivals and tokens")] = 1,
    out: Annotated[Path, typer.Option(help="recordings, logs, table and figure")] = Path("live-tiers"),
) -> None:
    """Run the three servers, then compare their TTLs."""
    chosen = Selection(seed, count=programs, jps=jps, max_context_tokens=WINDOW_TOKENS, time_scale=time_scale)
    size_gb = working_set_gb(chosen, time_scale)
    print(f"contexts alive at a time: {size_gb * 1e3:.0f} MB; GPU KV {MACHINE.kv_gb * 1e3:.0f} MB")
    try:
        found = {t.name: decisions(measure(t, chosen, out)) for t in settings(size_gb)}
        rows = comparison(found)
    except (ServerError, ServerUnusable, ContinuumError) as error:
        raise SystemExit(f"live_tiers: {error}") from error
    print(markdown(rows))
    (out / "ttl.md").write_text(markdown(rows) + "\n")
    draw(found, out / "ttl.png")
    print(f"wrote ttl.md and ttl.png into {out}/")


if __name__ == "__main__":
    typer.run(main)
