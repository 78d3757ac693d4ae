"""Reads a running server's HTTP pages. Answers are checked; a missing metric is None."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
