"""Programs to replay: read from a trace, drawn from a distribution, shrunk to a window, given arrivals.

Everything random takes a seed: the same seed gives the same programs, so that policies are compared
on the same work. A trace has one JSON object a line: {program_id, arrival_s, source, turns: [{input_tokens,
new_tokens, output_tokens, tool, command, gap_s}]}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from continuum_lmcache.errors import TraceError, nearest

ARRIVALS, GAPS, SHAPES, SAMPLE, SESSIONS = range(5)  # which stream of a seed: draws must not share numbers


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One LLM call, and the tool call it ends with.

    Half-open intervals of the prompt: [0, input - new) repeats the head of the previous prompt and
    output; [input - new, input) is new.
    """

    input_tokens: int  # the full prompt
    new_tokens: int
    output_tokens: int
    tool: str = ""
    command: str = ""
    gap_s: float | None = None  # from this output's end to the next request; None: last turn, or unknown

    @property
    def kept_tokens(self) -> int:
        """Length of the history's head that this prompt repeats."""
        return self.input_tokens - self.new_tokens

    @property
    def context_tokens(self) -> int:
        """The tokens of the model's window that the turn needs."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Program:
    """One agent program: turns one after the other, each when the tool before it has ended."""

    program_id: str
    arrival_s: float
    turns: tuple[TurnSpec, ...]
    source: str = ""

    @property
    def context_tokens(self) -> int:
        """The largest window of any turn."""
        return max(turn.context_tokens for turn in self.turns)


def load_trace(path: Path) -> tuple[Program, ...]:
    """The programs of a trace file, in its order. Raises TraceError with file, line and reason."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() splits at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    programs: dict[str, Program] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            program = _program(json.loads(line))
            _require(program.program_id not in programs, "program_id", program.program_id, "used once")
        except ValueError as error:  # JSONDecodeError and TraceError are ValueErrors
            raise TraceError(f"{path}:{number}: {error}") from error
        programs[program.program_id] = program
    if not programs:
        raise TraceError(f"{path}: holds no program; expected one JSON object a line")
    return tuple(programs.values())


def _program(row: Any) -> Program:
    _fields(row, "the line", ("program_id", "arrival_s", "turns"), ("source",))
    name = row["program_id"]
    _require(isinstance(name, str) and name, "program_id", name, "text, not empty")
    _number(row["arrival_s"], "arrival_s")
    _require(isinstance(row["turns"], list) and row["turns"], "turns", row["turns"], "a list, not empty")
    turns: list[TurnSpec] = []
    for index, turn in enumerate(row["turns"]):
        turns.append(_turn(turn, f"turns[{index}]", turns[-1].context_tokens if turns else 0))
    return Program(name, float(row["arrival_s"]), tuple(turns), str(row.get("source") or ""))


