"""A replica's report, sent each half second or so. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel

ReplicaId = NewType("ReplicaId", str)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica at one moment. Beside each figure its gauge in the engine (docs/metrics.md)."""

    replica: ReplicaId
    at_s: float  # time of the figures, on the fleet's clock
    gpu_tokens: int  # that the GPU's KV cache holds: continuum_gpu_capacity_tokens
    requests: int = 0  # vllm:num_requests_waiting and vllm:num_requests_running together
    tier_tokens: int = 0  # the largest tier's, for started programs
    headroom_tokens: float | None = None  # continuum_admission_headroom_tokens; stock vLLM has None
    pending_programs: int = 0  # new programs that the replica itself holds: continuum_programs_held
    oldest_returning_wait_s: float = 0.0  # continuum_oldest_returning_wait_seconds; 0: no later turn waits
    returning_first: bool = True  # later turns are scheduled before waiting first ones; False: stock vLLM
    costs: CostModel = UNMEASURED  # rates as measured there
