"""Reads the report of a fleet on Ray Serve at /fleet, and checks it (docs/ray.md)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from continuum_lmcache.console.metrics_page import TIMEOUT_S
from continuum_lmcache.errors import ServerError
from continuum_lmcache.telemetry.findings import Finding, warning

FIGURES = ("report_age_seconds", "programs", "requests", "wait_seconds")  # of each replica


def fleet_at(url: str) -> Mapping[str, Any] | None:
    """The report of /fleet; None: it is one server, not a fleet. Raises ServerError if none answers."""
    try:
        answer = httpx.get(f"{url}/fleet", timeout=TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol):
        return None  # the next scrape reports it better
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise ServerError(f"{url}/fleet: {answer.text[:200]}")
    try:
        report: Mapping[str, Any] = answer.json()
        numbers = [row[field] for row in report["replicas"] for field in FIGURES]
        numbers.append(report["config"]["report_age_s"])
    except (ValueError, LookupError, TypeError):
        return None
    return report if answer.is_success and all(isinstance(one, int | float) for one in numbers) else None


def findings(report: Mapping[str, Any]) -> Iterator[Finding]:
    """Problems of the fleet as a whole."""
    limit_s = report["config"]["report_age_s"]
    for row in report["replicas"]:
        name, age_s = f"replica {row.get('rank')}", row["report_age_seconds"]
        if age_s > limit_s:
            yield warning(
                "fleet-silent-replica",
                f"{name} has not reported for {age_s:.0f} s",
                f"see its log; after {limit_s:.0f} s no new program starts there",
            )
        for what, address in row.get("addresses", {}).items():
            if is_public(address):
                yield warning(
                    "fleet-public-address",
                    f"{name}: {what} is at {address}",
                    "put Ray and LMCache on loopback or a private network: LMCache has no authentication",
                )
    if report.get("thrash"):
        yield warning("fleet-thrash", f"{report['thrash']} moves within the cooldown", "a bug: report it")


def is_public(address: str) -> bool:
    """Whether an address, with or without a port, can be public. Names count as private."""
    host = address.rpartition("//")[2].rpartition(":")[0].strip("[]") or address
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False
