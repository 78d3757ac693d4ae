"""Reads and checks the programs of a trace.

A trace has one JSON object a line: {program_id, arrival_s, source, turns: [{input_tokens,
new_tokens, output_tokens, tool, command, gap_s}]}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from continuum_lmcache.errors import TraceError, nearest


@dataclass(frozen=True, slots=True)
class TraceTurn:
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
class TraceProgram:
    """One agent program: turns one after the other, each when the tool before it has ended."""

    program_id: str
    arrival_s: float
    turns: tuple[TraceTurn, ...]
    source: str = ""

    @property
    def context_tokens(self) -> int:
        """The largest window of any turn."""
        return max(turn.context_tokens for turn in self.turns)


def load_trace(path: Path) -> tuple[TraceProgram, ...]:
    """The programs of a trace file, in its order. Raises TraceError with file, line and reason."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() splits at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    programs: dict[str, TraceProgram] = {}
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


def _program(row: Any) -> TraceProgram:
    _fields(row, "the line", ("program_id", "arrival_s", "turns"), ("source",))
    name = row["program_id"]
    _require(isinstance(name, str) and name, "program_id", name, "text, not empty")
    _number(row["arrival_s"], "arrival_s")
    _require(isinstance(row["turns"], list) and row["turns"], "turns", row["turns"], "a list, not empty")
    turns: list[TraceTurn] = []
    for index, turn in enumerate(row["turns"]):
        turns.append(_turn(turn, f"turns[{index}]", turns[-1].context_tokens if turns else 0))
    return TraceProgram(name, float(row["arrival_s"]), tuple(turns), str(row.get("source") or ""))


def _turn(row: Any, at: str, history_tokens: int) -> TraceTurn:
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
    return TraceTurn(*lengths, str(row.get("tool") or ""), str(row.get("command") or ""), gap_s)


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
