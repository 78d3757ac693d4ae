"""How many programs the demo sends, how fast, and how much KV its servers get, from a machine's speed.

The scenario keeps proportions, so that memory is as short on a slow machine as on a fast one:

- arrivals: twice what the machine finishes, so that a backlog grows until the last one has come;
- memory: half of the programs have come and not ended when the last one comes, even where no work is
  wasted. GPU and DRAM hold half of their contexts, the GPU two thirds of that. LMCache's L1 has room for
  the longest context beside it, since a prompt on the disk loads only into free room (docs/lmcache.md). The
  disk (L2) holds everything;
- tool time: a third of the work, as 8 s are to 22.7 s in the paper's offload experiment (Continuum,
  arXiv 2511.02230, full version, Fig. 9). It has GPU KV for 7 contexts, and an hour for its backlog.

After the run `pressure` checks by the measurements whether memory was short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.driver import TurnRecord
from experiments.tiny_model import KV_BYTES_PER_TOKEN
from experiments.workload import Program

BLOCK_TOKENS = 128  # vLLM's default on a CPU; LMCache's chunk here
WINDOWS_TOKENS = (4096, 3072, 2048)  # longest contexts; the machine is measured with the first
OUTPUT_WORK, TURN_WORK = 4, 50  # what an output token and a turn cost, roughly, in new prompt tokens
ENOUGH_PROGRAMS = 24  # else a shorter window is taken
LEAST_PROGRAMS, MOST_PROGRAMS = 12, 40
ARRIVALS = 2.0  # times what the machine finishes
WASTE = 1.8  # times the least possible time, for computing KV again
BACKLOG = 0.5  # of the programs, when the last one comes
HELD_SHARE = 0.5  # of the backlog's contexts
GPU_SHARE = 2 / 3  # of what is held; the rest is DRAM's
LEAST_GPU_WINDOWS = 1.1  # longest contexts
LEAST_DRAM_WINDOWS = 0.4
FREE_WINDOWS = 1.02  # room that L1 keeps free for loads
TOOL_SHARE = 8.0 / 22.7  # of a program's own work
FULL_SHARE = 0.8  # of a burst's turns
START_FACTOR = 1.3  # a server with LMCache's beside it, in starts of one without
LEAST_REPLAY_S = 60.0  # in 37 s a slow machine ends few programs
LEAST_WASTE = 1.3  # the same for the fewest programs, where a machine is too slow to end in time


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes of a workload's programs; means per program."""

    turns: float
    tool_s: float
    tokens: float  # new prompt tokens, and OUTPUT_WORK for each output token; WINDOWS_TOKENS[0]
    context_tokens: float  # of a turn's prompt; WINDOWS_TOKENS[0]
    programs: int | None = None  # None: as many as one likes

    @classmethod
    def of(cls, programs: Sequence[Program], limited: bool) -> Work:
        count = len(programs)
        turns = [turn for program in programs for turn in program.turns]
        return cls(
            len(turns) / count,
            sum(turn.gap_s or 0.0 for turn in turns) / count,
            sum(turn.new_tokens + OUTPUT_WORK * turn.output_tokens for turn in turns) / count,
            sum(turn.input_tokens for turn in turns) / len(turns),
            count if limited else None,
        )

    def of_program(self, window_tokens: int) -> float:
        """The work of a program in new prompt tokens, if it is shrunk to this window."""
        return TURN_WORK * self.turns + self.tokens * window_tokens / WINDOWS_TOKENS[0]


@dataclass(frozen=True, slots=True)
class Measured:
    """How fast this machine is, with programs of WINDOWS_TOKENS[0]."""

    start_s: float  # until a server answered
    turn_s: float  # a turn, of a program that is alone
    work_per_s: float  # of many programs at once, nothing evicted; in new prompt tokens


