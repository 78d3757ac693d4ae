"""Runs twenty programs against a fleet, and kills a replica in the middle. Prints a table.

    python -m experiments.ray_programs          # starts two small replicas, and stops them again
    python -m experiments.ray_programs --url http://127.0.0.1:8000 --no-check   # on a fleet that runs

Each program is a conversation of token ids at temperature 0; its client sends a turn again that ended in HTTP
500, as agents do. Every answer names its replica. The fleet that is started here moves no program, so
a turn away from a living home is a fault. For a fleet that runs already, as many such turns are allowed as
programs were moved. In float32 each generated token and its log probability are compared with those of the
same weights in plain PyTorch, without vLLM, a cache or a batch (experiments/exactness.py). The order of
additions changes them by up to 0.001.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.exactness import Conversation, judged, reference
from experiments.ray_server import fleet_report, serve_fleet
from experiments.tiny_model import VOCAB_TOKENS, make_model

ROOT = Path(__file__).resolve().parent.parent
FIRST_TOKENS, TOOL_TOKENS, OUTPUT_TOKENS = 300, 200, 24
GAP_S = (0.2, 1.5)  # a tool's time, at least and at most
ROUNDING = 1e-3
TRIES = 20
REPLICA = "x-continuum-replica"
NO_MOVES = {"fleet.mover": "never"}


@dataclass
class Client:
    """One program: its conversation, and the replicas that answered."""

    name: str
    seed: int
    conversation: Conversation = field(default_factory=lambda: Conversation([]))
    replicas: list[str] = field(default_factory=list)  # by turn
    seconds: list[float] = field(default_factory=list)  # by turn, with those sent again
    cached: list[int] = field(default_factory=list)  # tokens of each prompt that were not computed
    prompts: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)  # HTTP statuses of turns that were sent again
    done_s: list[float] = field(default_factory=list)  # when each turn ended

    def run(self, url: str, turns: int, on_turn: threading.Event | None = None) -> None:
        """Run all turns; RuntimeError for a turn that fails repeatedly."""
        draw = random.Random(self.seed)
        self.conversation.tokens = [draw.randrange(3, VOCAB_TOKENS) for _ in range(FIRST_TOKENS)]
        for turn in range(turns):
            self.turn(url, is_last=turn == turns - 1)
            if on_turn is not None:
                on_turn.set()
            if turn < turns - 1:
                time.sleep(draw.uniform(*GAP_S))
                self.conversation.tokens += [draw.randrange(3, VOCAB_TOKENS) for _ in range(TOOL_TOKENS)]

    def turn(self, url: str, is_last: bool) -> None:
        start_s, tokens = time.monotonic(), self.conversation.tokens
        body = {"model": "tiny", "prompt": tokens, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        body |= {"temperature": 0, "logprobs": 1, "return_token_ids": True}
        body |= {"job_id": self.name, "is_last_step": is_last}
        for _ in range(TRIES):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
            if answer.is_success:
                break
            self.failures.append(answer.status_code)
            time.sleep(float(answer.headers.get("retry-after", 0.5)))
        else:
            raise RuntimeError(f"{self.name}: {self.failures}")
        completion = answer.json()
        (choice,), usage = completion["choices"], completion["usage"]
        for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
            self.conversation.logprobs[len(tokens)] = logprob
            tokens.append(token)
        self.replicas.append(answer.headers[REPLICA])
        self.seconds.append(time.monotonic() - start_s)
        self.cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        self.prompts.append(usage["prompt_tokens"])
        self.done_s.append(time.monotonic())

    def away(self, dead: str | None) -> int:
        """Later turns that another replica answered than the turn before, though that replica is alive."""
        return sum(a != b and a != dead for a, b in zip(self.replicas, self.replicas[1:], strict=False))


@dataclass(frozen=True)
class Outcome:
    """The results of the programs."""

    clients: Sequence[Client]
    dead: str | None  # the replica that was killed
    killed_s: float
    seconds: float
    moved: int  # programs that the fleet moved meanwhile

    @property
    def later_turns(self) -> int:
        return sum(len(client.replicas) - 1 for client in self.clients)

    @property
    def away(self) -> int:
        return sum(client.away(self.dead) for client in self.clients)

    @property
    def orphans(self) -> list[tuple[Client, int]]:
        """Programs that lost their replica, with the number of their first turn elsewhere."""
        found = []
        for client in self.clients:
            pairs = enumerate(zip(client.replicas, client.replicas[1:], strict=False), 1)
            found += [(client, i) for i, (a, b) in pairs if a == self.dead != b][:1]
        return found

    @property
    def faults(self) -> list[str]:
        """The faults, in words."""
        found = []
        if self.away > self.moved:
            found.append(f"{self.away} turns left a replica that lived, {self.moved} were moved")
        if failed := [c.name for c in self.clients if len(c.failures) > (self.dead is not None)]:
            found.append(f"more than the turn in flight failed: {failed}")
        if self.dead is not None and not self.orphans:
            found.append("the killed replica was no program's home")
        return found

    def off(self) -> tuple[float, list[str], int]:
        """The largest difference from the reference; one line for each turn with a token that is not the
        reference's likeliest or with another log probability; the number of tokens."""
        model = reference()
        largest, wrong, tokens = 0.0, [], 0
        for client in self.clients:
            deltas = [max(pair) for pair in judged(client.conversation, model)]
            largest, tokens = max(largest, *deltas), tokens + len(deltas)
            for turn, cached in enumerate(client.cached):
                own = deltas[turn * OUTPUT_TOKENS : (turn + 1) * OUTPUT_TOKENS]
                if bad := [i for i, delta in enumerate(own) if delta >= ROUNDING]:
                    wrong.append(
                        f"{client.name} turn {turn + 1} on {client.replicas[turn]}, {cached} of "
                        f"{client.prompts[turn]} cached: {len(bad)} tokens from {bad[0] + 1} on, "
                        f"up to {max(own):.3g}"
                    )
        return largest, wrong, tokens


