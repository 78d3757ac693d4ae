"""Does a live server learn from real tools? Real calls said and recognised, real gaps slept and learned.

    python -m experiments.live_ttl --trace ../shared/traces/agentcgroup.jsonl --turns 240

Starts a real `vllm serve` of the small model with `--scheduling-policy continuum`, and lets a few
programs of the trace at a time go through it. Structured outputs force each turn's text to be the
trace's tool call; the client says whose turn it is and never what was called, so the server must
read that. Then the recorded gap is really slept. Prompts are random tokens after the program's own
context, far shorter than the trace's.

The KV cache holds less than the programs at a time need together, so that turns queue and prefixes
are evicted: else T is 0, and a TTL pays only for the prefill. That prefill is measured first, on
this machine, by a server of its own (`--profile` takes a measured one instead). No LMCache here.

A tool is judged by its own gaps from the 101st on (K = 100), which takes about 600 turns for two of
them; 240 turns leave the cold start behind, no more.

Read back from the recording: calls recognised, TTLs by tool, cold-start levels over time, and
whether P(tau) came true; the last also as a figure.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from rich.console import Console
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.errors import TraceError
from continuum_lmcache.records.recordings import load
from experiments.analyze import calibration_table
from experiments.client import Client, TurnFailed, request_body
from experiments.cpu_profile import profile, timed
from experiments.driver import Plan, random_tokens
from experiments.forced_calls import FORMS, Call, Script, forced, script, text
from experiments.live_tables import (
    after,
    command_of,
    decided,
    draw_views,
    levels_table,
    recognition_table,
    tool_and_level,
    ttl_table,
    views,
)
from experiments.server import ServerError, serve
from experiments.tiny_model import make_model
from experiments.workload import Program, load_trace

ROOT = Path(__file__).parents[1]
BLOCKS, WINDOW_TOKENS = 72, 6144  # of 128 tokens: ten contexts have 1,200 at the median, 2,200 at the P90
SIZES = ("--max-model-len", str(WINDOW_TOKENS), "--num-gpu-blocks-override", str(BLOCKS))
ARGS = (*SIZES, "--scheduling-policy", "continuum")
FIRST_TOKENS = 300  # a program's first prompt
RESULT_TOKENS = 32  # what a tool's result adds to the next prompt, at most
EARLY_TURNS = 200  # calibration is asked for after these
FAREWELL = "Done."
NOT_TOOL_TIME = "glm"  # that group's model was slow, and its gaps hold it (the traces' README)
VOCABULARY = range(300, 4000)  # the small model's, without special tokens


@dataclass(frozen=True, slots=True)
class Pace:
    """How the tools' gaps are slept."""

    time_scale: float
    longest_s: float  # a recorded gap beyond this is slept so long

    def sleep_s(self, call: Call) -> float:
        return min(call.gap_s, self.longest_s) * self.time_scale


def chosen(programs: Sequence[Program], turns: int, most_calls: int, seed: int) -> tuple[Script, ...]:
    """Programs in a drawn order, in turn in each format, until their turns (farewells included) suffice.

    Raises TraceError if the trace has fewer.
    """
    tools = [p for p in programs if NOT_TOOL_TIME not in p.source]
    found: list[Script] = []
    for at in np.random.default_rng(seed).permutation(len(tools)):
        said = script(tools[at], FORMS[len(found) % len(FORMS)], most_calls)
        found += [said] if said.calls else []
        missing = turns - sum(len(s.calls) + 1 for s in found)
        if missing <= 0:
            return tuple(found)
    raise TraceError(f"the trace has {turns - missing} usable turns, {turns} are wanted; ask for fewer")


async def play(said: Script, plan: Plan, pace: Pace, client: Client, bar: tqdm[Any]) -> None:
    """One program from its first turn to its farewell. Raises TurnFailed."""
    history = tuple(random_tokens(plan, stream(said, 0), FIRST_TOKENS))
    for number, call in enumerate(said.calls, 1):
        body = request_body(plan.model, history, 1) | forced(text(call, said.form))
        answer = await client.complete(body | {"job_id": said.program})
        bar.update()
        added = random_tokens(plan, stream(said, number), min(RESULT_TOKENS, max(1, call.result_tokens)))
        history = (*history, *answer.token_ids, *added)
        await asyncio.sleep(pace.sleep_s(call))
    last = {"job_id": said.program, "is_last_step": True}
    await client.complete(request_body(plan.model, history, 1) | forced(FAREWELL) | last)
    bar.update()


