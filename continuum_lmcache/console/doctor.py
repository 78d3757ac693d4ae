"""`continuum-lmcache doctor`: checks a plan from files, and optionally a running server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from continuum_lmcache.capacity import kv_budget, plan_check
from continuum_lmcache.capacity.break_even import linear_load_cost
from continuum_lmcache.capacity.kv_budget import GIB, DeviceMemory, KVBudget, ModelShape, WorkerSpec
from continuum_lmcache.capacity.plan_check import DeploymentPlan, ExpectedLoad, PinVerdict
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.console import fleet
from continuum_lmcache.console.lmcache_check import ConnectorSettings, checked, read
from continuum_lmcache.console.machine_specs import MachineSpec, machine
from continuum_lmcache.console.metrics_page import ServedModel, served
from continuum_lmcache.console.model_shapes import KV_BYTES, shape_of
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.recordings.reader import load
from continuum_lmcache.telemetry.findings import Finding, Severity, error, note, warning
from continuum_lmcache.types import Tier

STEP_GIB = 2.0  # activations and CUDA graphs of an 8B model with vLLM's default batch, roughly
TABLE1 = ExpectedLoad(
    "the means of Continuum's Table 1, SWE-Bench, arXiv 2511.02230; tools take 0.925 s", (70_126,), (0.925,)
)
CHECKED_VERSIONS = ("0.30.", "0.31.", "0.32.", "0.33.")  # as vllm_plugin/hooks/engine_args.py has them
GATED = "vllm-router"
ROUTERS = (GATED, "production-stack", "llm-d")
NO_CONNECTOR = note(
    "no-connector",
    "no lmcache.json was given: there is no tier below the GPU, and LMCache's settings were not checked",
    "give the file of --kv-transfer-config by --lmcache",
)
BLOCKS_OFF = 0.1  # share by which a server's KV cache may differ from the computed one


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
    lora: bool = False
    run: Path | None = None
    context: int | None = None  # tokens of a program
    programs: int | None = None  # alive at the same time
    url: str = ""
    router: str = ""  # in front of the server
    ray: Path | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer."""

    plan: DeploymentPlan
    machine: MachineSpec
    connector: ConnectorSettings | None
    server: ServedModel | None
    pins: PinVerdict
    findings: tuple[Finding, ...]

    @property
    def advisable(self) -> bool:
        """Whether no finding is worse than a NOTE."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One sentence for all findings."""
        if self.advisable:
            return "This deployment is advisable."
        found = Counter(finding.severity for finding in self.findings)
        costs = f"{found[Severity.WARNING]} warning{'s' * (found[Severity.WARNING] > 1)}"
        if not found[Severity.ERROR]:
            return f"This deployment works but is NOT advisable: {costs}."
        errors = f"{found[Severity.ERROR]} error{'s' * (found[Severity.ERROR] > 1)}"
        more = f", {costs}" if found[Severity.WARNING] else ""
        return f"This deployment is NOT advisable: {errors}{more}."


def diagnosis(query: DoctorQuery) -> Diagnosis:
    """Read, compute, judge. Raises ConfigError, ProfileError, TraceError or ServerError."""
    on = machine(query.profile, query.gpu)
    server = served(query.url) if query.url else None
    shape = model(query, server)
    block_tokens = query.block_size or (server.block_tokens if server else None) or on.block_tokens
    kv = kv_cache(query, on, shape, server, block_tokens)
    worker = WorkerSpec(on.on_cpu, block_tokens, kv.bytes_per_token, shape.name)
    ranks = query.tensor_parallel_size
    connector = (
        checked(read(query.lmcache), worker, ranks, shape.window_tokens, query.lora)
        if query.lmcache
        else None
    )
    settings = connector.continuum if connector else ContinuumConfig()
    plan = DeploymentPlan(
        shape,
        kv,
        replace(on.costs, kv_bytes_per_token=kv.bytes_per_token),
        demand(query),
        connector.tiers(kv.bytes_per_token * ranks) if connector else {},
        query.programs,
        settings.max_pinned_share,
        settings.max_ttl_s,
        on.costs.kv_bytes_per_token if on.profiled else None,
    )
    found = (
        *plan_check.advice(plan),
        *(connector.findings if connector else [NO_CONNECTOR]),
        *(of_server(server, query, on, plan) if server else ()),
        *of_router(query.router, settings),
        *(fleet.findings(report) if query.url and (report := fleet.fleet_at(query.url)) is not None else ()),
        *(fleet.of_config(query.ray) if query.ray is not None else ()),
    )
    in_order = sorted(found, key=lambda finding: list(Severity).index(finding.severity))
    return Diagnosis(plan, on, connector, server, plan_check.can_pins_pay(plan), tuple(in_order))


def model(query: DoctorQuery, server: ServedModel | None) -> ModelShape:
    """The model's shape, as it is to be served."""
    shape = shape_of(query.model)
    if (dtype := query.kv_cache_dtype) != "auto":
        if dtype not in KV_BYTES:
            raise ConfigError(f"--kv-cache-dtype is {dtype!r}; known: auto, {', '.join(KV_BYTES)}")
        shape = replace(shape, kv_value_bytes=KV_BYTES[dtype])
    if query.weights_gib is not None:
        shape = replace(shape, weight_bytes=query.weights_gib * GIB, source="as given")
    if server and server.window_tokens:
        shape = replace(shape, window_tokens=server.window_tokens)
    return shape


