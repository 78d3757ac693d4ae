"""What a replica reports each half second or so: how busy it is, and its programs. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from continuum_lmcache.reload.cost_model import UNMEASURED, PrefillCurve
from continuum_lmcache.types import ProgramId

ReplicaId = NewType("ReplicaId", str)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica at one moment."""

    replica: ReplicaId
    at_s: float  # time of the figures, on the fleet's clock
    requests: int = 0  # waiting and running ones
    wait_s: float = 0.0  # before a later turn's prompt would be computed there
    prefill: PrefillCurve = UNMEASURED.prefill  # as measured there


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A program, as the replica that served its latest turn knows it."""

    program: ProgramId
    turns: int  # finished, here and elsewhere
    context_tokens: int  # of the last finished turn
    age_s: float  # since it arrived
    live: int = 0  # turns in flight
    is_over: bool = False
