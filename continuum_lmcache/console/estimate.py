"""`continuum-lmcache estimate`: would continuum help? By a stock server's metrics, or by a trace."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from continuum_lmcache.console.metrics_page import scrape
from continuum_lmcache.console.status import figures
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.telemetry.health_rules import between, would_help

SIMULATION = Path(__file__).parents[2] / "experiments" / "estimate.py"  # in a clone


def of_server(url: str, seconds: float) -> tuple[str, str]:
    """The answer, and because of what, from two looks at /metrics. Raises ServerError."""
    first = figures(scrape(url))
    if first.policy:
        raise ConfigError(
            f"{url} runs continuum already; ask `continuum-lmcache status {url}` what it brings"
        )
    time.sleep(seconds)
    return would_help(between(first, figures(scrape(url))))


def of_trace(*arguments: object) -> int:
    """The simulator's exit status; its answer is printed. Raises ConfigError where there is no simulator."""
    if not SIMULATION.is_file():
        raise ConfigError(
            "a trace needs the simulator, which only a clone has: git clone this project's repository, run "
            "make install in it, and give the same command as .venv/bin/continuum-lmcache"
        )
    return subprocess.run([sys.executable, str(SIMULATION), *map(str, arguments)], check=False).returncode
