"""Programs of real agents' traces for the simulator: chosen, cut to a window, in two halves, with arrivals.

The traces are not part of the project: a folder holds them (TRACES_DIR, else shared/traces beside the
checkout), and without it `half` raises TraceError. Programs are split by a hash of their name: what
is tuned is tuned on the half "tune", and reported from the half "report".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from zlib import crc32

import numpy as np

from continuum_lmcache.errors import TraceError
from experiments.sessions import TREE_IDLE_S, capped
from experiments.sim.fitted_programs import pool, shapes
from experiments.sim.step_time import Machine
from experiments.workload import (
    SAMPLE,
    Program,
    TurnSpec,
    gaps_mapped,
    load_trace,
    poisson_arrivals,
    scaled,
    unknown_gaps,
    with_gaps,
)

ROOT = Path(__file__).resolve().parents[2]
WINDOW_TOKENS = 131_072  # of the simulated model (Llama 3.1)
LONGEST_GAP_S = 600.0  # a longer one is an absent user's; it is cut to this
CHUNK_TOKENS = 2048  # the prefill chunk that `work_s` assumes,
DECODE_BATCH = 8  # and the turns that decode together
HALVES = ("tune", "report")
MEAN_PROMPT_TOKENS = 98_744  # of Claude Code's programs in a window of 262,144 tokens
PUBLISHED_ANSWERS, PUBLISHED_POWER = 1.72, 1.7  # times as long at that prompt, and by so much more at longer
FITTED = "fitted"  # stands where a half does: programs drawn from what `tune` was fitted to


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Which programs of which file."""

    file: str
    sources: tuple[str, ...] = ("",)  # a program is taken whose source contains one of these
    gaps_of: str = ""  # key of SOURCES whose tool gaps stand in where the trace says none


SOURCES = {
    "claude-code-swe": TraceSource("agentcgroup.jsonl", ("haiku", "sonnet")),  # not the local model's gaps
    "claude-code": TraceSource("weka_claude_code.jsonl"),
    "mini-swe": TraceSource("lmcache_miniswe.jsonl", gaps_of="claude-code-swe"),
    "bfcl": TraceSource("bfcl_v4_multi_turn.jsonl", gaps_of="claude-code-swe"),
    "chat": TraceSource("mooncake_conversation.jsonl"),
}


def traces_folder() -> Path:
    """Where the traces are. Raises TraceError where they are not."""
    folder = Path(os.environ.get("TRACES_DIR", ROOT.parent / "shared" / "traces"))
    if not folder.is_dir():
        raise TraceError(
            f"no traces in {folder}; set TRACES_DIR to the folder that has them (experiments/README.md), or "
            f"take programs that were fitted to one: --half {FITTED} --trace {' or '.join(shapes())}"
        )
    return folder


def half_of(program_id: str) -> str:
    """`tune` or `report`, by a stable hash."""
    return HALVES[crc32(program_id.encode()) % 2]


def refuse_unknown(name: str, part: str) -> None:
    """Raises TraceError if there is no such trace, half, fitted generator or folder."""
    parts = (*HALVES, FITTED)
    if name not in SOURCES or part not in parts:
        raise TraceError(
            f"no trace {name!r} with half {part!r}; --trace: {', '.join(SOURCES)}; --half: {', '.join(parts)}"
        )
    if part == FITTED and name not in shapes():
        raise TraceError(f"no generator was fitted to {name!r}; there is one for {', '.join(shapes())}")
    if part != FITTED:
        traces_folder()


@cache
def half(name: str, part: str, window_tokens: int = WINDOW_TOKENS) -> tuple[Program, ...]:
    """One half of a trace's programs, each within the window, every gap known. Raises TraceError.

    For FITTED those of sim/fitted_programs.py, which need no trace.
    """
    refuse_unknown(name, part)
    if part == FITTED:
        return pool(name)
    # one factor shrinks all: what is twice too long for the window is left out, or the rest would be tiny
    fitting = [p for p in _chosen(name, part) if p.context_tokens <= 2 * window_tokens]
    return scaled(_with_gaps(fitting, name), window_tokens)


@cache
def sessions_of(name: str, part: str, window_tokens: int) -> tuple[Program, ...]:
    """The same half for a closed loop: nothing shrunk, each program until its window is full.

    Raises TraceError. Gaps are capped, and Claude Code's programs are `as_published`. The traces have no
    subagents: each program is a session with one request at a time.
    """
    refuse_unknown(name, part)
    programs = pool(name) if part == FITTED else _with_gaps(_chosen(name, part), name)
    programs = capped(programs, TREE_IDLE_S)
    if name == "claude-code":
        programs = tuple(as_published(p, window_tokens) for p in programs)
    return tuple(cut for p in programs if (cut := _cut(p, window_tokens)).turns)


