"""The closed loop: N sessions are always live, and what counts is what each of them gets.

A session plays one program turn by turn. When the program ends, the session draws another. No two programs
share more than a head. Of AgentX's rules (agentx-harness 1.0.12, aiperf.common.scenario) these are here:
where the first program of a session starts, `warming`, and the caps of idle time.

A batch is the other closed loop: N workers, M programs, until the last one ends.

Nothing here knows a clock or a server: sim/sessions.py and replay.py play sessions and fill in the turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np

from experiments.workload import SESSIONS, Program, TurnSpec, gaps_mapped

TREE_IDLE_S = 300.0  # AgentX: a session with its subagents is idle for so long at most,
LOAD_IDLE_S = 10.0  # and all sessions together for so long
STARTS = (0.25, 0.75)  # AgentX: of a program's recorded time, where the first one of a session starts
WARM_UP_TURNS = 11  # AgentX: of each session, with one token each: the last before its start, and ten more
ANSWER_S = 0.02  # a token, when a trace was recorded: ours do not say; it only places the starts
GAP_CAP_S = 10.0  # of runs on real servers, which last minutes
LIMITS_S = (10, 30, 60)  # for first tokens
STARVED_S = 600.0  # a session without a token for so long, while its turn waits, starves
IN_TIME_SHARE = 0.9  # of a session's turns
LIMIT_S = 30  # of `in_time_share`; AgentX has no limit for first tokens
DEADLINE_S = 900.0  # for a whole program, as in the paper's run of real agents


@dataclass(slots=True)
class SessionTurn:
    """One turn, so far. Times in seconds since the run's start."""

    session: int  # from 0
    program: str
    number: int  # in its program, from 1
    of_turns: int
    asked_tokens: int  # of output
    arrival_s: float
    first_s: float | None = None  # the first token; None: it still waits
    last_s: float | None = None  # the latest token
    tokens: int = 0  # of output, so far

    @property
    def ended_program(self) -> bool:
        """Whether it was its program's last, and is over."""
        return self.number == self.of_turns and self.tokens >= self.asked_tokens

    def heard(self, now_s: float, tokens: int) -> None:
        """So many output tokens came."""
        if tokens:
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s, self.tokens = now_s, self.tokens + tokens

    def wait_s(self, now_s: float) -> float:
        """Until the first token, or until now."""
        return (now_s if self.first_s is None else self.first_s) - self.arrival_s

    @property
    def pace_s(self) -> float | None:
        """Seconds a token after the first."""
        if self.tokens < 2 or self.first_s is None or self.last_s is None:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def tokens_between(self, start_s: float, end_s: float) -> float:
        """Output tokens in that time; they are taken as evenly spread between the first and the last."""
        if self.first_s is None or self.last_s is None:
            return 0.0
        if self.last_s <= self.first_s:
            return float(self.tokens) if start_s < self.first_s <= end_s else 0.0
        inside_s = min(end_s, self.last_s) - max(start_s, self.first_s)
        return self.tokens * max(0.0, inside_s) / (self.last_s - self.first_s)


def capped(programs: Iterable[Program], gap_s: float = GAP_CAP_S) -> tuple[Program, ...]:
    """The programs with no tool gap longer than `gap_s`."""
    return tuple(gaps_mapped(p, lambda said_s: min(said_s, gap_s)) for p in programs)


def played(pool: Sequence[Program], session: int, seed: int) -> Iterator[tuple[Program, int]]:
    """The programs that a session plays, without end, and the index of the turn at which each starts.

    Drawn with replacement; each has a name, and so a text, of its own. The first starts within STARTS of its
    recorded time, with the first turn from then on.
    """
    rng = np.random.default_rng([seed, SESSIONS, session])
    for count in range(1 << 31):
        program = pool[rng.integers(len(pool))]
        start = turn_at(program, rng.uniform(*STARTS)) if count == 0 else 0
        yield replace(program, program_id=f"{program.program_id}#{session}.{count}", source=""), start


def turn_at(program: Program, share: float) -> int:
    """The index of the first turn that begins at or after that share of the program's recorded time."""
    lasted_s = [turn.output_tokens * ANSWER_S + (turn.gap_s or 0.0) for turn in program.turns[:-1]]
    begins_s = np.concatenate(([0.0], np.cumsum(lasted_s)))
    return int(np.searchsorted(begins_s, share * begins_s[-1]))


