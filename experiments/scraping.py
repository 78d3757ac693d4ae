"""A real server under a real Prometheus: what the dashboard's panels show.

Needs the `prometheus` of the system's packages (Debian: apt-get install prometheus). Starts one of its
own on a port that the OS chose, and ends it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from experiments.dashboard import PANELS, STATS, Panel
from experiments.replay import Job, replay
from experiments.selection import Selection
from experiments.server import ServerError, reserved_port, serve
from experiments.small_tiers import GPU_BLOCKS, TIME_SCALE, WINDOW_TOKENS, connector

SCRAPE_S = 2
RANGE = "20s"  # what rates are taken over: some scrapes
STEP_S = 2
START_S = 500.0  # on a machine that others use too
PROGRAMS, JPS = 16, 1.0
CONFIG = """\
global: {{scrape_interval: {scrape_s}s}}
scrape_configs:
- job_name: vllm
  static_configs: [{{targets: ['{target}']}}]
"""


@dataclass(frozen=True)
class Curve:
    """One series of a panel: seconds since the start, and values."""

    legend: str
    at_s: list[float]
    values: list[float]


Seen = dict[str, list[Curve]]  # by panel's title


@contextlib.contextmanager
def prometheus(server_url: str, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes the server; its URL. Raises ServerError if it does not come up."""
    config = folder / "prometheus.yml"
    target = server_url.removeprefix("http://")
    config.write_text(CONFIG.format(scrape_s=SCRAPE_S, target=target))
    address = f"127.0.0.1:{reserved_port()}"
    command = ["prometheus", f"--config.file={config}", f"--web.listen-address={address}"]
    command.append(f"--storage.tsdb.path={folder}/data")
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(100):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{address}/-/ready").status_code == httpx.codes.OK:
                    yield f"http://{address}"
                    return
            time.sleep(0.2)
        raise ServerError(f"prometheus was not ready:\n{(folder / 'prometheus.log').read_text()[-1000:]}")
    finally:
        process.terminate()
        process.wait(20)


def observed(model: Path, seconds: float) -> Seen:
    """Serve with `continuum`, replay programs for about `seconds`, and ask for every panel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = connector(folder / "disk", folder / "lmcache.json")
        args = ["--scheduling-policy", "continuum", "--kv-transfer-config", str(config)]
        args += ["--max-model-len", str(WINDOW_TOKENS), "--num-gpu-blocks-override", str(GPU_BLOCKS)]
        with (
            serve(model, args, log=folder / "server.log", start_s=START_S) as url,
            prometheus(url, folder) as eyes,
            ThreadPoolExecutor(1) as pool,
        ):
            start_s = time.time()
            pool.submit(keep_busy, url, folder, start_s + seconds).result()
            time.sleep(2 * SCRAPE_S)
            return asked(eyes, start_s, time.time())


def keep_busy(url: str, folder: Path, until_s: float) -> None:
    """Program after program, a seed at a time."""
    for seed in count(1):
        if time.time() >= until_s:
            return
        drawn = Selection(
            seed, None, "swe", PROGRAMS, JPS, "", max_context_tokens=WINDOW_TOKENS, time_scale=TIME_SCALE
        )
        replay(Job(f"{url}/v1", "continuum", drawn, folder))


def asked(eyes: str, start_s: float, end_s: float) -> Seen:
    """Every panel's queries, over the whole time. Raises ServerError if Prometheus refuses one."""
    return {
        panel.title: [
            curve
            for legend, query in panel.queries_over(RANGE).items()
            for curve in curves(eyes, legend, query, start_s, end_s)
        ]
        for panel in (*STATS, *PANELS)
    }


def curves(eyes: str, legend: str, query: str, start_s: float, end_s: float) -> list[Curve]:
    """What one query gives."""
    given: dict[str, Any] = {"query": query, "start": start_s, "end": end_s, "step": STEP_S}
    answer = httpx.get(f"{eyes}/api/v1/query_range", params=given, timeout=30).json()
    if answer["status"] != "success":
        raise ServerError(f"{query}: {json.dumps(answer)}")
    found = []
    for series in answer["data"]["result"]:
        name = legend
        for label, value in series["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        points = [(float(t) - start_s, float(v)) for t, v in series["values"] if v != "NaN"]
        if points:
            found.append(Curve(name, [t for t, _ in points], [v for _, v in points]))
    return found


def empty_panels(seen: Seen) -> list[str]:
    """Panels that should have data and have none."""
    return [f"no data: {p.title}" for p in (*STATS, *PANELS) if not seen[p.title] and not p.may_be_empty]


def draw(seen: Seen, path: Path) -> None:
    """All panels as one picture, as the dashboard lays them out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = plt.figure(figsize=(20, 12.5), layout="constrained")
    parts = figure.subfigures(2, 1, height_ratios=(1, 9))
    for axes, panel in zip(parts[0].subplots(1, len(STATS)).flat, STATS, strict=True):
        draw_stat(axes, panel, seen[panel.title])
    for axes, panel in zip(parts[1].subplots(3, 4).flat, PANELS, strict=True):
        draw_panel(axes, panel, seen[panel.title])
    figure.savefig(path, dpi=70)
    plt.close(figure)


def draw_stat(axes: Any, panel: Panel, found: list[Curve]) -> None:
    """The last value, large."""
    shown = f"{min(curve.values[-1] for curve in found):g}" if found else "no data"
    if panel.title == "policy" and found:
        shown = found[0].legend
    axes.set_axis_off()
    axes.set_title(panel.title, fontsize=10)
    axes.text(0.5, 0.4, shown, ha="center", va="center", fontsize=18)


def draw_panel(axes: Any, panel: Panel, found: list[Curve]) -> None:
    """Its curves over time."""
    for curve in found:
        axes.plot(curve.at_s, curve.values, label=curve.legend, linewidth=1.3)
    unit = {"percentunit": "share", "ops": "a second", "s": "s"}.get(panel.unit, "")
    axes.set_title(f"{panel.title}{f' ({panel.text or unit})' if panel.text or unit else ''}", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("s", fontsize=8)
    axes.tick_params(labelsize=8)
    if found:
        axes.legend(fontsize=7, ncols=2)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")