@dataclass(frozen=True, slots=True)
class Scenario:
    """The programs that are sent, and the servers' memory."""

    programs: int
    jps: float
    time_scale: float
    window_tokens: int
    gpu_tokens: int
    dram_tokens: int  # that L1 keeps between evictions
    capacity_jps: float
    limit_s: float  # of one replay

    @property
    def gpu_blocks(self) -> int:
        return self.gpu_tokens // BLOCK_TOKENS + 1  # one is vLLM's null block

    @property
    def l1_tokens(self) -> int:
        return self.dram_tokens + math.ceil(FREE_WINDOWS * self.window_tokens)

    def l1_gb(self, dtype: str) -> float:
        """As LMCache counts, in GiB, of KV of this type."""
        return self.l1_tokens * KV_BYTES_PER_TOKEN[dtype] / 2**30

    @property
    def watermark(self) -> float:
        """The share of L1 above which LMCache evicts."""
        return self.dram_tokens / self.l1_tokens


def pressed(measured: Measured, work: Work, left_s: float, servers: int) -> Scenario:
    """Twice the load that the machine can serve, in too little memory, within `left_s` for all servers."""
    limit_s = max(LEAST_REPLAY_S, left_s / servers - START_FACTOR * measured.start_s)
    for window_tokens in WINDOWS_TOKENS:
        capacity_jps = measured.work_per_s / work.of_program(window_tokens)
        programs = math.floor(capacity_jps * limit_s / WASTE)
        if programs >= min(ENOUGH_PROGRAMS, work.programs or ENOUGH_PROGRAMS):
            break
    programs = min(max(programs, LEAST_PROGRAMS), MOST_PROGRAMS, work.programs or MOST_PROGRAMS)
    context_tokens = work.context_tokens * window_tokens / WINDOWS_TOKENS[0]
    held_tokens = HELD_SHARE * BACKLOG * programs * context_tokens
    return Scenario(
        programs,
        ARRIVALS * capacity_jps,
        time_scale(measured.turn_s, work),
        window_tokens,
        whole_blocks(max(GPU_SHARE * held_tokens, LEAST_GPU_WINDOWS * window_tokens)),
        whole_blocks(max((1 - GPU_SHARE) * held_tokens, LEAST_DRAM_WINDOWS * window_tokens)),
        capacity_jps,
        max(limit_s, LEAST_WASTE * programs / capacity_jps),
    )


def whole_blocks(tokens: float) -> int:
    """This many tokens or more, in whole blocks."""
    return math.ceil(tokens / BLOCK_TOKENS) * BLOCK_TOKENS


def time_scale(turn_s: float, work: Work) -> float:
    """Of tool times, so that they are TOOL_SHARE of a program's work when it is alone."""
    return TOOL_SHARE * turn_s * work.turns / work.tool_s if work.tool_s else 1.0


def rate(burst: Iterable[TurnRecord], of_turns: int) -> float:
    """The work a second until few turns were left, whose programs no longer fill a batch."""
    ended = sorted((r for r in burst if r.t_done is not None), key=lambda r: r.t_done or 0.0)
    full = ended[: max(1, round(FULL_SHARE * of_turns))]
    contexts: dict[str, int] = {}
    done = 0.0
    for r in full:
        new_tokens = max(0, r.prompt_tokens - contexts.get(r.program, 0))
        done += new_tokens + OUTPUT_WORK * r.output_tokens + TURN_WORK
        contexts[r.program] = r.prompt_tokens + r.output_tokens
    assert full[-1].t_done is not None
    return done / full[-1].t_done


# ---- after the run


@dataclass(frozen=True, slots=True)
class Proportion:
    """One proportion: its measured value and its required one."""

    words: str
    value: float
    least: float

    @property
    def holds(self) -> bool:
        return self.value >= self.least


def pressure(
    summary: Mapping[str, Any], arrivals_s: Sequence[float], best_jobs_per_s: float
) -> tuple[Proportion, ...]:
    """Whether memory was short for the baseline: by its own replay, and by the fastest server's programs a
    second. `arrivals_s`: of the programs."""
    last_s = max(arrivals_s, default=0.0)
    jps = (len(arrivals_s) - 1) / last_s if last_s else 0.0
    before = summary["prompt_tokens"] - summary["new_tokens"]
    lost = 1 - summary["tokens_by_source"].get("gpu", 0) / before if before > 0 else 0.0
    return (
        Proportion("arrivals over what the fastest server finished", jps / best_jobs_per_s, 1.2),
        Proportion("share of the tokens seen before that the GPU had lost", lost, 0.25),
    )
