"""Compares the simulator with real servers: the same programs in virtual time and on this machine.

    python -m experiments.fidelity --seeds 1..3 --profile PROFILE --out fidelity-results

Serves the small model on this machine's CPU, fcfs and continuum, with LMCache and without, and replays
the same programs against each; then runs them in the simulator, on the machine that PROFILE describes
(profiles/measure.py, measured on this machine), and prints predicted against measured. A replay that
is in OUT already is not repeated, so the machine can be left to others between two seeds.

Besides the profile, the simulator gets the results of five short probes of each server
after its replay, none of them a turn of the programs (calibrated_simulator.ProbeTimes): how fast the machine
computes at that moment, the hop between client and engine and its growth with the prompt, and the server's
own time in a step. All are in the CSV, and the prediction is also made without them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.errors import ProfileError
from experiments import small_tiers
from experiments.calibrated_simulator import (
    BATCH,
    LONG_TOKENS,
    SHORT_TOKENS,
    ProbeTimes,
    ServerOverhead,
    overhead_of,
    predicted,
)
from experiments.client import Client, ServerUnusable, request_body
from experiments.driver import Plan, random_tokens
from experiments.fidelity_tables import comparison, ranking, write_csv
from experiments.offload_sweep import seeds_of
from experiments.replay import ORDINARY, Job, replay
from experiments.selection import Selection
from experiments.server import ServerError, serve
from experiments.sim.step_time import Machine
from experiments.sweep.cases import SweepError
from experiments.tables import markdown, plain
from experiments.tiny_model import make_model

STEP_TOKENS, MAX_SEQS = 2048, 64  # given to server and simulator
PROGRAMS, JPS = 12, 1.0
PROBES, OUTPUTS = 9, 24


@dataclass(frozen=True, slots=True)
class Contender:
    """One server, and its counterpart in the simulator."""

    policy: str
    offloads: bool

    @property
    def label(self) -> str:
        return f"{self.policy}+LMCache" if self.offloads else self.policy


PROFILE = Path("profiles", small_tiers.PROFILE)
CONTENDERS = tuple(Contender(p, o) for o in (False, True) for p in ("fcfs", "continuum"))


def selection(seed: int, programs: int) -> Selection:
    """The programs of a seed."""
    window = small_tiers.WINDOW_TOKENS
    return Selection(
        seed, count=programs, jps=JPS, max_context_tokens=window, time_scale=small_tiers.TIME_SCALE
    )


def measured(contender: Contender, chosen: Selection, profile: Path, model: Path, out: Path) -> None:
    """Serve, replay, probe, stop. Leaves LABEL-seedN.json and LABEL-seedN-probes.json."""
    with tempfile.TemporaryDirectory(prefix="fidelity-disk-") as disk:
        args = ["--scheduling-policy", contender.policy, "--dtype", small_tiers.DTYPE]
        args += ["--max-model-len", str(small_tiers.WINDOW_TOKENS)]
        args += ["--num-gpu-blocks-override", str(small_tiers.GPU_BLOCKS)]
        args += ["--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(MAX_SEQS)]
        if contender.offloads:
            config = small_tiers.connector(Path(disk), out / f"{contender.label}-lmcache.json")
            args += ["--kv-transfer-config", str(config)]
        env = {"CONTINUUM_PROFILE": str(profile.resolve())}
        log = out / f"{contender.label}-seed{chosen.seed}-server.log"
        with serve(model, args, log=log, env=env) as url:
            summary = replay(Job(f"{url}/v1", contender.label, chosen, out))
            probes = asyncio.run(probed(url))  # not before: the policy would learn from the probes
    if summary["errors"]:
        raise ServerUnusable(f"{contender.label}: {summary['errors']} turns failed; see {log}")
    probes_path(out, contender, chosen.seed).write_text(json.dumps(asdict(probes)))


def probes_path(out: Path, contender: Contender, seed: int) -> Path:
    return out / f"{contender.label}-seed{seed}-probes.json"


async def probed(url: str) -> ProbeTimes:
    """A server's probe times now, with prompts that no cache holds; medians of a few."""
    loop = asyncio.get_running_loop()
    plan = Plan("tiny", 0, ORDINARY)
    async with Client(f"{url}/v1", timeout_s=60) as client:

        async def answered(number: int, tokens: int, outputs: int = 1) -> tuple[float, float]:
            """Seconds to the first token, and between two tokens after it."""
            sent_s = loop.time()
            prompt = random_tokens(plan, (number, tokens), tokens)
            answer = await client.complete(request_body("tiny", prompt, outputs))
            return answer.first_s - sent_s, (answer.done_s - answer.first_s) / max(1, outputs - 1)

        numbers = range(PROBES)
        await answered(PROBES, LONG_TOKENS)  # the first of its kind is slower
        short_s = [(await answered(n, SHORT_TOKENS))[0] for n in numbers]
        pairs = [(await answered(n, LONG_TOKENS), await answered(n, LONG_TOKENS)) for n in numbers]
        alone_s = [(await answered(n, SHORT_TOKENS, OUTPUTS))[1] for n in numbers]
        batches = [[answered(BATCH * n + i, SHORT_TOKENS, OUTPUTS) for i in range(BATCH)] for n in numbers]
        batch_s = [between for batch in batches for _, between in await asyncio.gather(*batch)]
    long_s, again_s = (median(s for s, _ in column) for column in zip(*pairs, strict=True))
    return ProbeTimes(median(short_s), long_s, again_s, median(alone_s), median(batch_s))


