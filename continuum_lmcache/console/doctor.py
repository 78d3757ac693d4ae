"""`continuum-lmcache doctor`: checks a plan from files, before a server is started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from continuum_lmcache.capacity import kv_budget, plan_check
from continuum_lmcache.capacity.kv_budget import GIB, DeviceMemory, KVBudget
from continuum_lmcache.capacity.plan_check import DeploymentPlan, ExpectedLoad
from continuum_lmcache.console.lmcache_check import ConnectorSettings, checked, read
from continuum_lmcache.console.machine_specs import MIB, MachineSpec, machine
from continuum_lmcache.console.model_files import shape_of
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.recordings.reader import load
from continuum_lmcache.reload.cards import assumed_costs
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.reload.model_shapes import KV_BYTES, ModelShape
from continuum_lmcache.telemetry.findings import Finding, Severity, note

STEP_GIB = 2.0  # activations and CUDA graphs of an 8B model with vLLM's default batch, roughly
TABLE1 = ExpectedLoad(
    "the mean of Continuum's Table 1, SWE-Bench; --context or --run give yours", (70_126,), assumed=True
)
NO_CONNECTOR = note(
    "no-connector",
    "no lmcache.json was given: there is no tier below the GPU, and LMCache's settings were not checked",
    "give the file of --kv-transfer-config by --lmcache",
)


@dataclass(frozen=True, slots=True)
class DoctorQuery:
    """The user's query, with the names of the command's options. None or 0: not given."""

    model: str
    profile: Path | None = None
    gpu: str = ""
    memory_gib: float | None = None
    kv_gib: float | None = None
    weights_gib: float | None = None
    gpu_memory_utilization: float = 0.92  # vLLM 0.32's default
    tensor_parallel_size: int = 1
    block_size: int | None = None  # tokens
    kv_cache_dtype: str = "auto"
    lmcache: Path | None = None
    run: Path | None = None
    context: int | None = None  # tokens of a program
    programs: int | None = None  # alive at the same time


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer."""

    plan: DeploymentPlan
    machine: MachineSpec
    findings: tuple[Finding, ...]

    @property
    def advisable(self) -> bool:
        """Whether no finding is worse than a NOTE."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    @property
    def costs_from(self) -> str:
        """Where the costs come from."""
        is_measured = self.plan.costs is not None and self.plan.costs.measured
        return f"{self.machine.source}, {'measured' if is_measured else 'not measured'}"

    @property
    def verdict(self) -> str:
        """One sentence for all findings."""
        if self.advisable:
            return "This deployment is advisable."
        found = Counter(finding.severity.value for finding in self.findings)
        counts = [f"{found[n]} {n}{'s' * (found[n] > 1)}" for n in ("error", "warning") if found[n]]
        works = "" if found["error"] else "works but "
        return f"This deployment {works}is NOT advisable: {', '.join(counts)}."


def diagnosis(query: DoctorQuery) -> Diagnosis:
    """Read, compute, judge. Raises ConfigError, ProfileError or TraceError."""
    on, shape, ranks = machine(query.profile, query.gpu), model(query), query.tensor_parallel_size
    block_tokens = query.block_size or on.block_tokens
    kv = kv_cache(query, on, shape, block_tokens)
    connector: ConnectorSettings | None = None
    if query.lmcache is not None:
        size_bytes = kv.bytes_per_token * ranks
        connector = checked(read(query.lmcache), ranks, block_tokens, size_bytes, shape.window_tokens)
    plan = DeploymentPlan(
        shape,
        kv,
        costs_of(on, shape, kv.bytes_per_token, ranks),
        demand(query),
        connector.tiers(kv.bytes_per_token * ranks) if connector else {},
        query.programs,
    )
    found = (
        *plan_check.advice(plan),
        *(connector.findings if connector else [NO_CONNECTOR]),
    )
    in_order = sorted(found, key=lambda finding: list(Severity).index(finding.severity))
    return Diagnosis(plan, on, tuple(in_order))


def costs_of(on: MachineSpec, shape: ModelShape, bytes_per_token: int, ranks: int) -> CostModel | None:
    """The profile's, else the card's by its data sheet; None where neither is known."""
    if on.costs is not None:
        return replace(on.costs, kv_bytes_per_token=bytes_per_token)
    if on.card is None:
        return None
    return assumed_costs(on.card, shape.active_parameters, shape.attended_values, bytes_per_token, ranks)


def model(query: DoctorQuery) -> ModelShape:
    """The model's shape, as it is to be served."""
    shape = shape_of(query.model, None if query.weights_gib is None else query.weights_gib * GIB)
    if (dtype := query.kv_cache_dtype) == "auto":
        return shape
    if dtype not in KV_BYTES:
        raise ConfigError(f"--kv-cache-dtype is {dtype!r}; known: auto, {', '.join(KV_BYTES)}")
    return replace(shape, kv_value_bytes=KV_BYTES[dtype])


def kv_cache(query: DoctorQuery, on: MachineSpec, shape: ModelShape, block_tokens: int) -> KVBudget:
    """The KV cache: as given, or computed from the device's memory as vLLM would divide it."""
    ranks = query.tensor_parallel_size
    if query.kv_gib is not None:
        return kv_budget.of_bytes(shape, query.kv_gib * GIB, block_tokens, ranks)
    given, card = query.memory_gib, on.card
    size = given * GIB if given is not None else card.device_mib * MIB if card is not None else 0
    if not size:
        where = "give --kv-gib (VLLM_CPU_KVCACHE_SPACE)" if on.on_cpu else "give --gpu or --memory-gib"
        raise ConfigError(f"the memory of {on.device!r} is not known; {where}")
    memory = DeviceMemory(size, query.gpu_memory_utilization, STEP_GIB * GIB)
    return kv_budget.of_memory(shape, memory, block_tokens, ranks)


def demand(query: DoctorQuery) -> ExpectedLoad:
    """The programs to serve: a recorded run's, a given context, or the paper's mean. Raises TraceError."""
    if query.run is not None and query.context is not None:
        raise ConfigError("--run and --context both give the length of programs; drop one")
    if query.run is not None:
        programs = load(query.run).programs
        longest = (max(t.prompt_tokens + t.output_tokens for t in p.turns) for p in programs)
        return ExpectedLoad(query.run.name, tuple(longest))
    return ExpectedLoad("as given", (query.context,)) if query.context is not None else TABLE1
