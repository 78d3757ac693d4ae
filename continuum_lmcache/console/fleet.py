"""Reads the report of a fleet on Ray Serve at /fleet, and checks it (docs/ray.md)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from continuum_lmcache.console.metrics_page import TIMEOUT_S, inner
from continuum_lmcache.errors import ConfigError, ServerError
from continuum_lmcache.telemetry.findings import Finding, note, warning

BUILD = "continuum_lmcache.serve.app:build"
ENVIRONMENT = {  # of Ray's proxies, as in continuum_lmcache.serve.app: a test compares them
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "continuum_lmcache.serve.names:middlewares",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": "x-continuum-turn",
}
FIGURES = ("report_age_seconds", "programs", "requests", "wait_seconds")  # of each replica
LOOPBACK, EVERYWHERE = "127.0.0.1", ("0.0.0.0", "::")
CONTINUUM = "--scheduling-policy continuum"


def fleet_at(url: str) -> Mapping[str, Any] | None:
    """The report of /fleet; None: it is one server, not a fleet. Raises ServerError if none answers."""
    try:
        answer = httpx.get(f"{url}/fleet", timeout=TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol):
        return None  # the next scrape reports it better
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise ServerError(f"{url}/fleet: {answer.text[:200]}")
    try:
        report = answer.json() if answer.is_success else None
    except ValueError:
        return None
    rows = report.get("replicas") if isinstance(report, dict) else None
    numbers = [inner(row, field) for row in rows for field in FIGURES] if isinstance(rows, list) else [None]
    limit_s = inner(report, "config", "report_age_s")
    return report if all(isinstance(each, int | float) for each in (*numbers, limit_s)) else None


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


def of_config(path: Path) -> Iterator[Finding]:
    """Problems in a Serve config file. Raises ConfigError if it is not one."""
    try:
        page = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as why:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(why).split())}") from why
    apps = inner(page, "applications")
    listed = apps if isinstance(apps, list) else []
    ours = [app for app in listed if inner(app, "import_path") == BUILD]
    if not ours:
        raise ConfigError(f"{path} has no application with import_path: {BUILD}")
    host = str(inner(page, "http_options", "host") or LOOPBACK)
    if host in EVERYWHERE or is_public(f"{host}:"):
        yield warning(
            "fleet-public-address",
            f"http_options.host is {host}: the proxies listen there and require no API key",
            "bind to a private address, or give vLLM --api-key",
        )
    given = inner(page, "controller_options", "runtime_env", "env_vars")
    for name, value in ENVIRONMENT.items():
        if inner(given, name) != value:
            yield warning(
                "fleet-unnamed-turns",
                f"controller_options' env_vars have no {name}={value}",
                "add it, or export it before each `ray start`: else only X-Session-ID names a program",
            )
    for app in ours:
        options = str(inner(app, "args", "vllm") or CONTINUUM)
        if CONTINUUM not in " ".join(options.replace("=", " ").split()):
            yield note(
                "fleet-stock-engines",
                f"args.vllm has no {CONTINUUM}: {options}",
                "add it: else no replica holds new programs back, and no turn's KV is pinned",
            )


def is_public(address: str) -> bool:
    """Whether an address, with or without a port, can be public. Names count as private."""
    host = address.rpartition("//")[2].rpartition(":")[0].strip("[]") or address
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False
