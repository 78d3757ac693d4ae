"""`continuum-lmcache top URL`: what each program does now; and the recording of `report URL`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from continuum_lmcache.console.doctor_output import headed
from continuum_lmcache.console.metrics_page import get
from continuum_lmcache.errors import ServerError

REFRESH_S = 1.0
ANSWERED = "has answered"
AWAY = ("in a tool call", ANSWERED)
STATES = {"running": "green", "waiting": "yellow", "in line": "bold yellow"} | dict.fromkeys(AWAY, "cyan")
WITHOUT = "{url} has no {path}: it does not run continuum, or its HTTP server is in Rust"
Rank = Mapping[str, Any]


def ranks_of(url: str) -> list[Rank]:
    """What each data-parallel rank says. Raises ServerError."""
    found: list[Rank] = answer(url, "/v1/continuum/programs").json()
    return found


def save_recordings(url: str, folder: Path) -> None:
    """Every rank's recording as it is now, into the folder. Raises ServerError."""
    for rank in range(len(ranks_of(url))):
        name = f"scheduler_timestamps_dp{rank}" if rank else "scheduler_timestamps"
        (folder / name).write_bytes(answer(url, f"/v1/continuum/recording?rank={rank}").content)


def answer(url: str, path: str) -> httpx.Response:
    """Raises ServerError, with the server's own reason if it has one."""
    response = get(url + path, os.environ.get("VLLM_API_KEY", ""))
    if response.status_code == httpx.codes.OK:
        return response
    is_ours = response.is_client_error and "continuum.run_output_dir" in response.text
    why = response.json()["error"]["message"] if is_ours else WITHOUT.format(url=url, path=path)
    raise ServerError(f"{url}: {why}" if is_ours else why)


def watch(url: str, console: Console) -> None:
    """Until it is interrupted."""
    with Live(view(url, ranks_of(url)), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(view(url, ranks_of(url)), refresh=True)


def view(url: str, ranks: Sequence[Rank]) -> Group:
    """One line of counts, one of memory a rank, and a row for each program."""
    table = headed("program", "does", "for", "context", "turns")
    for column in table.columns:
        column.no_wrap = True
    table.add_column("because")
    for row in (row for rank in ranks for row in rank["programs"]):
        cells = (f"{row['for_s']:,.1f} s", f"{row['context_tokens']:,}", f"{row['turns']:,}")
        name, why = Text(row["program"]), Text(because(row))  # not as rich's markup
        table.add_row(name, Text(row["state"], STATES[row["state"]]), *cells, why)
    counts = Counter(row["state"] for rank in ranks for row in rank["programs"])
    said = ", ".join(f"{counts[state]} {state}" for state in STATES)
    lines = [Text(f"{url}: {said}", style="bold")]
    lines += [Text(memory(rank["memory"])) for rank in ranks]
    if more := sum(rank["more"] for rank in ranks):
        lines.append(Text(f"{more:,} programs more are not shown"))
    return Group(*lines, "", table)


def because(row: Mapping[str, Any]) -> str:
    """What a program waits for; how long its KV is pinned."""
    if row["state"] == "waiting":
        why = "; its memory was taken" if row["preempted"] else ""
        why = "; no memory is free for it" if row["refused_memory"] else why
        return f"place {row['place']} of the turns that may run{why}"
    if row["state"] == "in line":
        bound_s = row["starts_within_s"]
        bound = "" if bound_s is None else f", within {max(0.0, bound_s):,.0f} s"
        return f"place {row['place']} of the programs that start when there is room{bound}"
    if row["state"] in AWAY:
        pin = "not pinned" if row["pinned_s"] is None else f"pinned for {row['pinned_s']:,.1f} s more"
        at = "" if row["state"] == ANSWERED else f"{row['tool'] or 'a tool'}: "
        return f"{at}{pin}{'' if row['has_place'] else ', its place given up'}"
    return ""


def memory(of: Mapping[str, Any]) -> str:
    blocks = max(1, of["blocks"])
    said = f"KV cache {of['kv_tokens']:,} tokens: {1 - of['free_blocks'] / blocks:.0%} in use, "
    said += f"{of['pinned_blocks'] / blocks:.0%} pinned. "
    tiers = ", ".join(f"{name} {tokens:,}" for name, tokens in of["tier_tokens"].items())
    state = "" if of["tiers_up"] else " (does not answer)"
    said += f"Below it {of['tiers']}{state}: {tiers} tokens. " if tiers else "Nothing below it. "
    wait_s = of["longest_wait_s"]
    said += f"A new program starts {f'at the latest after {wait_s:,.0f} s' if wait_s else 'at once'}. "
    return said + f"Without a name: {of['unnamed_running']} running, {of['unnamed_waiting']} waiting."