def _turn(row: Any, at: str, history_tokens: int) -> TurnSpec:
    """A turn whose prompt may repeat at most `history_tokens`."""
    _fields(row, at, ("input_tokens", "new_tokens", "output_tokens"), ("tool", "command", "gap_s"))
    for name, least in (("input_tokens", 1), ("new_tokens", 0), ("output_tokens", 0)):
        value = row[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        _require(whole and value >= least, f"{at}.{name}", value, f"a whole number >= {least}")
    fits = 0 <= row["input_tokens"] - row["new_tokens"] <= history_tokens
    expected = f"input_tokens less a part of the {history_tokens} tokens before it"
    _require(fits, f"{at}.new_tokens", row["new_tokens"], expected)
    gap_s = row.get("gap_s")
    if gap_s is not None:
        _number(gap_s, f"{at}.gap_s")
    lengths = (row["input_tokens"], row["new_tokens"], row["output_tokens"])
    return TurnSpec(*lengths, str(row.get("tool") or ""), str(row.get("command") or ""), gap_s)


def _fields(row: Any, at: str, needed: Sequence[str], optional: Sequence[str]) -> None:
    _require(isinstance(row, dict), at, row, "a JSON object")
    for name in needed:
        if name not in row:
            raise TraceError(f"{at} has no {name!r}")
    for name in row:
        if name not in (known := [*needed, *optional]):
            raise TraceError(f"{at} has the unknown field {name!r}; {nearest(name, known)}")


def _number(value: Any, what: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(number and math.isfinite(value) and value >= 0, what, value, "a number of seconds >= 0")


def _require(holds: object, what: str, value: Any, expected: str) -> None:
    if not holds:
        raise TraceError(f"{what} is {value!r:.80}; it must be {expected}")


def gaps_mapped(program: Program, gap_s: Callable[[float], float]) -> Program:
    """The program with `gap_s` of each known tool gap."""
    turns = (t if t.gap_s is None else replace(t, gap_s=gap_s(t.gap_s)) for t in program.turns)
    return replace(program, turns=tuple(turns))


def growing(
    name: str, new_tokens: Sequence[int], output_tokens: Sequence[int], gap_s: float = 0.0
) -> Program:
    """A program of shell calls. Each prompt is the last one, its answer, and so many new tokens."""
    turns: list[TurnSpec] = []
    for number, (new, output) in enumerate(zip(new_tokens, output_tokens, strict=True), 1):
        prompt = new + (turns[-1].context_tokens if turns else 0)
        turns.append(TurnSpec(prompt, new, output, "bash", "ls", gap_s if number < len(new_tokens) else None))
    return Program(name, 0.0, tuple(turns))


def scaled(programs: Sequence[Program], max_context_tokens: int) -> tuple[Program, ...]:
    """The same programs, shortened so that the longest context fits `max_context_tokens`.

    One factor for all, so programs keep their proportions to each other. An exact extension of the
    history remains one; output and new tokens never fall to 0 where there were some. Programs that fit
    are returned as they are. Raises TraceError if the turns are too many for the window.
    """
    if all(program.context_tokens <= max_context_tokens for program in programs):
        return tuple(programs)
    # 2 tokens a turn: a margin for rounding new and output up, so that the bound always holds
    factor = min((max_context_tokens - 2 * len(p.turns)) / p.context_tokens for p in programs)
    if factor <= 0:
        most = max(len(program.turns) for program in programs)
        raise TraceError(f"{most} turns do not fit a context of {max_context_tokens} tokens; leave them out")
    return tuple(replace(program, turns=_shrunk(program.turns, factor)) for program in programs)


def _shrunk(turns: Iterable[TurnSpec], factor: float) -> tuple[TurnSpec, ...]:
    def shrink(tokens: int) -> int:
        return max(min(tokens, 1), round(tokens * factor))

    found: list[TurnSpec] = []
    history = history_then = 0  # the conversation's length after shrinking, and before
    for turn in turns:
        kept = history if turn.kept_tokens == history_then else min(history, shrink(turn.kept_tokens))
        new = shrink(turn.new_tokens)
        found.append(
            replace(turn, input_tokens=kept + new, new_tokens=new, output_tokens=shrink(turn.output_tokens))
        )
        history, history_then = found[-1].context_tokens, turn.context_tokens
    return tuple(found)


def poisson_arrivals(programs: Sequence[Program], jps: float, seed: int) -> tuple[Program, ...]:
    """The programs, arriving in this order as a Poisson process of `jps` programs a second."""
    waits_s = np.random.default_rng([seed, ARRIVALS]).exponential(1 / jps, len(programs))
    arrivals_s = np.cumsum(waits_s) - waits_s[:1]  # the first one arrives at 0
    return tuple(replace(p, arrival_s=float(at)) for p, at in zip(programs, arrivals_s, strict=True))


def sampled(programs: Sequence[Program], count: int, seed: int) -> tuple[Program, ...]:
    """`count` of the programs, drawn without replacement. Raises TraceError if there are fewer."""
    if count > len(programs):
        raise TraceError(f"{count} programs wanted, but there are only {len(programs)}; ask for fewer")
    chosen = np.random.default_rng([seed, SAMPLE]).choice(len(programs), count, replace=False)
    return tuple(programs[i] for i in sorted(chosen))


def unknown_gaps(programs: Iterable[Program]) -> int:
    """How many turns before another one have no tool time."""
    return sum(turn.gap_s is None for program in programs for turn in program.turns[:-1])


def with_gaps(
    programs: Sequence[Program], draw_s: Callable[[np.random.Generator], float], seed: int
) -> tuple[Program, ...]:
    """The programs with `draw_s` in place of every missing gap."""
    rng = np.random.default_rng([seed, GAPS])

    def known(program: Program) -> Program:
        between = (t if t.gap_s is not None else replace(t, gap_s=draw_s(rng)) for t in program.turns[:-1])
        return replace(program, turns=(*between, program.turns[-1]))

    return tuple(known(program) for program in programs)
