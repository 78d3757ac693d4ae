"""Replay agent programs against any OpenAI-compatible server that returns token ids (vLLM does).

    python -m experiments.replay --base-url http://127.0.0.1:8000/v1 --generator swe --jps 0.5 \\
        --programs 20 --max-context 8192 --policy-label continuum --out results

Writes LABEL-seedN.jsonl (a line per turn, as it ends: driver.TurnRecord) and LABEL-seedN.json (the
summary: summary.py). Nothing is retried; a turn that fails ends its program, and the exit status is 1.
Repeat on a fresh server, or with another seed: the same seed sends the same tokens again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer
from tqdm import tqdm

from continuum_lmcache.errors import TraceError
from experiments.client import Client, ServerUnusable
from experiments.driver import Identify, Plan, TurnRecord, anonymous, identity, run, run_sessions, untold
from experiments.selection import Selection
from experiments.sessions import SessionTurn, capped, figures
from experiments.summary import over_the_run, summarise
from experiments.workload import Program

SETTLE_S = 1.0  # vLLM publishes a step's metrics after its last token was sent
REPORT_S = 10.0  # between progress lines where there is no terminal
ORDINARY = range(300, 4000)  # token ids of experiments/tiny_model.py that are no special ones
SHARED_PREFIX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One replay: its programs, its server, and its name."""

    base_url: str
    label: str
    selection: Selection
    out: Path
    model: str | None = None  # None: the served one
    shared_prefix_tokens: int = SHARED_PREFIX_TOKENS
    identify: Identify = identity  # a turn's program fields
    timeout_s: float = 600.0  # the longest silence within a response
    engine_url: str = ""  # whose /metrics are read; "": those of base_url, unless that is a proxy

    @property
    def path(self) -> Path:
        """The file of the turns; the summary is beside it as .json."""
        return self.out / f"{self.label}-seed{self.selection.seed}.jsonl"

    def plan(self, model: str) -> Plan:
        """The plan for sending, once the model is known."""
        chosen = self.selection
        prefix = self.shared_prefix_tokens
        return Plan(model, chosen.seed, ORDINARY, prefix, chosen.time_scale, self.identify)

    def as_json(self) -> dict[str, Any]:
        """The settings of the run, for the summary."""
        chosen = self.selection
        how = {"label": self.label, "seed": chosen.seed, "jps": chosen.jps}
        return how | {"time_scale": chosen.time_scale, "workload": chosen.name}


def replay(job: Job, limit_s: float | None = None) -> dict[str, Any]:
    """Run a job to its end, or for `limit_s`, and return its summary.

    Raises TraceError or ServerUnusable before anything is sent. The summary has the failed turns, and the
    run time of the programs that the limit cut off.
    """
    return asyncio.run(_replay(job, job.selection.programs(warn), limit_s))


def replay_sessions(job: Job, sessions: int, counted_s: float, warm_up_s: float) -> dict[str, Any]:
    """Keep so many sessions live with the job's programs, and return what they got (sessions.figures).

    Gaps are capped, then scaled. Only the time after `warm_up_s` counts. A run with failed turns is no
    measurement: `errors` has their number. Raises TraceError or ServerUnusable before anything is sent.
    """
    return asyncio.run(_replay_sessions(job, sessions, counted_s, warm_up_s))


async def _replay_sessions(job: Job, sessions: int, counted_s: float, warm_up_s: float) -> dict[str, Any]:
    pool = capped(job.selection.programs(warn))
    async with Client(job.base_url, job.timeout_s) as client:
        model = usable_model(await client.models(), job, pool)
        job.out.mkdir(parents=True, exist_ok=True)
        turns: list[SessionTurn] = []
        with job.path.open("w", buffering=1) as lines:
            sink = Sink(lines, job.label, 0)
            loop = run_sessions(pool, job.plan(model), client.complete, sink.record, sessions, turns)
            running = asyncio.create_task(loop)
            done, _ = await asyncio.wait({running}, timeout=warm_up_s + counted_s)
            if done:
                await running  # re-raises its exception
            found = figures(turns, sessions, warm_up_s, warm_up_s + counted_s)
            running.cancel()
            await asyncio.wait({running})
            sink.bar.close()
    found["errors"] = sum(record.error is not None for record in sink.records)
    how = {"sessions": sessions, "counted_s": counted_s, "warm_up_s": warm_up_s, "model": model}
    job.path.with_suffix(".json").write_text(json.dumps(job.as_json() | how | found, indent=1) + "\n")
    return found


async def _replay(job: Job, programs: tuple[Program, ...], limit_s: float | None = None) -> dict[str, Any]:
    async with Client(job.base_url, job.timeout_s) as client:
        model = usable_model(await client.models(), job, programs)
        before = await client.metrics_text(job.engine_url)
        job.out.mkdir(parents=True, exist_ok=True)
        with job.path.open("w", buffering=1) as lines:  # a line is on disk as soon as it is written
            sink = Sink(lines, job.label, sum(len(program.turns) for program in programs))
            running = asyncio.create_task(run(programs, job.plan(model), client.complete, sink.record))
            done, _ = await asyncio.wait({running}, timeout=limit_s)
            if done:
                await running  # re-raises its exception
                await asyncio.sleep(SETTLE_S)
            server = over_the_run(before, await client.metrics_text(job.engine_url))
            # only now: vLLM 0.32's engine may die of requests that are given up while LMCache loads for them
            running.cancel()
            await asyncio.wait({running})
            sink.bar.close()
    summary = summarise(sink.records, server, job.as_json() | {"model": model, "programs": len(programs)})
    summary["cut_s"] = cut_s(programs, sink.records, limit_s)
    summary["new_tokens"] = new_tokens(programs, sink.records)
    job.path.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def cut_s(programs: Iterable[Program], records: Iterable[TurnRecord], limit_s: float | None) -> list[float]:
    """The run times of the programs that neither ended nor failed before the limit."""
    over = {r.program for r in records if r.error is not None or r.turn == r.of_turns}
    ran_s = (limit_s - p.arrival_s for p in programs if limit_s is not None and p.program_id not in over)
    return sorted(ran for ran in ran_s if ran > 0)


