"""Runs in the simulator what a real server served: the same programs and settings, on a measured machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from experiments import small_tiers
from experiments.replay import SHARED_PREFIX_TOKENS
from experiments.selection import Selection
from experiments.sim.engine import simulate
from experiments.sim.serving import STOCK, Setup
from experiments.sim.step_time import Machine, StepCurve
from experiments.sim.workloads import with_tool_time
from experiments.workload import Program

SHORT_TOKENS, BATCH = 16, 6
REUSED_TOKENS = 8 * small_tiers.BLOCK_TOKENS  # of a long prompt sent again, by either cache
LONG_TOKENS = REUSED_TOKENS + small_tiers.BLOCK_TOKENS // 2


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """A real server's probe times after its replay, in seconds. The simulator gets nothing else of it."""

    short_s: float  # from sending SHORT_TOKENS to the first token
    long_s: float  # the same for LONG_TOKENS
    again_s: float  # and for those once more, when all but REUSED_TOKENS lie in the KV cache
    alone_s: float  # between two tokens of a turn alone
    batch_s: float  # between two tokens of BATCH turns at once


@dataclass(frozen=True, slots=True)
class ServerOverhead:
    """A server's times besides the profile's steps."""

    slower: float = 1.0  # times as long as the profile says computing takes
    hop_s: float = 0.0  # from sending to the engine and back, without the step
    hop_per_token_s: float = 0.0  # and for each token of the prompt
    step_s: float = 0.0  # the server's own, each step
    per_sequence_s: float = 0.0  # and for each turn in it: answers are sent, read and written

    def hop_of(self, prompt_tokens: int) -> float:
        return self.hop_s + self.hop_per_token_s * prompt_tokens

    def added_to(self, machine: Machine) -> Machine:
        """The machine with these times in its steps."""
        same = ("half_rate_tokens", "samples")
        step = {n: getattr(machine.step, n) * self.slower for n in StepCurve.__slots__ if n not in same}
        step["fixed_s"] += self.step_s
        step["per_sequence_s"] += self.per_sequence_s
        return replace(machine, step=replace(machine.step, **step))


def overhead_of(probes: ProbeTimes, machine: Machine) -> ServerOverhead:
    """The unknowns of ServerOverhead from the five times: each differs from another in one of them.

    A long prompt and the same again differ by computing alone, again and short by the prompt's way,
    a turn alone from the profile by the server's own time, and a batch from that by the turns in it.
    """
    short, long, again = ((SHORT_TOKENS, 0), (LONG_TOKENS, 0), (LONG_TOKENS - REUSED_TOKENS, REUSED_TOKENS))
    short_s, long_s, again_s, one_s, batch_s = (
        machine.seconds(batch) for batch in ([short], [long], [again], [DECODE], [DECODE] * BATCH)
    )
    slower = (probes.long_s - probes.again_s) / (long_s - again_s)
    way_s = probes.again_s - probes.short_s - slower * (again_s - short_s)
    per_token_s = max(0.0, way_s / (LONG_TOKENS - SHORT_TOKENS))
    step_s = max(0.0, probes.alone_s - slower * one_s)
    more_s = probes.batch_s - probes.alone_s - slower * (batch_s - one_s)
    hop_s = probes.short_s - slower * short_s - step_s - per_token_s * SHORT_TOKENS
    return ServerOverhead(slower, max(0.0, hop_s), per_token_s, step_s, max(0.0, more_s / (BATCH - 1)))


DECODE = (1, SHORT_TOKENS)


GPU_GIB = small_tiers.GPU_BLOCKS * small_tiers.BLOCK_TOKENS * small_tiers.KV_BYTES_PER_TOKEN / 2**30


def lmcache_tiers(dram_gib: float, ssd_gib: float, chunk_tokens: int) -> dict[str, Any]:
    """Our connector's LMCache of such sizes, as the fake connector's settings.

    In-process, so loads and stores block. Every contender that offloads has it, under fcfs too: stock
    in-process LMCache, whose save_decode_cache is False (as its MP mode's is), caches nothing on a CPU.
    """
    return {
        "dram_gb": dram_gib,
        "ssd_gb": ssd_gib,
        "chunk_tokens": chunk_tokens,
        "save_decode_cache": True,  # connectors/lmcache/known_issues.py
        "async": False,
    }


def predicted(
    chosen: Selection,
    machine: Machine,
    overhead: ServerOverhead,
    policy: str,
    offloads: bool,
    step_tokens: int,
    max_seqs: int,
) -> dict[str, Any]:
    """The simulator's figures for one replay, in the columns of fidelity_tables."""
    programs = behind_a_hop(with_tool_time(chosen.programs(lambda _: None), chosen.time_scale), overhead)
    setup = Setup(
        policy=STOCK if policy == "fcfs" else policy,
        tiers=lmcache_tiers(GPU_GIB, 2 * GPU_GIB, small_tiers.CHUNK_TOKENS) if offloads else None,
        machine=overhead.added_to(machine),
        step_tokens=step_tokens,
        max_seqs=max_seqs,
        block_tokens=small_tiers.BLOCK_TOKENS,
        shared_tokens=SHARED_PREFIX_TOKENS,
        store_stalls=offloads,
    )
    result = simulate(programs, setup)
    first_s = {p.program_id: overhead.hop_of(p.turns[0].context_tokens) for p in programs}
    jobs_s = [job.job_s + first_s[job.program_id] for job in result.jobs]
    tokens = result.tokens
    prompts = sum(tokens.values())
    return {
        "mean_s": float(np.mean(jobs_s)),
        "p95_s": float(np.percentile(jobs_s, 95)),
        "gpu_share": tokens["gpu"] / prompts,
        "offload_share": (tokens["dram"] + tokens["ssd"]) / prompts,
        "computed_share": tokens["computed"] / prompts,
        **asdict(overhead),
    }


def behind_a_hop(programs: tuple[Program, ...], overhead: ServerOverhead) -> tuple[Program, ...]:
    """The programs as the engine sees them: each turn arrives one hop after its client sent it."""

    def later(program: Program) -> Program:
        turns = list(program.turns)
        for number, (turn, then) in enumerate(pairwise(program.turns)):
            assert turn.gap_s is not None  # only the last has none
            turns[number] = replace(turn, gap_s=turn.gap_s + overhead.hop_of(then.context_tokens))
        return replace(program, turns=tuple(turns))

    return tuple(map(later, programs))
