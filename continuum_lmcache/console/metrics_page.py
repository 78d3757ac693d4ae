"""Reads a running server's HTTP pages. Answers are checked; a missing metric is None."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from continuum_lmcache.errors import ServerError

TIMEOUT_S = 10.0
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One scrape of /metrics: every sample's name, labels and value."""

    samples: tuple[tuple[str, Labels, float], ...]

    def of(self, name: str) -> Iterator[tuple[Labels, float]]:
        return ((labels, value) for found, labels, value in self.samples if found == name)

    def total(self, name: str) -> float | None:
        """The sum over engines and labels; None: the server does not have it."""
        values = [value for _, value in self.of(name)]
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        """The mean over engines."""
        values = [value for _, value in self.of(name)]
        return sum(values) / len(values) if values else None

    def least(self, name: str) -> float | None:
        """The least over engines."""
        return min((value for _, value in self.of(name)), default=None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by a label; {} if the server does not have it."""
        found: dict[str, float] = {}
        for labels, value in self.of(name):
            key = labels.get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def info(self, name: str) -> Labels:
        """The labels of an info metric's first sample."""
        return next((labels for labels, _ in self.of(name)), {})


def scrape(url: str, replica: int | None = None) -> MetricsPage:
    """The server's /metrics; `replica`: of one in a fleet (docs/ray.md). Raises ServerError."""
    path = "/metrics" if replica is None else f"/metrics?replica={replica}"
    return page_of(answer(url, path).text, url)


def page_of(text: str, url: str) -> MetricsPage:
    """A page of metrics, checked to be a vLLM server's. Raises ServerError."""
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ServerError(f"{url}/metrics is no Prometheus text: {error}") from error
    page = MetricsPage(tuple((s.name, s.labels, s.value) for family in families for s in family.samples))
    if not any(name.startswith("vllm:") for name, _, _ in page.samples):
        raise ServerError(f"{url}/metrics has no vllm: metrics; give a vLLM server's base URL, without /v1")
    return page


def answer(url: str, path: str) -> httpx.Response:
    """GET with the API key of VLLM_API_KEY, if it is set; or ServerError with the reason."""
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(url + path, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{url}{path}: {error}; is the server up, and is this its base URL?") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ServerError(f"{url}{path}: the server asks for its API key; set VLLM_API_KEY to it")
    if response.status_code != httpx.codes.OK:
        raise ServerError(f"{url}{path}: HTTP {response.status_code}; is this a vLLM server's base URL?")
    return response


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The properties of a running server."""

    version: str | None
    window_tokens: int | None  # max_model_len
    blocks: int | None  # of the GPU's KV cache, one engine
    block_tokens: int | None
    prefix_caching: bool | None
    has_policy: bool  # it runs our scheduler, whose metrics begin with the first step
    has_tiers: bool  # it reports LMCache's loads by tier


def served(url: str) -> ServedModel:
    """Query a running server's properties. Raises ServerError if it does not answer."""
    page = scrape(url)
    info = page.info("vllm:cache_config_info")
    caching = info.get("enable_prefix_caching")
    version = inner(body(answer(url, "/version")), "version")
    window_tokens = inner(body(answer(url, "/v1/models")), "data", 0, "max_model_len")
    return ServedModel(
        version=version if isinstance(version, str) else None,
        window_tokens=window_tokens if isinstance(window_tokens, int) else None,
        blocks=whole(info.get("num_gpu_blocks")),
        block_tokens=whole(info.get("block_size")),
        prefix_caching=None if caching is None else caching == "True",
        has_policy=page.total("continuum_programs") is not None,
        has_tiers=page.total("continuum_loaded_tokens_total") is not None,
    )


def body(response: httpx.Response) -> Any:
    """The answer's JSON. Raises ServerError."""
    try:
        return response.json()
    except ValueError as error:
        raise ServerError(f"{response.url} did not answer with JSON: {error}") from error


def inner(outer: Any, *keys: str | int) -> Any:
    """A value inside nested objects and lists; None if it, or one around it, is missing."""
    for key in keys:
        try:
            outer = outer[key]
        except (LookupError, TypeError):
            return None
    return outer


def whole(text: str | None) -> int | None:
    """An info label's number; None if it is missing."""
    return int(text) if text is not None and text.isdecimal() else None
