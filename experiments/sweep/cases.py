"""The cases of the sweep: a simulated run (Point, SessionPoint), or one on a real server (Live).

A case is a frozen value of plain fields. Its row depends on these fields and on the code only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STOCK = "fcfs"  # vLLM's own scheduler, without this package
ROUTER = "vllm-router"  # with the settings that its documentation shows; the peers are in records/peers.md
ROUTER_WARM = "vllm-router-warm"  # its statistics fill within a run
ROUTERS = (ROUTER, ROUTER_WARM)
AGENTINFER = "agentinfer"
GATE = "thunderagent-gate"  # in front of vLLM's own scheduler (sim/gate.py)
PEERS = (*ROUTERS, AGENTINFER)
ENDLESS = "endless-gpu"  # program order on a GPU whose KV cache never fills


class SweepError(ValueError):
    """The sweep cannot run the request."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the simulator: a contender with these programs, at this rate, on this machine."""

    contender: str  # STOCK, ENDLESS, a peer, a name in policies.known(), or module:name
    programs: int
    jps: float  # arrivals, programs a second; a trace's are set by `load`
    seed: int
    workload: str = "swe"  # a key of table1.GENERATORS, "seeds-sweep", or "trace:NAME:HALF"
    machine: str = "a100"  # a key of step_time.MACHINES
    dram_gb: float = 0.0
    ssd_gb: float = 0.0
    ssd_gbps: float | None = None  # reads; None: the simulator's drive
    step_tokens: int = 2048
    max_seqs: int = 256
    tool_factor: float = 1.0  # times the tools' duration,
    tool_from_s: float = 0.0  # of the programs that arrive from then on
    max_ttl_s: float | None = None  # a setting of the scheduler's; None: its default
    wrong_hints: bool = False  # clients say the wrong tool, and end programs that go on
    untold_ends: bool = False  # clients do not say that a turn is their last, as most agents do not
    merge_steps: int = 8  # decode-only steps taken together, at most
    load: float = 0.0  # of a trace: the work that arrives a second, in seconds of the machine
    kv_contexts: float = 0.0  # mean final contexts that the GPU's KV cache holds; 0: as the machine has it
    dram_kv: float = 0.0  # DRAM and disk in sizes of the GPU's KV cache, in place of dram_gb and ssd_gb
    ssd_kv: float = 0.0

    @property
    def offloads(self) -> bool:
        return any(size > 0 for size in (self.dram_gb, self.ssd_gb, self.dram_kv, self.ssd_kv))

    @property
    def label(self) -> str:
        """Its name in figures."""
        tiers = "+LMCache" if self.offloads and self.contender != ENDLESS else ""
        return f"{self.contender}{tiers}"


@dataclass(frozen=True, slots=True)
class Live:
    """One run against a real server that is started for it, with empty caches."""

    contender: str  # STOCK, a peer, a name in policies.known(), or module:name
    programs: int
    jps: float  # arrivals, programs a second
    seed: int
    workload: str = "swe"  # a key of table1.GENERATORS
    dram_gb: float = 0.0
    ssd_gb: float = 0.0

    @property
    def label(self) -> str:
        """Its name in figures."""
        return f"{self.contender}{'+LMCache' if self.dram_gb > 0 else ''}"


@dataclass(frozen=True, slots=True)
class SessionPoint:
    """One run of the simulator in a closed loop: N live sessions, or N workers with a batch of programs."""

    contender: str  # as a Point's
    sessions: int  # or workers
    seed: int
    workload: str = "trace:claude-code:report"  # as a Point's
    machine: str = "2xh100-qwen3-coder-30b"  # a key of step_time.MACHINES
    programs: int = 0  # of the batch; 0: sessions without end
    dram_kv: float = 0.0  # DRAM in sizes of the GPU's KV cache
    kv_contexts: float = 0.0  # as a Point's
    warm_up_turns: int = 11  # AgentX's (experiments/sessions.py)
    counted_s: float = 2400.0  # after them; AgentX: an hour
    step_tokens: int = 8192
    block_tokens: int = 256  # of contexts of 100,000 tokens
    merge_steps: int = 32
    longest_wait_s: float = 0.0  # the setting, of our policies; 0: the default

    @property
    def label(self) -> str:
        """Its name in figures."""
        return f"{self.contender}, {self.longest_wait_s:g} s" if self.longest_wait_s else self.contender


Case = Point | Live | SessionPoint


def inputs(case: Case) -> dict[str, Any]:
    """The case as a flat mapping; it has the case's kind, so equal fields of two kinds differ."""
    return {"kind": type(case).__name__.lower(), **asdict(case)}
