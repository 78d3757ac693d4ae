"""Measures what one client can do to others: victims' turn times beside an attacker and an honest client.

    python -m experiments.hostile --attacks ids
    python -m experiments.hostile --attacks pins,slow --profile profiles/cpu-tiny.yaml --gap-s 0.1 --blocks 48

The second command makes pins pay: no tier below the GPU, tools shorter than computing again.

An attacker's requests cost time by themselves. So each attack is compared with an honest client that sends
the same prompts at the same times with true fields. In this order: honest, attack, attack, honest, so that
a drift of the machine falls on both. One live server, its KV cache larger than the victims need and
smaller than the attacker would like.

    pins      programs of 900 tokens that never end and never come back, each under a new id
    slow      the victims' own tool, by name, reported as lasting seconds: the learned TTLs grow
    ids       tiny requests, each under an id and a tool of its own
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.client import Client, TurnFailed, request_body
from experiments.server import serve
from experiments.soak import totals
from experiments.tiny_model import make_model

ROOT = Path(__file__).parents[1]
ARGS = ("--max-model-len", "2048", "--scheduling-policy", "continuum")
VICTIMS, VICTIM_TURNS, TOOL = 4, 6, "bash make"
SLOW_GAP_S = 5.0  # of the attacker's tool
GOAL = 1.2
NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Attack:
    """An open-loop stream of requests, and the fields that the attacker sends."""

    prompt_tokens: int
    per_s: float
    lasts_s: float  # of one run
    turns: int = 1  # of a program, SLOW_GAP_S apart
    tool: str = ""  # "": one of its own


ATTACKS = {
    "pins": Attack(900, 0.6, 18.0),
    "slow": Attack(200, 1.0, 18.0, turns=2, tool=TOOL),
    "ids": Attack(4, 80.0, 30.0),
}


@dataclass(slots=True)
class Arm:
    """One run: how long the victims' turns took, in seconds."""

    turns_s: list[float] = field(default_factory=list)
    sent: int = 0
    failed: int = 0

    @property
    def p95_s(self) -> float:
        return float(np.percentile(self.turns_s, 95))


async def victim(client: Client, arm: Arm, end_s: float, seed: int, gap_s: float) -> None:
    """Honest programs, one after the other."""
    draw = random.Random(seed)
    while time.monotonic() < end_s:
        name, history = f"victim-{next(NUMBERS)}", tokens(draw, 300)
        for turn in range(1, VICTIM_TURNS + 1):
            body = request_body("tiny", history, 12)
            body |= {"job_id": name, "this_func_call": TOOL, "is_last_step": turn == VICTIM_TURNS}
            start_s = time.monotonic()
            answer = await client.complete(body)
            arm.turns_s.append(time.monotonic() - start_s)
            history = [*history, *answer.token_ids, *tokens(draw, 60)]
            await asyncio.sleep(gap_s)


async def attacker(client: Client, arm: Arm, end_s: float, attack: Attack, honest: bool) -> None:
    """Requests at a fixed rate until the end, with any result."""
    draw = random.Random(0)
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < end_s:
            tasks.create_task(program(client, arm, attack, honest, tokens(draw, attack.prompt_tokens)))
            await asyncio.sleep(1 / attack.per_s)


async def program(client: Client, arm: Arm, attack: Attack, honest: bool, history: list[int]) -> None:
    number = next(NUMBERS)
    for turn in range(1, attack.turns + 1):
        fields: dict[str, Any] = {"job_id": f"attack-{number}"}
        fields["this_func_call"] = (attack.tool if not honest else "sleep") or f"tool-{number}"
        fields["is_last_step"] = honest and turn == attack.turns
        arm.sent += 1
        try:
            answer = await client.complete(request_body("tiny", history, 1) | fields)
        except TurnFailed:
            arm.failed += 1
            return
        history = [*history, *answer.token_ids, 300 + turn]
        if turn < attack.turns:
            await asyncio.sleep(SLOW_GAP_S)


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(300, 4000) for _ in range(count)]