def new_tokens(programs: Iterable[Program], records: Iterable[TurnRecord]) -> int:
    """Prompt tokens of the answered turns that no earlier turn had, so no cache can have their KV."""
    specs = {p.program_id: p.turns for p in programs}
    return sum(specs[r.program][r.turn - 1].new_tokens for r in records if r.error is None)


def usable_model(served: dict[str, int | None], job: Job, programs: tuple[Program, ...]) -> str:
    """The model's name, after a check that every turn fits its window. Raises ServerUnusable."""
    names = ", ".join(sorted(served)) or "nothing"
    if job.model is None and len(served) != 1:
        raise ServerUnusable(f"{job.base_url} serves {names}; say which one with --model")
    model = next(iter(served)) if job.model is None else job.model
    if model not in served:
        raise ServerUnusable(f"{job.base_url} does not serve {model!r}; it serves {names}")
    window, needed = served[model], max(program.context_tokens for program in programs)
    if window is not None and needed > window:
        raise ServerUnusable(f"a turn needs {needed} tokens, {model} has {window}; give --max-context")
    return model


class Sink:
    """Keeps every record in memory and on disk, and shows progress: a bar, or a line every REPORT_S."""

    def __init__(self, lines: TextIO, label: str, turns: int) -> None:
        self.records: list[TurnRecord] = []
        self._lines = lines
        live = sys.stderr.isatty()
        pace_s = 0.2 if live else REPORT_S
        end = {} if live else {"bar_format": "{desc}: {n_fmt} of {total_fmt} turns after {elapsed}\n"}
        self.bar = tqdm(total=turns, desc=label, unit="turn", mininterval=pace_s, maxinterval=pace_s, **end)

    def record(self, turn: TurnRecord) -> None:
        """A turn ended. A failed turn ends its program."""
        self.records.append(turn)
        self._lines.write(json.dumps(asdict(turn)) + "\n")
        if turn.error is not None:
            warn(f"{turn.program} turn {turn.turn} failed: {turn.error}")
        self.bar.update(1 if turn.error is None else turn.of_turns - turn.turn + 1)


def warn(line: str) -> None:
    """One line on stderr, above the progress bar."""
    tqdm.write(line, file=sys.stderr)


def main(
    base_url: Annotated[str, typer.Option(help="The server's API, as http://127.0.0.1:8000/v1.")],
    trace: Annotated[Path | None, typer.Option(help="A trace file; without it, --generator draws.")] = None,
    generator: Annotated[
        Literal["swe", "bfcl", "seeds-sweep"],
        typer.Option(help="Table 1's, or a sweep's."),
    ] = "swe",
    programs: Annotated[int | None, typer.Option(min=1, help="How many; default: all of a trace.")] = None,
    jps: Annotated[float | None, typer.Option(min=1e-6, help="Poisson arrivals a second.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of programs, arrivals and tokens.")] = 1,
    time_scale: Annotated[float, typer.Option(min=0, help="Of tool gaps and a trace's own arrivals.")] = 1.0,
    max_context: Annotated[int | None, typer.Option(min=1, help="Shrink programs to this window.")] = None,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens all programs start with.")] = 64,
    model: Annotated[str | None, typer.Option(help="Default: the one that is served.")] = None,
    policy_label: Annotated[str, typer.Option(help="The name of this run in files and tables.")] = "run",
    ids: Annotated[bool, typer.Option(help="Send job_id, is_last_step and this_func_call.")] = True,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest silence within a response.")] = 600.0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
    sessions: Annotated[int, typer.Option(min=0, help="So many live sessions, in place of arrivals.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of live sessions, that count.")] = 60.0,
    warm_up: Annotated[float, typer.Option(min=0, help="Minutes before these.")] = 30.0,
) -> None:
    """Replay agent programs against an OpenAI-compatible server."""
    if "/" in policy_label:
        raise typer.BadParameter(f"{policy_label!r} names files; it must not contain '/'")
    said = anonymous if not ids else untold if sessions else identity
    chosen = Selection(seed, trace, generator, programs, jps, max_context, time_scale)
    job = Job(base_url, policy_label, chosen, out, model, shared_prefix, said, timeout_s)
    try:
        if sessions:
            found = replay_sessions(job, sessions, 60 * minutes, 60 * warm_up)
            print(json.dumps(found, indent=1))
            raise SystemExit(1 if found["errors"] else 0)
        summary = replay(job)
    except (TraceError, ServerUnusable) as error:
        raise SystemExit(f"replay: {error}") from error
    shown = ("finished", "programs", "errors", "wall_s", "job_time_s", "ttft_s", "late_s", "tokens_by_source")
    print(json.dumps({name: summary[name] for name in shown}, indent=1))
    print(f"wrote {job.path} and {job.path.with_suffix('.json')}", file=sys.stderr)
    raise SystemExit(1 if summary["errors"] else 0)


if __name__ == "__main__":
    typer.run(main)