def warming(programs: Iterable[tuple[Program, int]], turns: int) -> Iterator[tuple[Program, int]]:
    """The same programs, started a turn earlier, with one token for the session's first `turns` answers.

    The next prompt has the recorded answer in its place, which no cache knows.
    """
    left = turns
    for program, start in programs:
        start = max(0, start - 1) if left == turns > 0 else start
        end = min(start + left, len(program.turns))
        left -= end - start
        yield replace(program, turns=_one_token(program.turns, start, end)), start


def _one_token(turns: Sequence[TurnSpec], start: int, end: int) -> tuple[TurnSpec, ...]:
    """The turns, those from `start` to `end` with an answer of one token and, but for the last, no gap."""
    found = list(turns)
    for index in range(start, end):
        gap_s = found[index].gap_s if index == end - 1 else 0.0
        found[index] = replace(found[index], output_tokens=1, gap_s=gap_s)
        for later in found[index + 1 : index + 2]:
            kept = min(later.kept_tokens, found[index].input_tokens)
            found[index + 1] = replace(later, new_tokens=later.input_tokens - kept)
    return tuple(found)


def figures(turns: Iterable[SessionTurn], sessions: int, start_s: float, end_s: float) -> dict[str, Any]:
    """What the sessions got between two moments. A turn counts whose first token came then, or that waits.

    `interactivity_p90` is AgentX's "E2E normalized interactivity": the P90 of a whole turn's seconds a token,
    as tokens a second. Tokens a second, seconds and shares. `goodput_T` counts only the tokens of turns whose
    first token came within T seconds. A turn that waits at the end counts with the time that it has waited.
    """
    turns = list(turns)
    counted = [t for t in turns if t.first_s is None or start_s < t.first_s <= end_s]
    waits_s = np.array([t.wait_s(end_s) for t in counted] or [0.0])
    of_session: dict[int, list[float]] = defaultdict(list)
    for turn, wait_s in zip(counted, waits_s.tolist(), strict=False):
        of_session[turn.session].append(wait_s)
    longest = [max(of_session[s], default=end_s - start_s) for s in range(sessions)]
    served = [bool(of_session[s]) and np.mean(np.array(of_session[s]) <= LIMIT_S) for s in range(sessions)]
    rate = 1 / (end_s - start_s)
    output = [(t, t.tokens_between(start_s, end_s)) for t in turns]
    first = dict(zip(("p50", "p90", "p99"), np.percentile(waits_s, (50, 90, 99)).tolist(), strict=True))
    paces_s = [pace_s for t in counted if (pace_s := t.pace_s) is not None]
    e2e_s = [
        (t.last_s - t.arrival_s) / t.tokens
        for t in turns
        if t.last_s is not None and t.tokens >= t.asked_tokens and start_s < t.last_s <= end_s
    ]
    ended, late = programs_in_time(turns, start_s, end_s)
    return {
        "tokens_per_s": rate * sum(tokens for _, tokens in output),
        **{
            f"goodput_{limit}": rate * sum(tokens for t, tokens in output if t.wait_s(end_s) <= limit)
            for limit in LIMITS_S
        },
        **{f"ttft_{name}_s": value for name, value in first.items()},
        "ttft_max_s": float(waits_s.max()),
        "ttft_mean_s": float(waits_s.mean()),
        "interactivity_p90": 1 / float(np.percentile(e2e_s, 90)) if e2e_s else None,
        "turns": len(counted),
        "in_time_share": float(np.mean(waits_s <= LIMIT_S)),
        "sessions_in_time_share": float(np.mean([share >= IN_TIME_SHARE for share in served])),
        "starved_sessions": sum(wait_s > STARVED_S for wait_s in longest),
        "tpot_s": mean(paces_s) if paces_s else None,
        "programs": ended + late,
        "programs_in_time_share": ended / (ended + late) if ended + late else None,
    }


def programs_in_time(turns: Iterable[SessionTurn], start_s: float, end_s: float) -> tuple[int, int]:
    """Of the programs that began at least DEADLINE_S before the end: how many ended within it, and not."""
    by_program: dict[str, list[SessionTurn]] = defaultdict(list)
    for turn in turns:
        by_program[turn.program].append(turn)
    in_time = late = 0
    for of in by_program.values():
        began_s = min(t.arrival_s for t in of)
        if not (min(t.number for t in of) == 1 and start_s <= began_s <= end_s - DEADLINE_S):
            continue
        done_s = next((t.last_s for t in of if t.ended_program), None)
        is_in_time = done_s is not None and done_s - began_s <= DEADLINE_S
        in_time, late = in_time + is_in_time, late + (not is_in_time)
    return in_time, late
