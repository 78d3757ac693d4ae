"""Asks a running server, and reads its /metrics. The answer is checked; a missing metric is None."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from continuum_lmcache.errors import ServerError

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One scrape of /metrics: every sample's name, labels and value."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

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


def scrape(url: str, replica: int | None = None) -> MetricsPage:
    """The server's /metrics. `replica`: of one in a fleet (docs/ray.md). Raises ServerError."""
    response = get(url, "/metrics" if replica is None else f"/metrics?replica={replica}")
    if response.status_code != httpx.codes.OK:
        raise ServerError(f"{response.url}: HTTP {response.status_code}; is this a vLLM server's base URL?")
    return page_of(response.text, url)


def get(url: str, path: str) -> httpx.Response:
    """What the server answers, with the API key of VLLM_API_KEY, if it is set. Raises ServerError."""
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(url + path, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{url}{path}: {error}; is the server up, and is this its base URL?") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ServerError(f"{url}{path}: the server asks for its API key; set VLLM_API_KEY to it")
    return response


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