def stream(said: Script, number: int) -> tuple[int, ...]:
    return (number, *said.program.encode())


async def play_all(url: str, scripts: Sequence[Script], plan: Plan, pace: Pace, at_once: int) -> None:
    """All programs, `at_once` of them at a time. Raises the first TurnFailed."""
    places = asyncio.Semaphore(at_once)
    turns = sum(len(s.calls) + 1 for s in scripts)
    async with Client(f"{url}/v1", timeout_s=300) as client:
        with tqdm(total=turns, unit="turn", mininterval=10) as bar:

            async def one(said: Script) -> None:
                async with places:
                    await play(said, plan, pace, client, bar)

            await asyncio.gather(*map(one, scripts))


def measured(model: Path, path: Path) -> Path:
    """The profile at `path`; if there is none, from a server that caches nothing."""
    if not path.exists():
        with serve(model, (*SIZES, "--no-enable-prefix-caching"), log=path.with_suffix(".log")) as url:
            seen = asyncio.run(timed(url, "tiny"))
        path.write_text(yaml.safe_dump(profile(seen), sort_keys=False))
    return path


def report(out: Path, scripts: Sequence[Script], console: Console) -> None:
    """Print what the recording says and draw the calibration."""
    run = load(out)
    console.print(recognition_table(run, scripts))
    console.print(levels_table(run))
    late = after(run, len(decided(run)) // 2)
    console.print(ttl_table(late, tool_and_level, "TTL by tool and by whose gaps, second half of the run"))
    console.print(ttl_table(late, command_of, "TTL by command, second half of the run"))
    for view in (shown := views(run, EARLY_TURNS)):
        console.print(calibration_table(view))
    draw_views(shown, out / "calibration.png")
    console.print(f"wrote {out / 'calibration.png'}; more: experiments.analyze report {out}", soft_wrap=True)


def main(
    trace: Annotated[Path, typer.Option(help="agentcgroup.jsonl")],
    turns: Annotated[int, typer.Option(help="at least so many, whole programs")] = 240,
    at_once: Annotated[int, typer.Option(help="programs at a time")] = 10,
    most_calls: Annotated[int, typer.Option(help="of a program, its first ones")] = 20,
    time_scale: Annotated[float, typer.Option(help="of the gaps slept")] = 1.0,
    longest_gap_s: Annotated[float, typer.Option(help="longer gaps are cut to this")] = 8.0,
    seed: Annotated[int, typer.Option(help="of the order of programs, and of prompts")] = 0,
    profile_file: Annotated[Path | None, typer.Option("--profile", help="measured costs (YAML)")] = None,
    out: Annotated[Path, typer.Option(help="folder of the recording, logs and figure")] = Path("live-ttl"),
) -> None:
    """Run, then report."""
    out.mkdir(parents=True, exist_ok=True)
    plan, pace = Plan("tiny", seed, VOCABULARY), Pace(time_scale, longest_gap_s)
    try:
        scripts = chosen(load_trace(trace), turns, most_calls, seed)
        model = make_model(ROOT / ".work" / "tiny-model")
        costs = profile_file or measured(model, out / "cpu-profile.yaml")
        with serve(model, ARGS, log=out / "server.log", env=environment(out, costs)) as url:
            asyncio.run(play_all(url, scripts, plan, pace, at_once))
        report(out, scripts, Console())
    except (TraceError, ServerError, TurnFailed) as error:
        print(f"error: {error} (logs: {out})", file=sys.stderr)
        raise typer.Exit(1) from error


def environment(out: Path, costs: Path) -> dict[str, str]:
    """The server's: policy continuum, a recording into `out`, measured costs."""
    return {
        "RUN_OUTPUT_DIR": str(out.resolve()),
        "CONTINUUM_POLICY": "continuum",
        "CONTINUUM_PROFILE": str(costs.resolve()),
    }


if __name__ == "__main__":
    typer.run(main)
