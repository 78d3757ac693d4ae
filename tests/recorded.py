"""Recordings for tests, driven by hand."""

import json
from pathlib import Path
from typing import Any

from continuum_lmcache.telemetry.events import PinReleased, PinTaken, TurnArrived, TurnFinished, TurnStarted
from continuum_lmcache.telemetry.recorder import FORMAT, META, EventRecorder
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, ProgramId, Residency, Retention, TurnId
from continuum_lmcache.vllm_plugin.files import pieces, recording_path, write_whole

EPOCH_S = 1_790_000_000.0
ABOUT = {"model": "Llama", "policy": "continuum", "machine": "1 x H100", "versions": "vLLM 0.32.0"}
KEEP = Retention(3.0, "cdf", probability=0.75, policy="continuum")
DROP = Retention(0.0, "cdf", policy="continuum")


def written(tmp_path: Path, recorder: EventRecorder, rank: int = 0) -> Path:
    """The recorder's snapshot in a file."""
    path = recording_path(tmp_path, rank)
    write_whole(path, pieces(recorder.snapshot()))
    return path


def saved(tmp_path: Path, jobs: Any) -> Path:
    path = tmp_path / "scheduler_timestamps"
    path.write_text(json.dumps(jobs))
    return path


def recording(jobs: dict[str, Any], **header: Any) -> dict[str, Any]:
    """A file's content: the events of programs, with a header."""
    return {META: [{"format": FORMAT, "dropped": 0, **header}], **jobs}


class Run:
    """A recorder driven by hand."""

    def __init__(self) -> None:
        self.recorder = EventRecorder(EPOCH_S, ABOUT)

    def turn(self, job: str, turn: str, times_s: tuple[float, float, float], **more: Any) -> None:
        """Arrival, start, finish; the first token comes 0.5 s after the start.

        more: prompt_tokens, served (gpu, dram, ssd), keep, tool.
        """
        program, turn_id = ProgramId(job), TurnId(turn)
        arrival_s, start_s, finish_s = times_s
        prompt_tokens = more.get("prompt_tokens", 100)
        served = Residency(*more.get("served", (0, 0, 0)), prompt_tokens)
        tool = more.get("tool", ("ls", "bash"))
        self.recorder.record(TurnArrived(arrival_s, program, turn_id, prompt_tokens))
        self.recorder.record(
            TurnStarted(start_s, program, turn_id, served, start_s - arrival_s, evicted=False)
        )
        keep = more.get("keep", DROP)
        self.recorder.record(
            TurnFinished(
                finish_s,
                program,
                turn_id,
                tool,
                prompt_tokens + 10,
                10,
                False,
                keep,
                start_s - arrival_s + 0.5,
            )
        )
        if keep.ttl_s > 0:
            ended = FinishedTurn(program, 1, tool, prompt_tokens + 10, 7, served)
            self.recorder.record(
                PinTaken(
                    finish_s, program, Pin(program, range(7), finish_s, finish_s + keep.ttl_s, keep, ended)
                )
            )

    def unpinned(self, at_s: float, job: str, outcome: PinEnd) -> None:
        self.recorder.record(PinReleased(at_s, ProgramId(job), outcome))