def play(url: str, programs: int, turns: int, kill: bool, seed: int = 0) -> Outcome:
    """All programs at once. `kill`: SIGKILL for the replica with most live turns, at half of all turns."""
    clients = [Client(f"run-{seed}-{i}", seed * 1000 + i) for i in range(programs)]
    dead, killed_s, start_s = None, 0.0, time.monotonic()
    moved = moves(fleet_report(url))
    with ThreadPoolExecutor(programs) as pool:
        runs = [pool.submit(client.run, url, turns) for client in clients]
        while kill and dead is None and not all(run.done() for run in runs):
            time.sleep(0.1)
            is_half = sum(len(client.replicas) for client in clients) >= programs * turns / 2
            if is_half and (rows := fleet_report(url).get("replicas")):
                victim = max(rows, key=lambda row: (row["turns"], row["programs"]))
                dead, killed_s = victim["replica"], time.monotonic()
                os.kill(victim["pid"], signal.SIGKILL)
        for run in runs:
            run.result()
    seconds = time.monotonic() - start_s
    return Outcome(clients, dead, killed_s, seconds, moves(fleet_report(url)) - moved)


def moves(fleet: dict[str, Any]) -> int:
    """Programs that the fleet has moved so far."""
    return int(fleet.get("turns", {}).get("moved", 0))


def table(outcome: Outcome, fleet: dict[str, Any], check: bool) -> tuple[Table, bool]:
    """The figures, and whether there are no faults."""
    clients, orphans = outcome.clients, outcome.orphans
    failures = [status for client in clients for status in client.failures]
    shown = Table("", "", title=f"{len(clients)} programs, {outcome.seconds:.0f} s")
    shown.add_row("turns answered", f"{sum(len(c.replicas) for c in clients)}")
    shown.add_row("later turns answered away from home", f"{outcome.away} of {outcome.later_turns}")
    shown.add_row("replica killed", outcome.dead or "none")
    shown.add_row("turns sent again", f"{len(failures)}, after HTTP {sorted(set(failures)) or '-'}")
    if orphans:
        back_s = max(c.done_s[i] for c, i in orphans) - outcome.killed_s
        cached = sum(c.cached[i] for c, i in orphans) / sum(c.prompts[i] for c, i in orphans)
        shown.add_row("programs that lost their replica", str(len(orphans)))
        shown.add_row("until the last of them was answered", f"{back_s:.1f} s")
        shown.add_row("of their first prompts elsewhere, not computed", f"{cached:.0%}")
    shown.add_row("moved, refused, thrash", f"{outcome.moved}, {fleet.get('refused')}, {fleet.get('thrash')}")
    faults = outcome.faults
    if check:
        largest, wrong, tokens = outcome.off()
        shown.add_row("turns with a token that plain PyTorch would not have said", f"{len(wrong)}")
        shown.add_row("tokens compared", f"{tokens}")
        shown.add_row("largest difference of a log probability", f"{largest:.6f}")
        faults += wrong
    shown.add_row("faults", "\n".join(faults) or "none")
    return shown, not faults


@contextlib.contextmanager
def given_or_started(url: str | None) -> Iterator[str]:
    """The fleet at `url`, else one of two small replicas of our own."""
    if url is not None:
        yield url.rstrip("/")
        return
    model = make_model(ROOT / ".work" / "tiny-model")
    with TemporaryDirectory() as folder, serve_fleet(model, Path(folder), **NO_MOVES) as started:
        yield started


def main(
    url: Annotated[
        str | None, typer.Option(help="of a fleet that runs on this machine; none: start one")
    ] = None,
    programs: int = 20,
    turns: int = 6,
    kill: Annotated[bool, typer.Option(help="a replica in the middle")] = True,
    check: Annotated[bool, typer.Option(help="each token against plain PyTorch; for the small model")] = True,
) -> None:
    """Run, print; exit 1 if there is a fault."""
    start_s = time.monotonic()
    with given_or_started(url) as at:
        up_s = time.monotonic() - start_s
        outcome = play(at, programs, turns, kill, seed=int(time.time()) % 100_000)
        fleet = fleet_report(at)
    Console().print(table(outcome, fleet, check=False)[0])  # the check takes a while
    shown, ok = table(outcome, fleet, check)
    shown.add_row("start of the fleet", f"{up_s:.0f} s" if url is None else "not counted")
    Console().print(shown)
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    typer.run(main)
