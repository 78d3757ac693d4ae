"""AgentX, the field's benchmark, by its own harness: stock vLLM, the paper's policy and ours, or your server.

    python -m experiments.agentx                              ten minutes on two cores, to see that it works
    python -m experiments.agentx --contenders fcfs,continuum,continuum+LMCache --seconds 3600    on a GPU
    python -m experiments.agentx --url http://HOST:8000 --model NAME --window 262144 --label ours --gpus 2 \\
        --dataset semianalysis_cc_traces_weka_062126_256k          a run that counts

The harness has an environment of its own, made at the first run. Programs are those of --trace, else of
Claude Code's trace where it is at hand, else drawn from what was fitted to it. Each session names itself by
X-Session-ID. The harness' files stay in OUT/LABEL-SESSIONS; the table has every run in OUT.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from continuum_lmcache.errors import TraceError
from continuum_lmcache.vllm_plugin.files import write_whole
from experiments.gpu.agents import CONTENDERS, TRACE, Bench, serving
from experiments.gpu.place import PLACES, device_here, model_for
from experiments.peers.install import FOLDER, ROOT, environment
from experiments.selection import Selection
from experiments.server import ServerError, unwind_on_sigterm
from experiments.sessions import ANSWER_S, capped
from experiments.sim.trace_programs import FITTED, refuse_unknown
from experiments.tables import publish
from experiments.workload import Program

LOCK = ROOT / "requirements" / "agentx.lock"
BLOCK_TOKENS = 64  # of a trace's hashes; of a shrunk program as many fewer
LEAST_OUTPUT_TOKENS = 4  # an answer of special tokens alone is an error to the harness
PROGRAMS = 48
MARGIN_TOKENS = 512  # of a window: the chat template, and the line that makes each session's text its own
RULE_S = 3600.0  # and at least LEAST_S, or a run does not count
LEAST_S = 900.0
SHORT_S = 40.0
AROUND_S = 150.0  # a server's start, and the harness' own before and after a run
SHORT_GAP_S = 5.0  # shorter runs cap gaps here, or most sessions would do nothing but wait
SHOWN: Mapping[str, tuple[str, int]] = {
    "tokens_per_s": ("tok/s a GPU", 1),
    "ttft_p50_s": ("first token P50, s", 2),
    "ttft_p75_s": ("P75", 2),
    "ttft_p90_s": ("P90", 2),
    "ttft_p99_s": ("P99", 2),
    "ttft_max_s": ("longest", 2),
    "ttft_mean_s": ("mean", 2),
    "interactivity_p90": ("E2E interactivity P90, tok/s", 2),
    "hit_percent": ("prompt tokens cached, %", 0),
    "requests": ("requests", 0),
    "errors": ("errors", 0),
}
Row = dict[str, Any]


def as_weka(program: Program, model: str, block_tokens: int = BLOCK_TOKENS) -> dict[str, Any]:
    """The program as a file of the harness' `weka_trace`; hashes say what a prompt shares with the last.

    An answer's KV is never shared: the harness writes text of its own in its place. A prompt's part of a
    block is never repeated either, and a turn without a whole new block has no answer in the next prompt.
    """
    fresh, held, t_s, before = count(1), list[int](), 0.0, 0
    requests = []
    for turn in program.turns:
        del held[min(turn.kept_tokens, before) // block_tokens :]
        held += [next(fresh) for _ in range(-(-turn.input_tokens // block_tokens) - len(held))]
        took_s = turn.output_tokens * ANSWER_S
        out_tokens = max(LEAST_OUTPUT_TOKENS, turn.output_tokens)
        lengths = {"in": turn.input_tokens, "out": out_tokens, "hash_ids": [*held]}
        requests.append(
            {"t": t_s, "type": "s", "model": model, **lengths, "stop": "tool_use", "api_time": took_s}
        )
        t_s, before = t_s + took_s + (turn.gap_s or 0.0), turn.input_tokens
    named = {"id": program.program_id, "models": [model], "block_size": block_tokens}
    return {**named, "hash_id_scope": "local", "requests": requests}


def written(programs: Iterable[Program], model: str, block_tokens: int, folder: Path) -> Path:
    """A file for each program."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, program in enumerate(programs):
        (folder / f"{number:04d}.json").write_text(json.dumps(as_weka(program, model, block_tokens)))
    return folder