def as_published(program: Program, window_tokens: int) -> Program:
    """The program with answers as long as those of the public closed-loop run.

    That run's corpus is a later draw of the same trace. Its prompts have the same lengths. Its answers are
    twice as long, and longer in longer contexts: a running request holds 137,000 tokens at 12 sessions,
    where prompts have 99,000 on average (records/sessions.md#the-machine). A prompt repeats no answer: the
    harness writes text of its own in its place.
    """

    def answer(turn: TurnSpec) -> int:
        longer = PUBLISHED_ANSWERS * (turn.input_tokens / MEAN_PROMPT_TOKENS) ** PUBLISHED_POWER
        return max(1, min(round(longer * turn.output_tokens), window_tokens - turn.input_tokens))

    turns, before = [], 0
    for turn in program.turns:
        new = turn.input_tokens - min(turn.kept_tokens, before)
        turns.append(replace(turn, new_tokens=new, output_tokens=answer(turn)))
        before = turn.input_tokens
    return replace(program, turns=tuple(turns))


def _cut(program: Program, window_tokens: int) -> Program:
    """The program until its first turn that does not fit."""
    turns = tuple(takewhile(lambda turn: turn.context_tokens <= window_tokens, program.turns))
    return replace(program, turns=(*turns[:-1], *(replace(last, gap_s=None) for last in turns[-1:])))


def _chosen(name: str, part: str = "") -> tuple[Program, ...]:
    """The trace's programs, of one half or of both."""
    source = SOURCES[name]
    programs = load_trace(traces_folder() / source.file)
    found = (p for p in programs if any(wanted in p.source for wanted in source.sources))
    return tuple(p for p in found if part in ("", half_of(p.program_id)))


def _with_gaps(programs: Sequence[Program], name: str) -> tuple[Program, ...]:
    """Missing gaps are drawn from the known ones; none is longer than LONGEST_GAP_S. All have answers."""
    said = _gaps_s(SOURCES[name].gaps_of or name) if unknown_gaps(programs) else []
    known = with_gaps(programs, lambda rng: said[rng.integers(len(said))], crc32(name.encode()))
    return tuple(_answered(gaps_mapped(p, lambda gap_s: min(gap_s, LONGEST_GAP_S))) for p in known)


def _answered(program: Program) -> Program:
    """An answer that was aborted before its first token gets one token: no engine can generate none."""
    turns = (replace(turn, output_tokens=max(1, turn.output_tokens)) for turn in program.turns)
    return replace(program, turns=tuple(turns))


def _gaps_s(name: str) -> list[float]:
    return [turn.gap_s for p in _chosen(name) for turn in p.turns[:-1] if turn.gap_s is not None]


def drawn(programs: Sequence[Program], count: int, seed: int) -> tuple[Program, ...]:
    """`count` programs with replacement, each with a unique name: no two share more than a head."""
    picks = np.random.default_rng([seed, SAMPLE]).integers(len(programs), size=count)
    return tuple(
        replace(programs[pick], program_id=f"{programs[pick].program_id}#{i}", source="")
        for i, pick in enumerate(picks)
    )


def work_s(program: Program, machine: Machine, decode_batch: int = DECODE_BATCH) -> float:
    """Seconds of `machine` that the program needs if nothing is computed twice.

    New tokens in chunks of CHUNK_TOKENS, each behind what was there; output in steps that `decode_batch`
    equal turns share.
    """
    total_s = 0.0
    for turn in program.turns:
        for at in range(turn.kept_tokens, turn.input_tokens, CHUNK_TOKENS):
            total_s += machine.seconds([(min(CHUNK_TOKENS, turn.input_tokens - at), at)])
        total_s += (
            turn.output_tokens * machine.seconds([(1, turn.input_tokens)] * decode_batch) / decode_batch
        )
    return total_s


def arriving(
    programs: Sequence[Program], count: int, load: float, seed: int, machine: Machine
) -> tuple[Program, ...]:
    """`count` of the programs, as a Poisson process that brings `load` seconds of work a second.

    Above 1.0 the machine cannot keep up; below, it can only while little is computed twice.
    """
    if load <= 0:
        raise TraceError(f"load is {load:g}; it must be above 0, such as 1.0 for all that the machine can do")
    mean_work_s = sum(work_s(program, machine) for program in programs) / len(programs)
    return poisson_arrivals(drawn(programs, count, seed), load / mean_work_s, seed)
