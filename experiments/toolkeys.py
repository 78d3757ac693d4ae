"""How well do tool keys predict the next gap?    python -m experiments.toolkeys

Log-loss of each gap's logarithm, in nats, under the distribution of the other programs' gaps (leave
one program out), for keys of growing detail, by K. The density is a Gaussian kernel estimate in log
gap: gaps span six decades and have two modes, so neither seconds nor one normal would do; a uniform
share keeps the loss of an unseen gap finite. A key falls back to its coarser
levels as `ToolDurations.distribution` does, at K samples or fewer. Lower is better; 0.1 nats less means that
the density at what happened is 10 % higher, in the geometric mean. Figures before a slash are for all gaps,
those after it for shell commands.

Data: the Claude groups of agentcgroup (yunwei37/agentcgroup), whose gaps are tool time.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.tools.durations import suffixes
from continuum_lmcache.tools.shell_key import command_key
from continuum_lmcache.types import ToolKey

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"  # beside the checkout
BANDWIDTH = 0.3  # in ln seconds: gaps within a third of each other count as alike
LOWEST_S, HIGHEST_S = 1e-3, 1e4
UNIFORM_SHARE = 0.02


class Seen(NamedTuple):
    """One tool call of a trace."""

    program: int
    tool: str
    command: str
    log_gap: float


KEYS: dict[str, Callable[[Seen], ToolKey]] = {
    "nothing": lambda _: (),
    "tool": lambda s: (s.tool,),
    "first word": lambda s: (*s.command.split()[:1], s.tool) if s.command else (s.tool,),
    "command": lambda s: command_key(s.command, s.tool) if s.command else (s.tool,),
}


def read(path: Path, group: str) -> list[Seen]:
    """The calls with a known gap; `command` only where it is a shell's."""
    found = []
    for number, line in enumerate(path.read_text().splitlines()):
        program = json.loads(line)
        if group not in program["source"]:
            for turn in program["turns"]:
                if turn["tool"] and turn["gap_s"] is not None:
                    command = turn["command"] if turn["tool"].lower() == "bash" else None
                    log_gap = float(np.log(np.clip(turn["gap_s"], LOWEST_S, HIGHEST_S)))
                    found.append(Seen(number, turn["tool"], command or "", log_gap))
    return found


def log_losses(calls: list[Seen], key_of: Callable[[Seen], ToolKey], samples: int) -> np.ndarray:
    """-ln density of each call's log gap, in nats, shape (calls,)."""
    log_gaps = np.array([c.log_gap for c in calls])
    programs = np.array([c.program for c in calls])
    members: dict[ToolKey, list[int]] = defaultdict(list)
    for i, seen in enumerate(calls):
        for key in suffixes(key_of(seen)):
            members[key].append(i)
    arrays = {key: np.array(rows) for key, rows in members.items()}
    losses = np.empty(len(calls))
    for i, seen in enumerate(calls):
        for key in suffixes(key_of(seen)):
            others = arrays[key][programs[arrays[key]] != seen.program]
            if len(others) > samples or not key:
                break
        losses[i] = -np.log(density(log_gaps[i], log_gaps[others]))
    return losses


def density(at: float, others: np.ndarray) -> float:
    """Kernel density at one log gap, from the others', mixed with a uniform share."""
    kernels = np.exp(-0.5 * ((at - others) / BANDWIDTH) ** 2) / (BANDWIDTH * np.sqrt(2 * np.pi))
    uniform = 1.0 / np.log(HIGHEST_S / LOWEST_S)
    return float((1 - UNIFORM_SHARE) * kernels.mean() + UNIFORM_SHARE * uniform)


def explained_share(calls: list[Seen], key_of: Callable[[Seen], ToolKey]) -> float:
    """Share of the log gaps' variance between keys, in sample (so detail alone raises it)."""
    groups: dict[ToolKey, list[float]] = defaultdict(list)
    for seen in calls:
        groups[key_of(seen)].append(seen.log_gap)
    total = np.var([c.log_gap for c in calls]) * len(calls)
    return float(1 - sum(np.var(g) * len(g) for g in groups.values()) / total)


def main(
    traces: Annotated[Path, typer.Option(help="folder of agentcgroup.jsonl", envvar="TRACES_DIR")] = TRACES,
    samples: Annotated[str, typer.Option(help="K, comma-separated: a level needs more than K")] = "100,20,5",
    leave_out: Annotated[str, typer.Option(help="sources whose gaps are not tool time")] = "glm",
) -> None:
    """Print the table."""
    calls = read(traces / "agentcgroup.jsonl", leave_out)
    shell = np.array([bool(c.command) for c in calls])
    programs = len({c.program for c in calls})
    title = f"{len(calls)} gaps of {programs} programs, {shell.sum()} of them shell commands: nats"
    thresholds = [int(k) for k in samples.split(",")]
    table = Table("key", "R2 of ln gap", *(f"K = {k}" for k in thresholds), title=title)
    for name, key_of in KEYS.items():
        losses = [log_losses(calls, key_of, k) for k in thresholds]
        cells = [f"{loss.mean():.3f} / {loss[shell].mean():.3f}" for loss in losses]
        table.add_row(name, f"{explained_share(calls, key_of):.2f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
