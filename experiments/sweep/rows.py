"""A CSV with one schema: a row per finished case, appended, never rewritten.

A row's key is a hash of the case and of the code that made it. A row made by other code stays in the
file and is not read: a changed scheduler is measured again. Rows of real servers are in another file, with
their conditions (conditions.py); rows of another machine are not read either.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from experiments.sweep.cases import Case, Live, Point, SessionPoint, SweepError, inputs
from experiments.sweep.conditions import CONDITIONS, MACHINE, conditions, machine, versions

SCHEMA = 3  # raise it when a column changes its meaning
ROOT = Path(__file__).resolve().parent.parent.parent
COMMON = ("continuum_lmcache/**/*.py", "experiments/workload.py", "experiments/table1.py")
SIMULATOR = (
    *COMMON,
    # all but LMCache's adapters, which the simulator does not run
    *(f"connectors/{part}*.py" for part in ("", "fake/")),
    *("experiments/sim/*.py", "experiments/sessions.py", "profiles/2xh100*.yaml"),
    *(f"experiments/sweep/{name}.py" for name in ("cases", "simulated")),
)
SERVERS = (
    *COMMON,
    "connectors/**/*.py",
    *(
        "profiles/*.yaml",
        "lmcache.json",
        "experiments/peers/*.py",
        "requirements/peers.lock",
    ),
    *(f"experiments/{name}.py" for name in ("server", "mp_server", "tiny_model", "replay", "selection")),
    *(f"experiments/{name}.py" for name in ("driver", "client", "summary")),
    *(f"experiments/sweep/{name}.py" for name in ("cases", "conditions", "live")),
)
CLOSED_LOOPS = (*SIMULATOR, "experiments/sweep/closed_loop.py")
CODE = {  # by a case's kind: all that a row's figures depend on
    "point": SIMULATOR,
    "live": SERVERS,
    "sessionpoint": CLOSED_LOOPS,
}
FIGURES = (
    *("job_mean_s", "job_mean_cold_s", "job_mean_warm_s", "job_p50_s", "job_p90_s", "job_p95_s", "job_p99_s"),
    *("ttft_mean_s", "ttft_p99_s", "ttft_max_s", "end_s", "jobs", "jobs_per_s", "busy_share"),
    *("gpu_tokens", "dram_tokens", "ssd_tokens", "offload_tokens", "computed_tokens", "scheduled_tokens"),
    *("steps", "preemptions", "pins_taken", "pins_reused", "pins_expired", "pins_reclaimed"),
    "measured",
)
SESSION_FIGURES = (
    *("tokens_per_s", "goodput_10", "goodput_30", "goodput_60", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
    *("ttft_max_s", "ttft_mean_s", "interactivity_p90", "turns", "in_time_share", "sessions_in_time_share"),
    *("starved_sessions", "tpot_s", "programs", "programs_in_time_share", "job_p95_s"),
    *("start_s", "end_s", "twice_tokens", "measured"),
)
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sheet:
    """The columns of one file."""

    kinds: tuple[type, ...]  # of cases
    figures: tuple[str, ...]
    conditions: tuple[str, ...] = ()  # conditions.CONDITIONS, where rows depend on them

    @property
    def columns(self) -> tuple[str, ...]:
        known = dict.fromkeys(field.name for kind in self.kinds for field in fields(kind))
        return ("key", "code", "kind", *known, *self.figures, *self.conditions)


SWEEP = Sheet((Point,), FIGURES)
SESSIONS = Sheet((SessionPoint,), SESSION_FIGURES)
LIVE = Sheet((Live,), (*FIGURES, "start_s", "probe_s"), CONDITIONS)


@cache
def code(kind: str) -> str:
    """Names the schema, the versions and the source that rows of this kind come from."""
    engines = versions() if kind == "live" else _vllm_version()
    digest = hashlib.sha256(f"{SCHEMA} {engines}".encode())
    for path in sorted(path for pattern in CODE[kind] for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _vllm_version() -> str:
    names = metadata.packages_distributions().get("vllm", ())
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))


def key(case: Case) -> str:
    """Names the case and the code, that of a policy of one's own among it."""
    known = inputs(case)
    module, colon, _ = case.contender.partition(":")
    source = [Path(str(import_module(module).__file__)).read_text()] if colon else []
    text = json.dumps([code(known["kind"]), known, *source], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Rows:
    """The rows of one file that this code made. `add` writes at once, so a stopped sweep loses nothing."""

    def __init__(self, path: Path, sheet: Sheet = SWEEP) -> None:
        self.path, self.sheet = path, sheet
        self.found: dict[str, Row] = {r["key"]: r for r in _read(path, sheet.columns) if _is_of_now(r)}

    def missing(self, cases: Iterable[Case]) -> list[Case]:
        """The cases without a row, each once, in their order."""
        return [case for name, case in {key(c): c for c in cases}.items() if name not in self.found]

    def of(self, cases: Iterable[Case]) -> list[Row]:
        """The rows of the cases, in their order; cases without one are left out."""
        return [self.found[name] for name in dict.fromkeys(map(key, cases)) if name in self.found]

    def add(self, case: Case, figures: Mapping[str, Any]) -> Row:
        """Append the case's row."""
        if unknown := figures.keys() - set(self.sheet.figures):
            raise SweepError(f"no column for {', '.join(sorted(unknown))}; add it to rows.py")
        known = inputs(case)
        measured_on = conditions() if self.sheet.conditions else {}
        values = {"key": key(case), "code": code(known["kind"]), **known, **figures, **measured_on}
        row = {name: "" if values.get(name) is None else str(values[name]) for name in self.sheet.columns}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.sheet.columns)
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        self.found[row["key"]] = row
        return row


def _is_of_now(row: Row) -> bool:
    is_here = MACHINE not in row or row[MACHINE] == machine()
    return is_here and row["kind"] in CODE and row["code"] == code(row["kind"])


def _read(path: Path, columns: Sequence[str]) -> Sequence[Row]:
    """All rows of a file; none if there is no file. An incomplete line of a killed run is refused."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if tuple(reader.fieldnames or ()) != columns:
        raise SweepError(f"{path} has not the columns of schema {SCHEMA}; move it or choose another --out")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise SweepError(f"{path}:{number} has not {len(columns)} cells (killed?); delete that line")
    return rows