def chosen(trace: Path | None, window_tokens: int, seconds: float) -> tuple[tuple[Program, ...], int]:
    """The programs, shrunk to the window, and their block's tokens. Raises TraceError."""
    try:
        refuse_unknown(TRACE, "report")
        part = "report"
    except TraceError:
        part = FITTED
    selection = Selection(
        3,
        trace=trace,
        generator=f"{TRACE}:{part}",
        count=None if trace else PROGRAMS,
        jps=1.0,  # sessions do not look at arrivals
        max_context_tokens=window_tokens - MARGIN_TOKENS,
    )
    found, whole = selection.programs(), replace(selection, max_context_tokens=None).programs()
    share = max(p.context_tokens for p in found) / max(p.context_tokens for p in whole)
    block_tokens = max(1, round(BLOCK_TOKENS * share))
    return (capped(found, SHORT_GAP_S) if seconds < LEAST_S else found), block_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """What the harness plays, on which model."""

    model: str  # as it is served
    tokenizer: str
    sessions: int
    seconds: float
    source: tuple[str, ...]  # of the programs, as the harness' options
    gpus: int = 1
    by_session_id: bool = True  # sessions name themselves by X-Session-ID; else by X-Correlation-ID alone

    def run(self, url: str, out: Path) -> Row:
        """One run of the harness, with its files in `out`. Raises ServerError if it ends without results."""
        out.mkdir(parents=True, exist_ok=True)
        words = [str(harness() / "agentx"), "profile", "--url", url, "--endpoint", "/v1/chat/completions"]
        words += ["--model", self.model, "--tokenizer", self.tokenizer, "--concurrency", str(self.sessions)]
        words += ["--benchmark-duration", f"{self.seconds:.0f}", "--output-artifact-dir", str(out)]
        words += ["--ui", "simple", *self.source]
        # HF_HUB_OFFLINE: with it the harness refuses a tokenizer in a folder
        env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        env["AIPERF_HTTP_X_SESSION_ID_FROM_CORRELATION_ID"] = "1" if self.by_session_id else "0"
        log, export = out / "agentx.log", out / "profile_export_aiperf.json"
        export.unlink(missing_ok=True)
        with log.open("w") as lines:
            ran = subprocess.run(words, env=env, stdout=lines, stderr=lines, check=False, cwd=out)
        if not export.exists():
            raise ServerError(f"the harness ended with {ran.returncode} and no results; see {log}")
        return figures(json.loads(export.read_text()), self.gpus)


def figures(found: Mapping[str, Any], gpus: int) -> Row:
    """A row of SHOWN from the harness' results, and `counts`: its stamp, with the reasons against."""

    def of(name: str, part: str = "avg", unit: float = 1.0) -> float | None:
        value = found.get(name, {}).get(part)
        return None if value is None else unit * float(value)

    stamp = found["metadata"]
    parts = {"p50": "p50", "p75": "p75", "p90": "p90", "p99": "p99", "max": "max", "mean": "avg"}
    return {
        "tokens_per_s": of("output_token_throughput", unit=1 / gpus),
        **{f"ttft_{name}_s": of("time_to_first_token", part, 1e-3) for name, part in parts.items()},
        # the P90 of seconds a token, answer and wait together, as tokens a second
        "interactivity_p90": of("e2e_output_token_throughput", "p10"),
        "hit_percent": of("overall_usage_prompt_cache_read_pct"),
        "requests": of("request_count"),
        "errors": of("error_request_count") or 0.0,
        "counts": "yes" if stamp["submission_valid"] else ", ".join(stamp["submission_invalid_reasons"]),
    }


def harness() -> Path:
    """The `bin` of its environment, made if it is not there. Raises ServerError."""
    done = FOLDER / "agentx" / LOCK.name
    if not done.exists() or done.read_text() != LOCK.read_text():
        try:
            environment(FOLDER / "agentx", LOCK)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServerError(f"agentx-harness cannot be installed in {done.parent}: {error}") from error
        done.write_text(LOCK.read_text())
    return done.parent / "bin"


def measured(
    bench: Bench,
    save: Callable[[dict[str, Any]], None],
    earlier: Mapping[str, Any],
    load: Load,
    names: Sequence[str],
) -> dict[str, Any]:
    """Each contender's own server in turn, and one run on it. `save` gets all rows after each; what `earlier`
    has without a `why` is kept."""
    rows = [row for row in earlier.get("rows", ()) if "why" not in row]
    done = {row["label"] for row in rows}
    for who in (who for who in CONTENDERS if who.label in names and who.label not in done):
        row: Row = {"label": who.label, "sessions": load.sessions}
        with serving((who,), bench) as (servers, lacking):
            row |= {"why": lacking[who.label]} if lacking else {}
            for server in servers:
                with server.awake():
                    row |= tried(load, server.url, bench.out / f"{who.label}-{load.sessions}")
        rows.append(row)
        save({"rows": rows})
    return {"rows": rows, "failed": "; ".join(f"{r['label']}: {r['why']}" for r in rows if "why" in r)}