async def run(url: str, attack: Attack | None, honest: bool, lasts_s: float, gap_s: float) -> Arm:
    """Victims for this long, with or without another client, on an empty cache."""
    httpx.post(f"{url}/reset_prefix_cache", timeout=30)
    arm, end_s = Arm(), time.monotonic() + lasts_s
    async with Client(f"{url}/v1", timeout_s=120) as client, asyncio.TaskGroup() as tasks:
        for seed in range(VICTIMS):
            tasks.create_task(victim(client, arm, end_s, seed, gap_s))
        if attack is not None:
            tasks.create_task(attacker(client, arm, end_s, attack, honest))
    return arm


def runs(url: str, wanted: list[str], gap_s: float) -> Iterator[tuple[str, str, Arm, float]]:
    """(attack, client, victims' times, pins taken for all)."""

    def one(name: str, who: str, attack: Attack | None, lasts_s: float) -> tuple[str, str, Arm, float]:
        before = pins(url)
        arm = asyncio.run(run(url, attack, who == "honest", lasts_s, gap_s))
        return name, who, arm, pins(url) - before

    yield one("", "alone", None, 18.0)
    for name in wanted:
        for who in ("honest", "attack", "attack", "honest"):
            yield one(name, who, ATTACKS[name], ATTACKS[name].lasts_s)


def pins(url: str) -> float:
    """Pins taken since the start."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    taken = [line for line in text.splitlines() if line.startswith("continuum_pins_total")]
    return totals("\n".join(line for line in taken if 'outcome="taken"' in line) + "\n").get(
        "continuum_pins_total", 0.0
    )


def main(
    attacks: Annotated[str, typer.Option(help=f"of {', '.join(ATTACKS)}; by commas")] = "pins,slow,ids",
    policy: Annotated[str, typer.Option(help="continuum.policy")] = "continuum",
    profile: Annotated[Path | None, typer.Option(help="continuum.profile")] = None,
    gap_s: Annotated[float, typer.Option(help="how long the victims' tool takes")] = 0.5,
    blocks: Annotated[int, typer.Option(help="of 128 tokens: the server's KV cache")] = 72,
    log: Annotated[Path, typer.Option(help="the server's log")] = Path(".work/hostile.log"),
) -> None:
    """Run and print; exit 1 if an attack slows the victims' P95 by more than the goal."""
    env = {"CONTINUUM_POLICY": policy, "VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0"}
    env |= {"CONTINUUM_PROFILE": str(profile.resolve())} if profile is not None else {}
    args = (*ARGS, "--num-gpu-blocks-override", str(blocks))
    os.environ.pop("RUN_OUTPUT_DIR", None)
    table = Table("attack", "beside", "victim turns", "P50 s", "P95 s", "sent", "failed", "pins taken")
    times: dict[tuple[str, str], list[float]] = {}
    with serve(make_model(ROOT / ".work" / "tiny-model"), args, log=log, env=env) as url:
        for name, who, arm, taken in runs(url, attacks.split(","), gap_s):
            times.setdefault((name, who), []).extend(arm.turns_s)
            cells = (len(arm.turns_s), f"{np.median(arm.turns_s):.3f}", f"{arm.p95_s:.3f}")
            table.add_row(name, who, *map(str, cells), str(arm.sent), str(arm.failed), f"{taken:.0f}")
    Console(width=110).print(table)
    worst = 0.0
    for name in attacks.split(","):
        attacked_s, honest_s = (float(np.percentile(times[name, who], 95)) for who in ("attack", "honest"))
        worst = max(worst, attacked_s / honest_s)
        text = f"victims' P95 {attacked_s:.3f} s beside the attacker, {honest_s:.3f} s beside an honest one"
        print(f"{name}: {text}: {attacked_s / honest_s:.2f}")
    raise typer.Exit(worst > GOAL)


if __name__ == "__main__":
    typer.run(main)
