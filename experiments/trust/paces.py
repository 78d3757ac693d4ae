"""Whether `continuum` is slower than stock vLLM beside a KV connector that it does not know.

    python -m experiments.trust.paces LMCacheMPConnector --pairs 6          # half an hour on a CPU
    python -m experiments.trust.paces LMCacheMPConnector --pairs 3 --noise  # stock vLLM against itself

A pair is a run of live sessions on each of two servers, with the same connector, programs, texts and bound
threads. The second side goes first in every other pair. The idle server is frozen. OUT keeps the pairs: a
later call adds to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from experiments.client import ServerUnusable
from experiments.driver import untold
from experiments.gpu.agents import Contender, Server, pool, written
from experiments.gpu.place import CPU, model_for
from experiments.replay import Job, replay_sessions
from experiments.selection import Selection
from experiments.server import ROOT, ServerError, processes, serve, unwind_on_sigterm
from experiments.sessions import capped
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


def main(
    connectors: Annotated[list[str], typer.Argument(help="of experiments.trust.others")],
    pairs: Annotated[int, typer.Option(min=1, help="to add, for each connector")] = 6,
    seconds: Annotated[float, typer.Option(min=10, help="of each run that count")] = COUNTED_S,
    noise: Annotated[bool, typer.Option(help="stock vLLM on both sides")] = False,
    out: Annotated[Path, typer.Option(help="pairs and table")] = Path("results/paces"),
) -> None:
    """Measure pairs, and print the table of all in OUT."""
    unwind_on_sigterm()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
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
    publish(table(rows), "Pace beside connectors that we do not know", [], out / "paces")


if __name__ == "__main__":
    typer.run(main)