def rows(seeds: list[int], programs: int, machine: Machine, out: Path) -> list[dict[str, Any]]:
    """Measured and predicted figures of every replay in `out`."""
    found = []
    for seed in seeds:
        chosen = selection(seed, programs)
        for contender in CONTENDERS:
            path = out / f"{contender.label}-seed{seed}.json"
            probes = ProbeTimes(**json.loads(probes_path(out, contender, seed).read_text()))
            row = {"label": contender.label, "seed": seed, "programs": programs}
            found.append(row | figures(json.loads(path.read_text())))
            server = overhead_of(probes, machine)
            for way, assumed in ways(server).items():
                setup = (contender.policy, contender.offloads, STEP_TOKENS, MAX_SEQS)
                found.append(row | {"way": way} | predicted(chosen, machine, assumed, *setup))
    return found


def ways(server: ServerOverhead) -> dict[str, ServerOverhead]:
    """Which probes the simulator gets, from all to only the profile and one hop."""
    return {
        "predicted": server,
        "without the server's steps": replace(server, step_s=0.0, per_sequence_s=0.0),
        "profile's speed": ServerOverhead(hop_s=server.hop_s),
    }


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """A replay's summary in the columns of the comparison."""
    source = summary["tokens_by_source"]
    tokens = {
        "gpu": source["gpu"],
        "offload": sum(source.get(name, 0) for name in ("dram", "ssd", "offload")),
        "computed": source["computed"],
    }
    return {
        "way": "measured",
        "mean_s": summary["job_time_s"]["mean"],
        "p95_s": summary["job_time_s"]["p95"],
        **{f"{name}_share": tokens[name] / summary["prompt_tokens"] for name in tokens},
        **dict.fromkeys(f.name for f in fields(ServerOverhead)),
    }


def main(
    seeds: Annotated[str, typer.Option(help="1..3, or 1,4")] = "1",
    programs: Annotated[int, typer.Option(min=2, help="How many a seed.")] = PROGRAMS,
    profile: Annotated[Path, typer.Option(help="Measured on this machine.")] = PROFILE,
    out: Annotated[Path, typer.Option(help="Folder for replays and results.")] = Path("fidelity-results"),
) -> None:
    """Predicted against measured."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    kv_tokens = (small_tiers.GPU_BLOCKS - 1) * small_tiers.BLOCK_TOKENS  # one block is vLLM's null block
    try:
        machine = Machine.from_profile(yaml.safe_load(profile.read_text()), profile.name, kv_tokens)
        chosen = seeds_of(seeds)
        model = make_model(small_tiers.ROOT / ".work" / "tiny-model")
        for seed in chosen:
            for contender in CONTENDERS[:: 1 if seed % 2 else -1]:
                if not probes_path(out, contender, seed).exists():
                    console.print(f"seed {seed}: {contender.label}")
                    measured(contender, selection(seed, programs), profile, model, out)
    except (ServerError, ServerUnusable, ProfileError, SweepError, OSError) as error:
        raise SystemExit(f"fidelity: {error}") from error
    found = rows(chosen, programs, machine, out)
    write_csv(found, out / "fidelity.csv")
    lines = comparison(found)
    title = f"{programs} programs, {JPS:g} a second, seeds {seeds}; profile {profile.name}"
    console.print(plain(lines, title), ranking(found), sep="\n")
    (out / "fidelity.md").write_text(f"{title}\n\n{markdown(lines)}\n\n{ranking(found)}\n")


if __name__ == "__main__":
    typer.run(main)
