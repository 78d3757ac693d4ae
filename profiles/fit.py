"""Curves through timings: least squares of the relative error, with no coefficient below zero.

Relative, so that a short prefill counts as much as a long one; not below zero, since a machine that
gains time with size has been measured wrongly and `CostModel` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from continuum_lmcache.errors import ProfileError
from profiles.timing import rounded

LEAST_R2 = 0.98


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients by name, and how well they tell the timings."""

    terms: dict[str, float]
    r2: float  # of the seconds, 1 is perfect
    residuals: tuple[float, ...]  # fitted / measured - 1, a number per point

    def provenance(self) -> dict[str, Any]:
        return {
            "r2": rounded(self.r2),
            "terms": {name: rounded(value) for name, value in self.terms.items()},
            "relative_residuals": [round(value, 3) for value in self.residuals],
            "worst_relative_residual": round(max(map(abs, self.residuals)), 3),
        }


def fitted(names: Sequence[str], rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """The fit of seconds[i] = sum over j of terms[j] * rows[i][j]. Raises ProfileError."""
    if len(rows) < len(names):
        raise ProfileError(
            f"{len(rows)} points cannot fix {', '.join(names)}: {len(names)} are needed; was there too "
            "little time (--budget-s), or is the KV cache too small?"
        )
    if min(seconds) <= 0:
        raise ProfileError("a timing of 0 s: the clock is too coarse for the smallest point")
    measured = np.asarray(seconds, dtype=float)
    table = np.asarray(rows, dtype=float)
    relative = table / measured[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)  # the columns differ by 10^9
    terms = nnls(relative / scale, np.ones(len(measured)))[0] / scale
    said = table @ terms
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - said) ** 2).sum())
    return Fit(
        dict(zip(names, map(float, terms), strict=True)),
        r2=1.0 - missed / spread if spread > 0 else 0.0,
        residuals=tuple(map(float, said / measured - 1.0)),
    )


def fit_prefill(seconds: Mapping[tuple[int, int], float]) -> Fit:
    """PrefillCurve's coefficients from {(tokens, context tokens): seconds}.

    On a GPU a short prefill takes as long as one of some hundred tokens (768 on an H200: 17 ms). The curve
    does not say so, but these points must not bend it.
    """

    def at(floor: int) -> Fit:
        rows = [(1.0, max(floor, n), n * c + n * n / 2) for n, c in seconds]
        return fitted(("fixed_s", "per_token_s", "per_pair_s"), rows, list(seconds.values()))

    return best(at, max((n for n, _ in seconds), default=0))[1]


def fit_load(seconds: Mapping[int, float]) -> Fit:
    """A TransferRate's coefficients from {bytes: seconds}; `s_per_byte` is above 0, or ProfileError."""
    fit = fitted(("fixed_s", "s_per_byte"), [(1.0, size) for size in seconds], list(seconds.values()))
    if fit.terms["s_per_byte"] <= 0:
        raise ProfileError(f"moving {max(seconds)} bytes took no longer than {min(seconds)}: no rate to tell")
    return fit


def fit_step(seconds: Mapping[tuple[int, int, int], float]) -> Fit:
    """StepCurve's coefficients (experiments/sim/step_time.py) from {(chunk, context, decoding): seconds}.

    A chunk of 0 decodes only.
    """

    def at(floor: int) -> Fit:
        rows = [
            (1.0, batch + (n > 0), max(floor, n + batch), n * context + n * n / 2, batch * context)
            for n, context, batch in seconds
        ]
        return fitted(STEP_TERMS, rows, list(seconds.values()))

    floor, fit = best(at, max((n + batch for n, _, batch in seconds), default=0))
    terms = fit.terms | {"least_linear_s": floor * fit.terms["per_token_s"], "half_rate_tokens": 0.0}
    return Fit(terms, fit.r2, fit.residuals)


def best(fit_at: Callable[[int], Fit], most_tokens: int) -> tuple[int, Fit]:
    """Of FLOORS up to half of `most_tokens` the one with the least relative error, and its fit.

    Linear layers take as long as for `floor` tokens while there are fewer. k * max(floor, n) is linear in k,
    so each floor is tried.
    """
    floors = [floor for floor in FLOORS if 2 * floor <= most_tokens]
    fits = ((floor, fit_at(floor)) for floor in floors)
    return min(fits, key=lambda found: sum(residual * residual for residual in found[1].residuals))


FLOORS = (0, 32, 64, 128, 256, 512, 640, 768, 1024)
STEP_TERMS = ("fixed_s", "per_sequence_s", "per_token_s", "per_pair_s", "per_cached_token_s")


def refuse_poor(fit: Fit, what: str, force: bool) -> None:
    """Raise ProfileError if the fit is no description of the timings, unless `force`."""
    if fit.r2 < LEAST_R2 and not force:
        raise ProfileError(
            f"{what}: R2 is {fit.r2:.3f}, under {LEAST_R2}; is the machine busy? Measure again when it is "
            "quiet, or keep the fit as it is with --force"
        )
