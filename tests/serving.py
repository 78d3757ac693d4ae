"""Shared by the tests on real servers: a few calls, and readings of /metrics."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from waiting import PATIENCE_S, wait_for

from experiments import forking_vllm, server
from experiments.tiny_model import KV_BYTES_PER_TOKEN

OF_VLLM = {  # its metrics that the dashboard asks for
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:num_preemptions_total",
}
BLOCK = 128  # tokens, vLLM's default on a CPU
CHUNK = 256  # tokens, LMCache's default
DTYPE = "float32"  # on every CPU: bfloat16 with its instructions rounds a prefix hit otherwise than a prompt
KV_BYTES = KV_BYTES_PER_TOKEN[DTYPE]
CHUNK_BYTES = CHUNK * KV_BYTES
CHUNK_GIB = CHUNK_BYTES / 2**30
HTTP = httpx.Client(  # one for all: each new one reads the system's certificates. A connection a request
    timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0)
)
FORKING = list(forking_vllm.COMMAND)


@contextmanager
def serve(model: Path, args: Sequence[str], **settings: Any) -> Iterator[str]:
    """experiments.server's, quicker: its processes are forks, and it computes in DTYPE."""
    with server.serve(model, ["--dtype", DTYPE, *args], vllm=FORKING, **settings) as url:
        yield url


def ids(tokens: int, story: int = 0) -> list[int]:
    """A prompt of exactly this many tokens; prompts of one story are prefixes of each other."""
    return [300 + (story * 7919 + i * 104729) % 3700 for i in range(tokens)]


@dataclass(frozen=True)
class Answer:
    """One completion."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass(frozen=True)
class Server:
    """A running server, by its URL."""

    url: str
    key: str = field(default="", kw_only=True)  # the API key, where the server asks for one

    def complete(self, prompt: list[int], out: int = 8, **fields: Any) -> Answer:
        """A completion of exactly `out` tokens at temperature 0; `fields` go top-level."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": out, "ignore_eos": True, "temperature": 0}
        extra = {"logprobs": 1, "return_token_ids": True}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        body |= extra | fields
        response = HTTP.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=600)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return Answer(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def check_without_cache(self, answer: Answer) -> None:
        """vLLM reads no cache with `prompt_logprobs`: it would have chosen each of these tokens too."""
        body = {"model": "tiny", "prompt": answer.tokens, "max_tokens": 1, "prompt_logprobs": 1}
        choice = HTTP.post(f"{self.url}/v1/completions", json=body, timeout=600).json()["choices"][0]
        computed = choice["prompt_logprobs"][-len(answer.output) :]
        for token, logprob, of_tokens in zip(answer.output, answer.logprobs, computed, strict=True):
            of_token = of_tokens[str(token)]["logprob"]
            assert of_token >= max(each["logprob"] for each in of_tokens.values()) - 0.001
            assert abs(logprob - of_token) < 0.001

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels, now."""
        text = HTTP.get(f"{self.url}/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def engines(self) -> list[psutil.Process]:
        """Its processes that schedule."""
        return [p for p in server.processes(self.url) if "EngineCore" in " ".join(p.cmdline())]

    def recordings(self, *paths: Path) -> list[str]:
        """What the engines write on SIGUSR1, each into its file."""
        for path in paths:
            path.unlink(missing_ok=True)
        for engine in self.engines:
            engine.send_signal(signal.SIGUSR1)
        wait_for(lambda: all(path.exists() for path in paths), "recordings after SIGUSR1", every_s=0.05)
        return [path.read_text() for path in paths]

    def pins(self, outcome: str) -> float:
        return self.metric("continuum_pins_total", outcome=outcome)

    @property
    def usage(self) -> float:
        return self.metric("vllm:kv_cache_usage_perc")

    def usage_becomes(self, wanted: float) -> None:
        """Poll until the KV cache's usage is `wanted`."""
        wait_for(lambda: abs(self.usage - wanted) < 1e-9, f"usage is {wanted}", every_s=0.1)
