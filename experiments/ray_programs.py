"""Twenty programs against a fleet, one of whose replicas is killed in the middle. Prints a table.

    python -m experiments.ray_programs          # starts two small replicas, and stops them again
    python -m experiments.ray_programs --url http://127.0.0.1:8000 --no-check   # on a fleet that runs

Each program is a conversation of token ids at temperature 0; its client sends a turn again that ended in HTTP
500, as agents do. Every answer says which replica gave it. In float32 each generated token's log probability
is compared with what the same weights say in plain PyTorch, without vLLM, a cache or a batch
(experiments/exactness.py): 0.001 is what the order of additions makes.
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
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.exactness import Story, off_by, reference
from experiments.ray_server import serve_fleet, told
from experiments.tiny_model import VOCAB_TOKENS, make_model

ROOT = Path(__file__).resolve().parent.parent
FIRST_TOKENS, TOOL_TOKENS, OUTPUT_TOKENS = 300, 200, 24
GAP_S = (0.2, 1.5)  # a tool's time, at least and at most
ROUNDING = 1e-3
TRIES = 20
REPLICA = "x-continuum-replica"


@dataclass
class Client:
    """One program: its conversation, and who answered."""

    name: str
    seed: int
    story: Story = field(default_factory=lambda: Story([]))
    replicas: list[str] = field(default_factory=list)  # by turn
    seconds: list[float] = field(default_factory=list)  # by turn, with those sent again
    cached: list[int] = field(default_factory=list)  # tokens of each prompt that were not computed
    prompts: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)  # HTTP statuses of turns that were sent again
    done_s: list[float] = field(default_factory=list)  # when each turn ended

    def run(self, url: str, turns: int, on_turn: threading.Event | None = None) -> None:
        """All turns, or RuntimeError for one that fails again and again."""
        draw = random.Random(self.seed)
        self.story.tokens = [draw.randrange(3, VOCAB_TOKENS) for _ in range(FIRST_TOKENS)]
        for turn in range(turns):
            self.turn(url, is_last=turn == turns - 1)
            if on_turn is not None:
                on_turn.set()
            if turn < turns - 1:
                time.sleep(draw.uniform(*GAP_S))
                self.story.tokens += [draw.randrange(3, VOCAB_TOKENS) for _ in range(TOOL_TOKENS)]

    def turn(self, url: str, is_last: bool) -> None:
        start_s, tokens = time.monotonic(), self.story.tokens
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
        said = answer.json()
        (choice,), usage = said["choices"], said["usage"]
        for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
            self.story.logprobs[len(tokens)] = logprob
            tokens.append(token)
        self.replicas.append(answer.headers[REPLICA])
        self.seconds.append(time.monotonic() - start_s)
        self.cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        self.prompts.append(usage["prompt_tokens"])
        self.done_s.append(time.monotonic())

    def away(self, dead: str | None) -> int:
        """Later turns that another replica answered than the one before, though that one lives."""
        return sum(a != b and a != dead for a, b in zip(self.replicas, self.replicas[1:], strict=False))


@dataclass(frozen=True)
class Outcome:
    """What became of the programs."""

    clients: Sequence[Client]
    dead: str | None  # the replica that was killed
    killed_s: float
    seconds: float

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

    def off(self) -> tuple[float, int, int]:
        """The largest difference to the reference, tokens that are not its likeliest, tokens in all."""
        model = reference()
        deltas = [delta for client in self.clients for delta in off_by(client.story, model)]
        return max(deltas), sum(delta >= ROUNDING for delta in deltas), len(deltas)


def play(url: str, programs: int, turns: int, kill: bool, seed: int = 0) -> Outcome:
    """All programs at once. `kill`: SIGKILL for the replica with most programs at half of the turns."""
    clients = [Client(f"run-{seed}-{i}", seed * 1000 + i) for i in range(programs)]
    dead, killed_s, start_s = None, 0.0, time.monotonic()
    with ThreadPoolExecutor(programs) as pool:
        runs = [pool.submit(client.run, url, turns) for client in clients]
        while kill and dead is None and not all(run.done() for run in runs):
            time.sleep(0.1)
            if sum(len(client.replicas) for client in clients) >= programs * turns / 2:
                victim = max(told(url)["replicas"], key=lambda row: row["turns"])
                dead, killed_s = victim["replica"], time.monotonic()
                os.kill(victim["pid"], signal.SIGKILL)
        for run in runs:
            run.result()
    return Outcome(clients, dead, killed_s, time.monotonic() - start_s)


def table(outcome: Outcome, fleet: dict[str, object], check: bool) -> tuple[Table, bool]:
    """The figures, and whether all is as it must be."""
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
    shown.add_row("moved, refused, thrash", f"{fleet_counts(fleet)}")
    ok = outcome.away == 0
    if check:
        largest, wrong, tokens = outcome.off()
        shown.add_row("tokens off by 0.001 or more, of the model's own", f"{wrong} of {tokens}")
        shown.add_row("largest difference of a log probability", f"{largest:.6f}")
        ok = ok and not wrong
    return shown, ok


def fleet_counts(fleet: dict[str, object]) -> str:
    turns = fleet.get("turns")
    moved = turns.get("moved", 0) if isinstance(turns, dict) else 0
    return f"{moved}, {fleet.get('refused')}, {fleet.get('thrash')}"


@contextlib.contextmanager
def given_or_started(url: str | None) -> Iterator[str]:
    """The fleet at `url`, else one of two small replicas of our own."""
    if url is not None:
        yield url.rstrip("/")
        return
    model = make_model(ROOT / ".work" / "tiny-model")
    with TemporaryDirectory() as folder, serve_fleet(model, Path(folder)) as started:
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
    """Run, print; exit 1 if a turn went away from home or a token is wrong."""
    start_s = time.monotonic()
    with given_or_started(url) as at:
        up_s = time.monotonic() - start_s
        outcome = play(at, programs, turns, kill, seed=int(time.time()) % 100_000)
        fleet = told(at)
    Console().print(table(outcome, fleet, check=False)[0])  # the check takes a while
    shown, ok = table(outcome, fleet, check)
    shown.add_row("start of the fleet", f"{up_s:.0f} s" if url is None else "not counted")
    Console().print(shown)
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    typer.run(main)
