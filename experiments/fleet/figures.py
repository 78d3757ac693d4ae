"""The figures of a fleet's run in a row (rows.FLEET_FIGURES)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from experiments.fleet.workloads import alone_s
from experiments.sim.result import TurnResult, percentile
from experiments.sim.step_time import Machine
from experiments.workload import Program

if TYPE_CHECKING:
    from experiments.fleet.run import FleetResult, Move

SETTLED_TURNS = 5  # a move was right if its program does not move again within this many turns


def figures(
    found: FleetResult, programs: Sequence[Program], machine: Machine, replicas: int, cool_s: float
) -> dict[str, Any]:
    """Seconds, tokens, counts and shares; `replicas` as at the start."""
    result, turns = found.result, found.result.turns
    jobs_s = [job.job_s for job in result.jobs]
    ttfts_s = [turn.ttft_s for turn in turns]
    firsts_s = [turn.ttft_s for turn in turns if turn.number == 1]
    laters_s = [turn.ttft_s for turn in turns if turn.number > 1] or [0.0]
    by_replica = ttft_p90_s(found, replicas)
    tokens, alone = result.tokens, [alone_s(program, machine) for program in programs]
    prompts = sum(tokens.values())
    moves = [move for move in found.moves if not move.is_forced]
    return {
        "job_mean_s": result.mean_job_s,
        **{f"job_p{p}_s": percentile(jobs_s, p) for p in (50, 90, 99)},
        "end_s": result.end_s,
        "jobs": len(jobs_s),
        "turns": len(turns),
        **spread_of("ttft", ttfts_s),
        **spread_of("tpot", [tpot_s(turn) for turn in turns if turn.output_tokens > 1]),
        **spread_of("e2e", [turn.finished_s - turn.arrival_s for turn in turns]),
        "ttft_max_s": max(ttfts_s),
        "first_ttft_mean_s": mean(firsts_s),
        "first_ttft_max_s": max(firsts_s),
        "later_ttft_p99_s": percentile(laters_s, 99),
        "ttft_p90_median_s": median(by_replica),
        "ttft_p90_max_s": max(by_replica),
        "ttft_p90_by_replica_s": " ".join(f"{value:.2f}" for value in by_replica),
        "stretch": sum(jobs_s) / sum(alone),
        "amplification": result.end_s / max(p.arrival_s + s for p, s in zip(programs, alone, strict=True)),
        "closed_share": closed_share(turns, programs),
        "gpu_share": tokens["gpu"] / prompts,
        "dram_share": tokens["dram"] / prompts,
        "computed_share": tokens["computed"] / prompts,
        "reuse_bound": sum(t.kept_tokens for p in programs for t in p.turns) / prompts,
        "scheduled_tokens": result.scheduled_tokens,
        "busy_share": result.busy_s / result.end_s / replicas,
        "moves": len(moves),
        "moves_share": len(moves) / len(turns),
        "moves_accurate_share": accurate_share(moves),
        "thrash": thrash(moves, cool_s),
        "copies": len(found.copies_s),
        "copy_mean_s": mean(found.copies_s or [0.0]),
        "copy_max_s": max(found.copies_s, default=0.0),
        "held": len(found.waits_s),
        "held_mean_s": mean(found.waits_s.values() or [0.0]),
        "lost_turns": found.lost_turns,
        "rehomed": len(found.moves) - len(moves),
        "rehomed_s": found.rehomed_s,
        "preemptions": result.preemptions,
        "steps": result.steps,
        "measured": result.measured,
    }


def spread_of(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles as columns."""
    return {f"{name}_mean_s": mean(values), **{f"{name}_p{p}_s": percentile(values, p) for p in (50, 90, 99)}}


def tpot_s(turn: TurnResult) -> float:
    """Seconds a token after the first."""
    return (turn.finished_s - turn.first_token_s) / (turn.output_tokens - 1)


def ttft_p90_s(found: FleetResult, replicas: int) -> list[float]:
    """Of each replica that answered a turn: the wait at the router is part of it."""
    by: list[list[float]] = [[] for _ in range(replicas)]
    for turn in found.result.turns:
        by[found.replica_of[turn.program_id, turn.number]].append(turn.ttft_s)
    return [percentile(values, 90) for values in by if values]


def closed_share(turns: Sequence[TurnResult], programs: Sequence[Program]) -> float:
    """Of the turns that another one follows: those that took longer than the tool after them."""
    gaps_s = {(p.program_id, at): turn.gap_s for p in programs for at, turn in enumerate(p.turns, 1)}
    pairs = [(t.finished_s - t.arrival_s, gaps_s[t.program_id, t.number]) for t in turns]
    longer = [took_s > gap_s for took_s, gap_s in pairs if gap_s is not None]
    return sum(longer) / len(longer) if longer else 0.0


def accurate_share(moves: Sequence[Move]) -> float:
    """Of the moves, those whose program did not move again within SETTLED_TURNS; 1.0 for none."""
    again = sum(
        any(
            other.program == move.program and 0 < other.number - move.number <= SETTLED_TURNS
            for other in moves
        )
        for move in moves
    )
    return 1.0 - again / len(moves) if moves else 1.0


def thrash(moves: Sequence[Move], cool_s: float) -> int:
    """Moves within `cool_s` of the same program's last one."""
    last_s: dict[str, float] = {}
    count = 0
    for move in moves:
        count += move.at_s - last_s.get(move.program, -math.inf) < cool_s
        last_s[move.program] = move.at_s
    return count
