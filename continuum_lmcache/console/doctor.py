"""`continuum-lmcache doctor`: checks a plan from files, before a server is started."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from continuum_lmcache.capacity import kv_budget, plan_check
from continuum_lmcache.capacity.kv_budget import GIB, BudgetLine, KVBudget
from continuum_lmcache.capacity.plan_check import DeploymentPlan, break_even_tokens
from continuum_lmcache.connector_names import IN_PROCESS
from continuum_lmcache.console.lmcache_check import checked, read, untried
from continuum_lmcache.console.machine_specs import MIB, MachineSpec, machine
from continuum_lmcache.console.model_files import shape_of
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cards import assumed_costs
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.reload.model_shapes import KV_BYTES, ModelShape
from continuum_lmcache.telemetry.findings import Finding, Severity, counted, note
from continuum_lmcache.types import Tier

STEP_GIB = 2.0  # activations and CUDA graphs of an 8B model with vLLM's default batch, roughly
TABLE1_TOKENS = 70_126  # the mean context of Continuum's Table 1, SWE-Bench
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
    context: int | None = None  # tokens of a program
    programs: int | None = None  # alive at the same time


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer, as `--json` prints it."""

    advisable: bool  # no finding is worse than a NOTE
    verdict: str  # one sentence for all findings
    model: str
    device: str
    context_tokens: int  # of a program
    tokens: Mapping[str, int]  # that the GPU and each tier hold
    programs: Mapping[str, int]  # the same
    costs_from: str  # "": costs are not known
    break_even_tokens: Mapping[str, float | None]  # of each tier; None: never
    arithmetic: tuple[BudgetLine, ...]  # of one rank's KV cache
    findings: tuple[Finding, ...]  # the worst first


def diagnosis(query: DoctorQuery) -> Diagnosis:
    """Read, compute, judge. Raises ConfigError or ProfileError."""
    on = machine(query.profile, query.gpu)
    plan, of_connector = planned(query, on)
    found = [*plan_check.advice(plan), *of_connector]
    counted, costs = Counter(finding.severity for finding in found), plan.costs
    tokens = {"gpu": plan.budget.tokens, **{tier.value: held for tier, held in plan.tiers.items()}}
    even = {tier.value: break_even_tokens(costs, tier) for tier in (Tier.DRAM, Tier.SSD) if costs is not None}
    return Diagnosis(
        advisable=not (counted[Severity.ERROR] or counted[Severity.WARNING]),
        verdict=verdict(counted[Severity.ERROR], counted[Severity.WARNING], plan.is_short),
        model=plan.shape.name,
        device=on.device,
        context_tokens=plan.context_tokens,
        tokens=tokens,
        programs={place: plan.programs_in(held) for place, held in tokens.items()},
        costs_from=f"{on.source}, {'' if costs.measured else 'not '}measured" if costs is not None else "",
        break_even_tokens={tier: found if math.isfinite(found) else None for tier, found in even.items()},
        arithmetic=plan.budget.steps,
        findings=tuple(sorted(found, key=lambda finding: list(Severity).index(finding.severity))),
    )


def verdict(errors: int, warnings: int, is_short: bool) -> str:
    if not errors and not warnings:
        return f"This deployment is advisable{': memory is short, so continuum helps' if is_short else ''}."
    counts = [counted(n, what) for n, what in ((errors, "error"), (warnings, "warning")) if n]
    return f"This deployment {'' if errors else 'works but '}is NOT advisable: {', '.join(counts)}."


def planned(query: DoctorQuery, on: MachineSpec) -> tuple[DeploymentPlan, list[Finding]]:
    """The plan, and what is wrong with the connector's file."""
    shape, ranks = model(query), query.tensor_parallel_size
    block_tokens = query.block_size or on.block_tokens
    config = read(query.lmcache) if query.lmcache is not None else None
    if config is not None and config["kv_connector"] == IN_PROCESS and not shape.state_layers:
        shape = replace(shape, layers=shape.layers + shape.windowed_layers, windowed_layers=0)
    kv = kv_cache(query, on, shape, block_tokens)
    all_ranks_bytes = kv.bytes_per_token * ranks
    sizes_gib: Mapping[Tier, float] = {}
    found = [NO_CONNECTOR]
    if config is not None:
        sizes_gib, found = checked(config, ranks, block_tokens, all_ranks_bytes, shape.window_tokens)
        found = [*untried(config["kv_connector"], shape, on.on_cpu), *found]
    usable_gib = {step.name: step.value for step in kv.steps}.get("usable memory", 0.0)
    sharing = (n for n in range(ranks, 257) if shape.query_heads % n == 0)
    plan = DeploymentPlan(
        shape,
        kv,
        costs_of(on, shape, kv.bytes_per_token, ranks),
        {tier: int(size * GIB / all_ranks_bytes) for tier, size in sizes_gib.items()},
        query.context or min(TABLE1_TOKENS, shape.window_tokens),
        query.context is None,
        query.programs,
        ranks,
        next((n for n in sharing if shape.weight_bytes / n / GIB < usable_gib - STEP_GIB), None),
    )
    return plan, found


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
    share = query.gpu_memory_utilization
    return kv_budget.of_memory(shape, size, share, STEP_GIB * GIB, block_tokens, ranks)
