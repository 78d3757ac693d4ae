"""Reads a running server's /metrics. The answer is checked; a missing metric is None."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import httpx
from prometheus_client.parser import text_string_to_metric_families

from continuum_lmcache.config import METRICS_PORT_OFFSET
from continuum_lmcache.errors import ServerError

TIMEOUT_S = 10.0
POLICY = "continuum_policy_info"
Sample = tuple[str, Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One scrape of /metrics: every sample's name, labels and value."""

    samples: tuple[Sample, ...]

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums over engines by a label; {} if the server does not have the metric."""
        found: dict[str, float] = {}
        for each, labels, value in self.samples:
            if each == name:
                key = labels.get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def values(self, name: str) -> list[float]:
        """One for each engine, or for each set of labels."""
        return [value for each, _, value in self.samples if each == name]

    def total(self, name: str) -> float | None:
        """The sum over engines and labels; None: the server does not have it."""
        values = self.values(name)
        return sum(values) if values else None

    def count(self, name: str) -> float:
        """The sum over engines and labels; 0: the server does not have it."""
        return sum(self.values(name))


def scrape(url: str, replica: int | None = None, metrics_port: int = 0) -> MetricsPage:
    """The server's /metrics, with the API key of VLLM_API_KEY, if it is set. `replica`: of one in a fleet
    (docs/fleet.md). vLLM's HTTP server in Rust has none of our metrics: its engines' are added, which begin
    at `metrics_port`. Raises ServerError."""
    path = "/metrics" if replica is None else f"/metrics?replica={replica}"
    key = os.environ.get("VLLM_API_KEY", "")
    page = page_of(answer(url + path, key), url)
    if replica is None and not page.values(POLICY) and is_in_rust(url):
        return MetricsPage((*page.samples, *of_engines(url, metrics_port)))
    return page


def answer(address: str, key: str = "") -> str:
    """What is served there to an API key; "": without one. Raises ServerError."""
    response = get(address, key)
    if response.status_code != httpx.codes.OK:
        raise ServerError(f"{address}: HTTP {response.status_code}; is this a vLLM server's base URL?")
    return response.text


def get(address: str, key: str) -> httpx.Response:
    """The same, whatever its status, but for a missing key. Raises ServerError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(address, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{address}: {error}; is the server up, and is this its base URL?") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ServerError(f"{address}: the server asks for its API key; set VLLM_API_KEY to it")
    return response


def is_in_rust(url: str) -> bool:
    """Whether the HTTP server says so."""
    with suppress(ServerError):
        return "rust_frontend_version" in answer(f"{url}/version")
    return False


def of_engines(url: str, metrics_port: int) -> Iterator[Sample]:
    """What the server's engines report, each at the next port, as far as one answers."""
    at = httpx.URL(url)
    for port in count(metrics_port or (at.port or 80) + METRICS_PORT_OFFSET):
        try:
            samples = samples_of(answer(str(at.copy_with(scheme="http", port=port, path="/metrics"))))
        except (ServerError, ValueError):
            return
        if not any(name == POLICY for name, _, _ in samples):
            return
        yield from samples


def samples_of(text: str) -> tuple[Sample, ...]:
    """All samples in a page's text. Raises ValueError."""
    families = text_string_to_metric_families(text)
    return tuple((s.name, s.labels, s.value) for family in families for s in family.samples)


def page_of(text: str, url: str) -> MetricsPage:
    """A page of metrics, checked to be a vLLM server's. Raises ServerError."""
    try:
        page = MetricsPage(samples_of(text))
    except ValueError as error:
        raise ServerError(f"{url}/metrics is no Prometheus text: {error}") from error
    if not any(name.startswith("vllm:") for name, _, _ in page.samples):
        raise ServerError(f"{url}/metrics has no vllm: metrics; give a vLLM server's base URL, without /v1")
    return page
