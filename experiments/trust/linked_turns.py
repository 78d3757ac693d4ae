"""Of the later turns of AgentX's sessions, those that the engine gave to their session's program.

    CONTINUUM_RUN_OUTPUT_DIR=results/run CONTINUUM_RECORD_IDS=true python -m experiments.agentx \\
        --contenders continuum --no-session-id --sessions 8 --seconds 80
    python -m experiments.trust.linked_turns results/agentx/continuum-8 results/run

Without `--no-session-id` sessions name themselves. With VLLM_USE_RUST_FRONTEND=1 and VLLM_RUST_FRONTEND_PATH
in the environment the server is vLLM's in Rust. A session's first turn has no program yet; every later one
should have it. `pieces`: programs that a session's turns are in, one each if all is right; `mixed`: programs
with turns of two sessions.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from continuum_lmcache.telemetry.recorder import META

EXPORT, RECORDING = "profile_export.jsonl", "scheduler_timestamps"


def sessions_of(lines: Iterable[str]) -> dict[str, list[str]]:
    """Each session's request ids, in the order of their sending."""
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for told in (json.loads(line)["metadata"] for line in lines):
        found[told["x_correlation_id"]].append((told["request_start_ns"], told["x_request_id"]))
    return {session: [request for _, request in sorted(turns)] for session, turns in found.items()}


def counted(
    sessions: Mapping[str, list[str]], recording: Mapping[str, list[dict[str, Any]]]
) -> dict[str, int]:
    """The recording's turns are vLLM's request ids, which have the client's within."""
    program_of = {
        event["turn"]: program
        for program, events in recording.items()
        if program != META
        for event in events
        if "turn" in event
    }
    sessions_in: dict[str, set[str]] = defaultdict(set)
    later = linked = 0
    for session, requests in sessions.items():
        for number, request in enumerate(requests):
            program = next((p for turn, p in program_of.items() if request in turn), None)
            later += number > 0
            linked += number > 0 and program is not None
            if program is not None:
                sessions_in[program].add(session)
    return {
        "sessions": len(sessions),
        "later turns": later,
        "linked": linked,
        "pieces": len(sessions_in),
        "mixed": sum(len(of) > 1 for of in sessions_in.values()),
    }


def main(
    run: Annotated[Path, typer.Argument(help="the harness' folder of one run")],
    recordings: Annotated[Path, typer.Argument(help="CONTINUUM_RUN_OUTPUT_DIR of its server")],
) -> None:
    """Print the counts."""
    with (run / EXPORT).open() as lines:
        sessions = sessions_of(lines)
    print(json.dumps(counted(sessions, json.loads((recordings / RECORDING).read_text()))))


if __name__ == "__main__":
    typer.run(main)
