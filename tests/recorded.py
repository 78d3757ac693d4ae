"""Recordings for tests: driven by hand, or as the public prototype wrote them."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from continuum_lmcache.telemetry.events import PinReleased, PinTaken, TurnArrived, TurnFinished, TurnStarted
from continuum_lmcache.telemetry.recorder import EventRecorder
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, ProgramId, Residency, Retention, TurnId
from continuum_lmcache.vllm_plugin.files.recording_files import RecordingWriter
from experiments.analyze import app

EPOCH_S = 1_790_000_000.0
KEEP = Retention(3.0, "continuum", "cdf", probability=0.75)
DROP = Retention(0.0, "continuum", "cdf")
SERVICE_S = 0.25


def written(tmp_path: Path, recorder: EventRecorder) -> Path:
    """The recorder's snapshot in a file."""
    recording = RecordingWriter(tmp_path, recorder)
    assert recording.flush()
    return recording.path


def saved(tmp_path: Path, jobs: Any) -> Path:
    path = tmp_path / "scheduler_timestamps"
    path.write_text(json.dumps(jobs))
    return path


def printed(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "300"})
    assert result.exit_code == status, result.output
    return result.output


class Run:
    """A recorder driven by hand."""

    def __init__(self) -> None:
        self.recorder = EventRecorder(EPOCH_S, max_events_per_program=100_000)

    def turn(self, job: str, turn: str, times_s: tuple[float, float, float], **more: Any) -> None:
        """Arrival, start, finish; more: prompt_tokens, served (gpu, dram, ssd), keep, tool."""
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
            TurnFinished(finish_s, program, turn_id, tool, prompt_tokens + 10, 10, False, keep)
        )
        if keep.ttl_s > 0:
            ended = FinishedTurn(program, 1, tool, prompt_tokens + 10, 7, served)
            self.recorder.record(
                PinTaken(finish_s, Pin(program, 7, finish_s, finish_s + keep.ttl_s, keep, ended))
            )

    def unpinned(self, at_s: float, job: str, outcome: PinEnd) -> None:
        self.recorder.record(PinReleased(at_s, ProgramId(job), outcome))


PROTOTYPE = {
    "swe-1": [
        {"Request_arrival_time": 1_760_000_000.0},
        {"waiting_to_running": 1_760_000_001.5, "prompt_length": 1000, "hit_length": 0},
        {"Request_evicted_from_running_queue_time": 1_760_000_002.0},
        {"evicted_to_running": 1_760_000_003.0, "prompt_length": 1000, "hit_length": 960},
        {"Request_departure_time": 1_760_000_004.0},
        {"pinned_time": 1_760_000_004.0},
        {"Request_arrival_time": 1_760_000_005.0},
        {"unpinned_time": 1_760_000_005.0},
        {"waiting_to_running": 1_760_000_005.5, "prompt_length": 1200, "hit_length": 1100},
        {"Request_departure_time": 1_760_000_007.0},
    ],
    "null": [{"Request_arrival_time": 1_760_000_000.5}, {"Request_departure_time": 1_760_000_090.0}],
}