def stage(bench: Bench, save: Callable[[dict[str, Any]], None], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """For gpu_check: the first three contenders share the time that is left, an hour each at most."""
    seconds, work = min(RULE_S, bench.left_s / len(CONTENDERS[:3]) - AROUND_S), str(bench.model)
    if seconds < SHORT_S:
        return {**earlier, "failed": "no time was left"}
    try:
        harness()
    except ServerError as error:
        return {"failed": "", "skipped": str(error)}
    programs = chosen(None, bench.place.window_tokens, seconds)
    source = local(*programs, seconds, "tiny", bench.out / "trace")
    load = Load("tiny", work, max(bench.place.sessions), seconds, source)
    return measured(bench, save, earlier, load, [who.label for who in CONTENDERS[:3]])


def tried(load: Load, url: str, out: Path) -> Row:
    """The run's row, or `why` there is none."""
    try:
        return load.run(url, out)
    except ServerError as error:
        return {"why": str(error)}


def table(rows: Iterable[Row]) -> list[list[str]]:
    """A header, then a line for each run."""

    def cell(row: Row, name: str, digits: int) -> str:
        return "-" if row.get(name) is None else f"{row[name]:,.{digits}f}"

    lines = [
        [
            row["label"],
            str(row["sessions"]),
            *(cell(row, name, digits) for name, (_, digits) in SHOWN.items()),
            row.get("counts") or row["why"],
        ]
        for row in rows
    ]
    return [["", "sessions", *(words for words, _ in SHOWN.values()), "counts"], *lines]


def local(
    programs: Sequence[Program], block_tokens: int, seconds: float, model: str, folder: Path
) -> tuple[str, ...]:
    """The options for programs of our own. The rules name one public data set, so no such run counts."""
    place = written(programs, model, block_tokens, folder)
    files = ["--custom-dataset-type", "weka_trace", "--input-file", str(place)]
    files += ["--num-dataset-entries", str(len(programs)), "--allow-dataset-wrap", "--unsafe-override"]
    return (*files, "--warmup-requests-per-lane", "10" if seconds >= LEAST_S else "1")


def main(
    contenders: Annotated[str, typer.Option(help=f"of {', '.join(w.label for w in CONTENDERS)}")] = ",".join(
        who.label for who in CONTENDERS[:3]
    ),
    sessions: Annotated[int, typer.Option(min=0, help="live at once; 0: past what the cache holds")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="0: the rules' hour with --dataset, else 40")] = 0,
    trace: Annotated[Path | None, typer.Option(help="programs, as docs/report.md has them")] = None,
    dataset: Annotated[str, typer.Option(help="a public data set of the harness, in place of ours")] = "",
    url: Annotated[str, typer.Option(help="a running server, in place of the contenders")] = "",
    model: Annotated[str, typer.Option(help="--url: as it is served")] = "",
    tokenizer: Annotated[str, typer.Option(help="--url: a folder, or a name; default: --model")] = "",
    window: Annotated[int, typer.Option(min=0, help="--url: tokens of the model's window")] = 0,
    label: Annotated[str, typer.Option(help="--url: of its row")] = "server",
    gpus: Annotated[int, typer.Option(min=1, help="--url: that it has")] = 1,
    session_id: Annotated[
        bool, typer.Option(help="sessions name themselves by X-Session-ID; else by the harness' default")
    ] = True,
    out: Annotated[Path, typer.Option(help="rows, table, the harness' files")] = Path("results/agentx"),
) -> None:
    """Run AgentX, and print a table."""
    if url and not (model and window):
        raise typer.BadParameter("--url needs the --model that it serves, and its --window")
    known = [who.label for who in CONTENDERS]
    if unknown := [name for name in contenders.split(",") if name not in known]:
        raise typer.BadParameter(f"--contenders {unknown[0]!r} is not known; known: {', '.join(known)}")
    unwind_on_sigterm()
    place, out = PLACES[device_here()], out.resolve()
    seconds = seconds or (RULE_S if dataset else SHORT_S)
    work = model_for(place, ROOT / ".work")
    try:
        model, window = model or "tiny", window or place.window_tokens
        source = ("--public-dataset", dataset)
        if not dataset:
            source = local(*chosen(trace, window, seconds), seconds, model, out / "trace")
        tokens = tokenizer or (model if url else str(work))
        if (place_of_tokens := Path(tokens)).is_dir():
            tokens = str(place_of_tokens.resolve())  # the harness has a working folder of its own
        load = Load(model, tokens, sessions or max(place.sessions), seconds, source, gpus, session_id)
        harness()
    except (TraceError, ServerError) as error:
        raise SystemExit(f"agentx: {error}") from error
    kept = out / "agentx.json"
    earlier = json.loads(kept.read_text())["rows"] if kept.exists() else []

    def save(found: Mapping[str, Any]) -> None:
        write_whole(kept, [json.dumps(found, indent=1), "\n"])

    if url:
        named = {"label": label, "sessions": load.sessions}
        rows = [row for row in earlier if not named.items() <= row.items()]
        rows.append(named | tried(load, url, out / f"{label}-{load.sessions}"))
    else:
        bench = Bench(place, work, ROOT / "profiles" / place.profile, out, time.monotonic() + 1e6)
        rows = measured(bench, save, {}, load, contenders.split(","))["rows"]
    save({"rows": rows})
    title = f"AgentX, {dataset or trace or TRACE}, {seconds:.0f} s a run"
    publish(table(rows), title, [], out / "agentx")
    raise SystemExit(any(row.get("why") or row["errors"] for row in rows))


if __name__ == "__main__":
    typer.run(main)
