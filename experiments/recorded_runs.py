"""Converts a recording into a trace to replay, and computes the errors of its PrefillReload forecasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from continuum_lmcache.errors import TraceError
from continuum_lmcache.recordings.metrics import percentile
from continuum_lmcache.recordings.program_history import RecordedProgram, RecordedReload, RecordedTurn
from continuum_lmcache.recordings.reader import Recording

LEARNED_AFTER = 50  # loads: a forecast made before them rests on the profile


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


@dataclass(frozen=True, slots=True)
class ForecastError:
    """Errors of PrefillReload forecasts, as shares of the measured reload."""

    reloads: int
    median: float | None
    p90: float | None
    predicted_s: float | None  # median
    took_s: float | None  # median


def forecast_errors(run: Recording) -> dict[str, ForecastError]:
    """For all returns whose context had left the GPU, for those that loaded, and after the 50th load."""
    found = [turn.reload for turn in sorted(run.turns, key=started)]
    reloads = [reload for reload in found if reload is not None and reload.took_s > 0]
    loads = [reload for reload in reloads if reload.loaded_tokens]
    groups = {
        "all": reloads,
        "computed only": [reload for reload in reloads if not reload.loaded_tokens],
        "loaded": loads,
        f"loaded, after {LEARNED_AFTER} loads": loads[LEARNED_AFTER:],
    }
    return {name: forecast_error(group) for name, group in groups.items() if group}


def started(turn: RecordedTurn) -> float:
    return turn.started_s or turn.arrival_s


def forecast_error(reloads: Sequence[RecordedReload]) -> ForecastError:
    errors = [abs(reload.predicted_s - reload.took_s) / reload.took_s for reload in reloads]
    return ForecastError(
        len(reloads),
        percentile(errors, 50),
        percentile(errors, 90),
        percentile([reload.predicted_s for reload in reloads], 50),
        percentile([reload.took_s for reload in reloads], 50),
    )
