"""Whether `continuum` is slower than stock vLLM beside a KV connector that it does not know.

    python -m experiments.trust.paces LMCacheMPConnector --pairs 6          # half an hour on a CPU
    python -m experiments.trust.paces LMCacheMPConnector --pairs 3 --noise  # stock vLLM against itself
    python -m experiments.trust.paces --simulated --pairs 3                 # in virtual time, three minutes

A pair is a run of live sessions on each of two servers, with the same connector, programs, texts and bound
threads. The second side goes first in every other pair. The idle server is frozen. OUT keeps the pairs: a
later call adds to them.

`--simulated` plays the same sessions on vLLM's scheduler in virtual time, with a CPU's measured profile and
a DRAM for all of them: stock vLLM, ours that does not know the DRAM, ours that does. `--dram 0.25` gives a
DRAM of a quarter of all windows, and `--profile` another CPU's times than this one's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import typer
import yaml

from continuum_lmcache.reload.tier_store import TierStore
from continuum_lmcache.vllm_plugin.memory import residency
from experiments.client import ServerUnusable
from experiments.driver import untold
from experiments.gpu.agents import LMCACHE, Contender, Server, pool, setup, written
from experiments.gpu.place import CPU, model_for
from experiments.replay import Job, replay_sessions
from experiments.selection import Selection
from experiments.server import ROOT, ServerError, processes, serve, unwind_on_sigterm
from experiments.sessions import capped, figures
from experiments.tables import publish
from experiments.trust.others import OURS, STOCK, options_of

GAP_S = 1.0  # at most, of a tool
WARM_UP_S, COUNTED_S = 20.0, 120.0
SHOWN = {"tokens_per_s": "output, tok/s", "ttft_p90_s": "P90 of first tokens, s"}
Row = dict[str, Any]


def server(order: str, connector: str, model: Path, folder: Path, until: ExitStack) -> Server:
    """One side of a pair, idle. Raises ServerError."""
    args = ["--scheduling-policy", order, "--dtype", CPU.dtype, "--max-model-len", str(CPU.window_tokens)]
    args += ["--num-gpu-blocks-override", str(CPU.gpu_blocks), "--max-num-seqs", str(CPU.max_seqs)]
    args += ["--max-num-batched-tokens", str(CPU.step_tokens)]
    all_gib = max(CPU.sessions) * CPU.window_tokens * CPU.kv_bytes_per_token / 2**30  # of all sessions
    options = until.enter_context(options_of(connector, folder, all_gib))
    args += ["--kv-transfer-config", json.dumps(options["kv_transfer_config"])]
    env = {"CONTINUUM_PROFILE": str((ROOT / "profiles" / CPU.profile).resolve())}
    url = until.enter_context(serve(model, args, log=folder.with_suffix(".log"), env=env))
    side = Server(Contender(order), url, processes(url))
    until.callback(side.thaw)  # a frozen process does not handle SIGTERM
    side.freeze()
    return side


def pair(number: int, orders: tuple[str, str], connector: str, seconds: float, out: Path) -> Row:
    """Both sides' figures. Raises ServerError, ServerUnusable."""
    trace = written(capped(pool(CPU), GAP_S), out / "programs.jsonl")
    model, found = model_for(CPU, ROOT / ".work"), dict[str, Any]()
    with ExitStack() as until:
        sides = {}
        for at, order in enumerate(orders):
            folder = Path(until.enter_context(TemporaryDirectory(dir=out, ignore_cleanup_errors=True)))
            sides[at] = server(order, connector, model, folder, until)
        for at in sides if number % 2 == 0 else reversed(sides):
            name = f"{connector}-{'-'.join(orders)}-{number}-{at}"
            job = Job(f"{sides[at].url}/v1", name, Selection(number, trace, jps=1.0), out, identify=untold)
            with sides[at].awake():
                found[str(at)] = replay_sessions(job, max(CPU.sessions), seconds, WARM_UP_S)
    return {"connector": connector, "orders": [*orders], "pair": number, "seconds": seconds, **found}


def ratio(row: Row, name: str) -> float:
    """The second side's figure over the first's."""
    return float(row["1"][name] / row["0"][name])


