"""How long a step of the model takes, on a machine that a profile describes (profiles/README.md).

    step = fixed + per sequence + max(weights, linear layers) + prefill attention + decode's KV reads

    weights            step.least_linear_s: reading them takes so long, however few the tokens
    linear layers      step.per_token_s * (tokens + half_rate_tokens): n reach n / (n + c0) of the rate
    prefill attention  step.per_pair_s * (n * context + n^2 / 2)
    decode             step.per_cached_token_s * the tokens it attends to

A live server's policy reads the same file (continuum_lmcache.reload.cost_model), so the simulated machine
and the policy's profile of it differ only where `Setup.told_gbps` has the profile lie. The built-in machines
come from data sheets: `measured` is false, and every result carries it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from continuum_lmcache.errors import ProfileError
from continuum_lmcache.reload.cost_model import CostModel, TransferRate, number, section
from experiments.sim.datasheets import PROFILES, derived


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Seconds of one engine step. A sequence with one new token decodes, any other is a prefill chunk."""

    fixed_s: float  # once a step
    per_sequence_s: float  # for each request in the batch
    per_token_s: float  # linear layers, for each new token
    least_linear_s: float  # their minimum
    half_rate_tokens: float  # at so many tokens the linear layers reach half their rate
    per_pair_s: float  # for each pair of a prefill's new token and one it attends to
    per_cached_token_s: float  # for each token that a decode attends to
    samples: int  # measurements behind the fit; 0: assumed

    def seconds(self, batch: Iterable[tuple[int, int]]) -> float:
        """One step over `batch`: for each request its new tokens, and the tokens before those."""
        tokens = pairs = read_tokens = sequences = 0.0
        for new, context in batch:
            sequences += 1
            tokens += new
            if new == 1:
                read_tokens += context
            else:
                pairs += new * context + new * new / 2
        if not sequences:
            return 0.0
        linear_s = max(self.least_linear_s, self.per_token_s * (tokens + self.half_rate_tokens))
        attention_s = self.per_pair_s * pairs + self.per_cached_token_s * read_tokens
        return self.fixed_s + self.per_sequence_s * sequences + linear_s + attention_s


@dataclass(frozen=True, slots=True)
class Machine:
    """An accelerator with one model, by a profile. `profile` is the policy's."""

    name: str
    profile: Mapping[str, Any]
    costs: CostModel
    step: StepCurve
    ssd_store: TransferRate  # host to disk
    kv_tokens: int  # capacity of its KV cache

    @classmethod
    def from_profile(cls, profile: Mapping[str, Any], name: str, kv_tokens: int | None = None) -> Machine:
        """From a profile that was read at the edge. Raises ProfileError for a bad or missing section.

        `kv_tokens` replaces the profile's: a server may be given less memory than the card has.
        """
        costs = CostModel.from_mapping(profile, name)
        lacking = [key for key in ("step", "ssd_store") if key not in profile]
        if lacking:
            raise ProfileError(
                f"{name} has no section {lacking[0]!r}, which the simulator needs for step times; "
                "measure the machine again with continuum-lmcache measure"
            )
        known = kv_tokens if kv_tokens is not None else int(number(profile, "kv_tokens", name, least=1))
        return cls(
            name=name,
            profile=profile,
            costs=costs,
            step=section(profile, "step", StepCurve, name),
            ssd_store=section(profile, "ssd_store", TransferRate, name),
            kv_tokens=known,
        )

    @property
    def measured(self) -> bool:
        """Whether a step's time was measured."""
        return self.step.samples > 0

    @property
    def kv_bytes_per_token(self) -> int:
        return self.costs.kv_bytes_per_token

    def seconds(self, batch: Iterable[tuple[int, int]]) -> float:
        """One step over `batch` (StepCurve.seconds)."""
        return self.step.seconds(batch)

    def policy_profile(self, chunk_tokens: int, ssd_gbps: float | None) -> dict[str, Any]:
        """The profile for a policy, with the chunk and the disk of one setup."""
        found = {**self.profile, "chunk_tokens": chunk_tokens}
        if ssd_gbps is not None:
            found["ssd"] = {**self.profile["ssd"], "bytes_per_s": ssd_gbps * 1e9}
        return found


SMALL_KV_TOKENS = {"a10": 26_880, "rtx-5090": 95_856, "l40s": 192_768}  # as the doctor computes them
PAIR = "2xh100-qwen3-coder-30b"  # the machine of the public closed-loop figures
TIER_STEP_S = {PAIR: 0.008}  # by so much a step is longer with a tier, in its logs; 0 where nothing is known
MACHINES = {
    name: Machine.from_profile(derived(card), name)
    for name, card in {"a100": "a100-80gb", "h100": "h100", "h200": "h200", "b200": "b200"}.items()
}
MACHINES |= {
    card: Machine.from_profile(derived(card, tokens), card) for card, tokens in SMALL_KV_TOKENS.items()
}
MACHINES |= {PAIR: Machine.from_profile(yaml.safe_load((PROFILES / f"{PAIR}.yaml").read_text()), PAIR)}
"""Eight-billion-parameter serving on one card, from data sheets (datasheets.py); and PAIR."""
