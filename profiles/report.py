"""From timings to a profile: the sections that Costs reads, and everything else as provenance."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from profiles.engine_timing import KvShape
from profiles.fit import Fit, fit_decode, fit_load, fit_prefill, fit_step, refuse_poor
from profiles.timing import Sample, Which, rounded, summary

Timings = dict[Any, list[Sample]]


@dataclass(frozen=True, slots=True)
class Measured:
    """All timings of one run."""

    shape: KvShape
    chunk_tokens: int  # LMCache's
    prefill: Timings  # by (tokens, context tokens)
    steps: Timings  # by (chunk tokens, context tokens, decoding sequences)
    copies: Timings  # by ("load" | "store", chunks)
    disk: Timings  # likewise
    kv_tokens: int  # capacity of the engine's KV cache

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.shape.bytes_per_token


def profile_of(measured: Measured, which: Which, force: bool = False) -> dict[str, Any]:
    """The profile, without author and date. Raises ProfileError where the timings make no sense.

    Disk reads are timed by the wall clock whatever `which` says: waiting is what a disk costs.
    """
    prefill = fit_prefill(medians(measured.prefill, which))
    refuse_poor(prefill, "prefill", force)
    dram, down = loads(measured, measured.copies, which)
    ssd, write = loads(measured, measured.disk, Which.WALL)
    step, step_terms = step_section(measured, which)
    counted = sum(map(len, measured.prefill.values()))
    return {
        "prefill": {**rounded_terms(prefill), "samples": counted},
        "dram": dram["rate"],
        "ssd": ssd["rate"],
        "kv_bytes_per_token": measured.shape.bytes_per_token,
        "chunk_tokens": measured.chunk_tokens,
        "step": step_terms,
        "dram_store": down["rate"],
        "ssd_store": write["rate"],
        "kv_tokens": measured.kv_tokens,
        "provenance": {
            "measured": True,
            "clock": which.value,
            "prefill_fit": prefill.provenance()
            | points(measured.prefill, ("tokens", "context_tokens"), which),
            "step_fit": step.provenance(),
            "steps": step_report(measured.steps, which),
            "host_to_device": dram["fit"],
            "device_to_host": down["fit"],
            "disk_read": ssd["fit"],
            "disk_write": write["fit"],
        },
    }


def step_section(measured: Measured, which: Which) -> tuple[Fit, dict[str, Any]]:
    """How long a step takes, from the steps and from the prefills that one step can hold."""
    longest = max(chunk for chunk, _, _ in measured.steps)
    alone = {(n, c, 0): s for (n, c), s in medians(measured.prefill, which).items() if n <= longest}
    fit = fit_step(alone | medians(measured.steps, which))
    counted = sum(map(len, measured.steps.values()))
    return fit, {**rounded_terms(fit), "samples": counted}


def loads(measured: Measured, timings: Timings, which: Which) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rates of loads and of stores, each with its fit."""
    return (
        directed(measured.chunk_bytes, timings, "load", which),
        directed(measured.chunk_bytes, timings, "store", which),
    )


def directed(chunk_bytes: int, timings: Timings, way: str, which: Which) -> dict[str, Any]:
    """One direction's Rate as a mapping, and what it rests on."""
    mine = {(n,): samples for (direction, n), samples in timings.items() if direction == way}
    fit = fit_load({n * chunk_bytes: seconds for (n,), seconds in medians(mine, which).items()})
    rate = {
        "bytes_per_s": rounded(1.0 / fit.terms["s_per_byte"]),
        "fixed_s": rounded(fit.terms["fixed_s"]),
        "samples": sum(map(len, mine.values())),
    }
    return {"rate": rate, "fit": fit.provenance() | points(mine, ("chunks",), which)}


def step_report(steps: Timings, which: Which) -> dict[str, Any]:
    """Every step timed, and the decode-only ones as a formula where there are enough."""
    report = points(steps, ("chunk_tokens", "context_tokens", "decoding"), which)
    decode = {(b, c): s for (n, c, b), s in medians(steps, which).items() if n == 0}
    if len(decode) >= 3:
        report["decode_fit"] = fit_decode(decode).provenance()
    return report


def medians(timings: Timings, which: Which) -> dict[Any, float]:
    return {point: median(s.by(which) for s in samples) for point, samples in timings.items()}


def points(timings: Timings, names: tuple[str, ...], which: Which) -> dict[str, Any]:
    rows = [
        dict(zip(names, point, strict=True)) | summary(samples, which) for point, samples in timings.items()
    ]
    return {"points": rows}


def rounded_terms(fit: Fit) -> dict[str, float]:
    return {name: rounded(value) for name, value in fit.terms.items()}