def table(rows: Iterable[Row]) -> list[list[str]]:
    """A header, then a line for each connector and sides: medians, and the ratios with their range."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["connector"], *row["orders"]), []).append(row)
    sides = ("first", "second", "second over first")
    head = [f"{words}: {side}" for words in SHOWN.values() for side in sides]
    lines = [["connector", "first", "second", "pairs", *head, "failed turns"]]
    for group, of in groups.items():
        line = [*group, str(len(of))]
        for name in SHOWN:
            line += [f"{median(row[side][name] for row in of):.2f}" for side in ("0", "1")]
            ratios = sorted(ratio(row, name) for row in of)
            line.append(f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        lines.append([*line, str(sum(row[side]["errors"] for row in of for side in ("0", "1")))])
    return lines


class NoStore(TierStore):
    """In the place of TierStore where the connector, which is one, is not to be known."""


def simulated(
    number: int, order: str, seconds: float, is_known: bool, out: Path, dram: float, profile: Path
) -> Row:
    """One run in virtual time. `dram`: in windows of all sessions."""
    from experiments.sim.sessions import play
    from experiments.sim.step_time import Machine

    machine = Machine.from_profile(yaml.safe_load(profile.read_text()), profile.name, CPU.kv_tokens)
    dram_tokens = int(dram * max(CPU.sessions) * CPU.window_tokens)
    kv_bytes = machine.kv_bytes_per_token
    place = replace(CPU, dram_tokens=dram_tokens, kv_bytes_per_token=kv_bytes, ssd_gb=0.0)
    trace = written(capped(pool(CPU), GAP_S), out / "programs.jsonl")
    programs, sessions = Selection(number, trace, jps=1.0).programs(), max(CPU.sessions)
    with nullcontext() if is_known else patch.object(residency, "TierStore", NoStore):
        of_label = setup(Contender(order, LMCACHE).label, place, machine)
        played = play(programs, of_label, sessions, number, WARM_UP_S + seconds, warm_up_turns=0)
    return figures(played.turns, sessions, WARM_UP_S, WARM_UP_S + seconds)


def virtual(pairs: int, seconds: float, out: Path, dram: float, profile: Path) -> list[list[str]]:
    """A header, then a line for each seed and side."""
    shown = {**SHOWN, "ttft_mean_s": "mean, s", "ttft_max_s": "longest, s"}
    lines = [["seed", "", *shown.values()]]
    for number in range(pairs):
        for side, order, is_known in (
            ("stock", STOCK, True),
            ("ours, DRAM unknown", OURS, False),
            ("ours", OURS, True),
        ):
            found = simulated(number, order, seconds, is_known, out, dram, profile)
            lines.append([str(number), side, *(f"{found[name]:.2f}" for name in shown)])
    return lines


def main(
    connectors: Annotated[list[str] | None, typer.Argument(help="of experiments.trust.others")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="to add, for each connector")] = 6,
    seconds: Annotated[float, typer.Option(min=10, help="of each run that count")] = COUNTED_S,
    noise: Annotated[bool, typer.Option(help="stock vLLM on both sides")] = False,
    is_simulated: Annotated[bool, typer.Option("--simulated", help="in virtual time")] = False,
    dram: Annotated[float, typer.Option(min=0, help="of --simulated, in windows of all sessions")] = 1.0,
    profile: Annotated[str, typer.Option(help="of --simulated, in profiles/")] = CPU.profile,
    out: Annotated[Path, typer.Option(help="pairs and table")] = Path("results/paces"),
) -> None:
    """Measure pairs, and print the table of all in OUT."""
    unwind_on_sigterm()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if is_simulated:
        title = "Sessions beside a DRAM, simulated"
        lines = virtual(pairs, seconds, out, dram, ROOT / "profiles" / profile)
        return publish(lines, title, [], out / "simulated")
    if not connectors:
        raise typer.BadParameter("name a connector of experiments.trust.others, or give --simulated")
    kept = out / "pairs.json"
    rows: list[Row] = json.loads(kept.read_text()) if kept.exists() else []
    orders = (STOCK, STOCK if noise else OURS)
    for connector in connectors:
        for _ in range(pairs):
            done = sum(row["connector"] == connector and row["orders"] == [*orders] for row in rows)
            try:
                rows.append(pair(done, orders, connector, seconds, out))
            except (ServerError, ServerUnusable) as error:
                raise SystemExit(f"paces: {connector}: {error}") from error
            kept.write_text(json.dumps(rows, indent=1) + "\n")
    return publish(table(rows), "Pace beside connectors that we do not know", [], out / "paces")


if __name__ == "__main__":
    typer.run(main)
