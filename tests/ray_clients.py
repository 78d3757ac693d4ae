"""Clients of a fleet on Ray Serve: programs that send turns, and again what failed; and Ray's processes."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from serving import ids

from experiments.exactness import Conversation

PATIENCE_S = 300.0
REPLICA = "x-continuum-replica"
OUTPUT_TOKENS, TRIES = 24, 20
CUT = 0  # in place of an HTTP status: the proxy died under the connection


def becomes(is_so: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, f"{what}: not within {PATIENCE_S:.0f} s"
        time.sleep(0.2)


def one_turn(url: str, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def running(name: str, pid: int | None = None) -> list[psutil.Process]:
    """Processes below this one, or below `pid`, by a word of their command line."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile, or is a zombie
            if any(name in word for word in process.cmdline()):
                found.append(process)
    return found


@dataclass
class Client:
    """One program: its conversation, and the replicas that answered."""

    name: str
    seed: int
    conversation: Conversation = field(default_factory=lambda: Conversation([]))
    replicas: list[str] = field(default_factory=list)  # by turn
    failures: list[int] = field(default_factory=list)  # HTTP statuses of turns that were sent again, or CUT
    spare: str = ""  # another proxy's URL, from when one has died

    def run(self, url: str, turns: int) -> None:
        draw = random.Random(self.seed)
        for turn in range(turns):
            self.conversation.tokens += ids(300 if not turn else 200, story=100 * self.seed + turn)
            self.turn(url, is_last=turn == turns - 1)
            time.sleep(draw.uniform(0.2, 1.5))

    def turn(self, url: str, is_last: bool) -> None:
        tokens = self.conversation.tokens
        how = {"max_tokens": OUTPUT_TOKENS, "logprobs": 1, "return_token_ids": True}
        for _ in range(TRIES):
            try:
                at = self.spare if self.spare and CUT in self.failures else url
                answer = one_turn(at, tokens, job_id=self.name, is_last_step=is_last, **how)
            except httpx.TransportError:
                self.failures.append(CUT)
                time.sleep(0.5)
                continue
            if answer.is_success:
                break
            self.failures.append(answer.status_code)
            time.sleep(float(answer.headers.get("retry-after", 0.5)))
        (choice,) = answer.json()["choices"]
        for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
            self.conversation.logprobs[len(tokens)] = logprob
            tokens.append(token)
        self.replicas.append(answer.headers[REPLICA])
