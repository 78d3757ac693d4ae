"""The results of a simulated run: every turn and job, and the counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn; times on the run's clock, tokens of its prompt by where they came from."""

    program_id: str
    number: int  # 1 for the first
    arrival_s: float
    first_token_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    gpu_tokens: int
    dram_tokens: int
    ssd_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that no cache had. A preemption's recomputation is not counted here."""
        return self.prompt_tokens - self.gpu_tokens - self.dram_tokens - self.ssd_tokens


@dataclass(frozen=True, slots=True)
class JobResult:
    """One program, from its arrival to the end of its last turn."""

    program_id: str
    arrival_s: float
    finished_s: float

    @property
    def job_s(self) -> float:
        return self.finished_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Two runs of the same input are equal."""

    jobs: Sequence[JobResult]  # in the order of the input
    turns: Sequence[TurnResult]  # in the order in which they ended
    steps: int
    scheduled_tokens: int  # in all steps, recomputed tokens included
    busy_s: float  # when a step was running
    preemptions: int
    pins: Mapping[str, int]  # taken, and ended by outcome; empty for a stock scheduler
    measured: bool  # whether the machine's numbers were

    @property
    def mean_job_s(self) -> float:
        return sum(job.job_s for job in self.jobs) / len(self.jobs)

    @property
    def end_s(self) -> float:
        return max(job.finished_s for job in self.jobs)

    def job_percentile_s(self, percent: float) -> float:
        return percentile([job.job_s for job in self.jobs], percent)

    def ttft_percentile_s(self, percent: float) -> float:
        return percentile([turn.ttft_s for turn in self.turns], percent)

    @property
    def tokens(self) -> dict[str, int]:
        """Prompt tokens by source: gpu, dram, ssd, computed."""
        sources = ("gpu", "dram", "ssd", "computed")
        return {s: sum(getattr(turn, f"{s}_tokens") for turn in self.turns) for s in sources}


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