def kv_cache(
    query: DoctorQuery, on: MachineSpec, shape: ModelShape, server: ServedModel | None, block_tokens: int
) -> KVBudget:
    """The KV cache: as the server reports it, as given, or computed from the device's memory."""
    ranks = query.tensor_parallel_size
    if server and server.blocks:
        return kv_budget.of_blocks(shape, server.blocks, block_tokens, ranks)
    if query.kv_gib is not None:
        return kv_budget.of_bytes(shape, query.kv_gib * GIB, block_tokens, ranks)
    memory = memory_of(query, on)
    if memory is None:
        where = "give --kv-gib (VLLM_CPU_KVCACHE_SPACE)" if on.on_cpu else "give --gpu or --memory-gib"
        raise ConfigError(f"the memory of {on.device!r} is not known; {where}")
    return kv_budget.of_memory(shape, memory, block_tokens, ranks)


def memory_of(query: DoctorQuery, on: MachineSpec) -> DeviceMemory | None:
    """The device's memory as vLLM would divide it; None if it is not known."""
    size = query.memory_gib * GIB if query.memory_gib is not None else on.device_bytes
    return DeviceMemory(size, query.gpu_memory_utilization, STEP_GIB * GIB) if size else None


def demand(query: DoctorQuery) -> ExpectedLoad:
    """The programs to serve: a recorded run's, a given context, or the paper's mean. Raises TraceError."""
    if query.run is not None and query.context is not None:
        raise ConfigError("--run and --context both give the length of programs; drop one")
    if query.run is not None:
        seen = load(query.run)
        longest = (max(t.prompt_tokens + t.output_tokens for t in p.turns) for p in seen.programs)
        gaps_s = tuple(turn.gap_s for turn in seen.turns if turn.gap_s is not None)
        return ExpectedLoad(query.run.name, tuple(longest), gaps_s)
    if query.context is not None:
        return ExpectedLoad("as given", (query.context,))
    return TABLE1


def of_server(
    server: ServedModel, query: DoctorQuery, on: MachineSpec, plan: DeploymentPlan
) -> Iterator[Finding]:
    """Findings from what a running server reports."""
    if server.version is not None and not server.version.startswith(CHECKED_VERSIONS):
        evidence = f"the server runs vLLM {server.version}"
        yield warning("version", evidence, "continuum was checked on 0.30 to 0.33 only")
    if not server.has_policy:
        yield warning(
            "no-policy",
            "no continuum_programs in /metrics: the server runs without our scheduler, or has not served yet",
            "start it with --scheduling-policy continuum",
        )
    if server.prefix_caching is False:
        yield error(
            "no-prefix-caching",
            "prefix caching is off: nothing can be kept",
            "drop --no-enable-prefix-caching",
        )
    if plan.tiers and not server.has_tiers:
        yield warning(
            "no-tier-metrics",
            "the server reports no continuum_loaded_tokens_total: our LMCache connector does not run in it",
            "start it with --kv-transfer-config and the file given here",
        )
    memory = memory_of(query, on)
    if memory is not None and server.blocks:
        ranks, block_tokens = query.tensor_parallel_size, plan.budget.block_tokens
        predicted = kv_budget.of_memory(plan.shape, memory, block_tokens, ranks)
        if abs(predicted.blocks - server.blocks) > BLOCKS_OFF * server.blocks:
            yield note(
                "blocks-differ",
                f"the server has {server.blocks:,} blocks, the computation gives {predicted.blocks:,}",
                "another process on the device, another --gpu-memory-utilization, or other weights",
            )


def of_router(router: str, settings: ContinuumConfig) -> Iterator[Finding]:
    """Conflicts between a router in front and our admission (docs/fleet.md). Raises ConfigError."""
    if router and router not in ROUTERS:
        raise ConfigError(f"--router is {router!r}; known: {', '.join(ROUTERS)}")
    if router == GATED and settings.admission:
        yield warning(
            "router-gate",
            f"{GATED} --enable-program-scheduling sends no program's next turn to a rank where a request "
            "waits, and our admission makes new programs wait there",
            'set "admission_waiting_request_threshold": 1000000 in its JSON (0 does not open it in 0.1.17), '
            "or CONTINUUM_ADMISSION=false; --policy consistent_hash alone needs neither",
        )
    if router:
        yield note(
            "router-session",
            f"{router} knows a program by the header X-Session-ID, and not by job_id",
            "have clients send X-Session-ID: it names the program here too",
        )


def seconds_at(plan: DeploymentPlan, context_tokens: int) -> dict[str, float]:
    """The seconds of a context: computed, and loaded from each tier."""
    return {
        "recompute": plan.costs.prefill_s(context_tokens),
        **{t.value: linear_load_cost(plan.costs, t).seconds(context_tokens) for t in (Tier.DRAM, Tier.SSD)},
    }
