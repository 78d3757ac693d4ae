"""From timings to a profile: the sections that CostModel reads, and everything else as provenance."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from continuum_lmcache.errors import ProfileError
from continuum_lmcache.reload.cost_model import CHUNK_TOKENS
from profiles.engine_timing import KvShape
from profiles.fit import Fit, fit_load, fit_prefill, fit_step, refuse_poor
from profiles.timing import rounded

Timings = dict[Any, list[float]]  # seconds of each repetition


@dataclass(frozen=True, slots=True)
class Measured:
    shape: KvShape
    prefill: Timings  # by (tokens, context tokens)
    steps: Timings  # by (chunk tokens, context tokens, decoding sequences)
    copies: Timings  # by ("load" | "store", chunks)
    disk: Timings  # likewise
    kv_tokens: int  # capacity of the engine's KV cache


def profile_of(measured: Measured, force: bool = False) -> dict[str, Any]:
    """The profile, without author and date. Raises ProfileError where the timings make no sense."""
    prefill = fit_prefill(medians(measured.prefill))
    refuse_poor(prefill, "prefill", force)
    if not measured.steps:
        raise ProfileError("no step was timed: was there too little time (--budget-s)?")
    longest = max(chunk for chunk, _, _ in measured.steps)
    alone = {(n, c, 0): s for (n, c), s in medians(measured.prefill).items() if n <= longest}
    step = fit_step(alone | medians(measured.steps))  # and the prefills that one step can hold
    profile: dict[str, Any] = {
        "prefill": section(prefill, measured.prefill),
        "kv_bytes_per_token": measured.shape.bytes_per_token,
        "chunk_tokens": CHUNK_TOKENS,
        "step": section(step, measured.steps),
        "kv_tokens": measured.kv_tokens,
    }
    provenance = {
        "measured": True,
        "prefill_fit": prefill.provenance() | points(measured.prefill, "tokens", "context_tokens"),
        "step_fit": step.provenance(),
        "steps": points(measured.steps, "chunk_tokens", "context_tokens", "decoding"),
    }
    for name, source, timings, way in (
        ("dram", "host_to_device", measured.copies, "load"),
        ("dram_store", "device_to_host", measured.copies, "store"),
        ("ssd", "disk_read", measured.disk, "load"),
        ("ssd_store", "disk_write", measured.disk, "store"),
    ):
        chunk_bytes = CHUNK_TOKENS * measured.shape.bytes_per_token
        mine = {(n,): samples for (direction, n), samples in timings.items() if direction == way}
        fit = fit_load({n * chunk_bytes: seconds for (n,), seconds in medians(mine).items()})
        profile[name] = {
            "bytes_per_s": rounded(1.0 / fit.terms["s_per_byte"]),
            "fixed_s": rounded(fit.terms["fixed_s"]),
            "samples": sum(map(len, mine.values())),
        }
        provenance[source] = fit.provenance() | points(mine, "chunks")
    return {**profile, "provenance": provenance}


def section(fit: Fit, timings: Timings) -> dict[str, float]:
    terms = {name: rounded(value) for name, value in fit.terms.items()}
    return {**terms, "samples": sum(map(len, timings.values()))}


def medians(timings: Timings) -> dict[Any, float]:
    return {point: median(samples) for point, samples in timings.items()}


def points(timings: Timings, *names: str) -> dict[str, Any]:
    rows = [
        dict(zip(names, point, strict=True))
        | {"median_s": rounded(median(samples)), "min_s": rounded(min(samples))}
        | {"max_s": rounded(max(samples)), "n": len(samples)}
        for point, samples in timings.items()
    ]
    return {"points": rows}
