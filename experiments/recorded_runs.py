"""Converts a recording into a trace to replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from continuum_lmcache.errors import TraceError
from continuum_lmcache.recordings.program_history import RecordedProgram
from continuum_lmcache.recordings.reader import Recording


def to_trace(run: Recording) -> list[dict[str, Any]]:
    """The run's programs in the trace format (docs/recording.md). Raises TraceError.

    Only finished turns; overlapping turns of a program are in order of arrival, with gap null.
    """
    if all(t.output_tokens is None or t.prompt_tokens is None for t in run.turns):
        raise TraceError(f"{run.name}: turns carry no prompt_length and output_tokens; it cannot be replayed")
    start_s = run.programs[0].turns[0].arrival_s
    return [
        {
            "program_id": program.id,
            "arrival_s": round(program.turns[0].arrival_s - start_s, 6),
            "source": "recording",
            "turns": turns,
        }
        for program in run.programs
        if (turns := list(trace_turns(program)))
    ]


def trace_turns(program: RecordedProgram) -> Iterator[dict[str, Any]]:
    """A program's finished turns. The last one has no gap, as nothing came after it."""
    before_tokens = answer_tokens = 0
    for turn in program.turns:
        if turn.prompt_tokens is None or turn.output_tokens is None:
            continue
        key = turn.tool or ()
        yield {
            "input_tokens": turn.prompt_tokens,
            "new_tokens": new_tokens(turn.prompt_tokens, before_tokens, answer_tokens),
            "output_tokens": turn.output_tokens,
            "tool": key[-1] if key else None,
            "command": key[0] if len(key) > 1 else None,
            "gap_s": turn.gap_s,
        }
        before_tokens, answer_tokens = turn.prompt_tokens, turn.output_tokens


def new_tokens(prompt_tokens: int, before_tokens: int, answer_tokens: int) -> int:
    """Prompt tokens in neither the previous prompt nor its answer, as far as lengths can tell.

    Growth by less than the answer means that the answer came back changed (reasoning is stripped
    from histories), so all of it is new; a shorter prompt is another prompt.
    """
    growth = prompt_tokens - before_tokens
    if growth < 0:
        return prompt_tokens
    return growth - answer_tokens if growth >= answer_tokens else growth
