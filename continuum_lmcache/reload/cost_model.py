"""PrefillReload: what a returning turn pays for a prefix that is not on the GPU, tier by tier.

    [0, gpu)     in vLLM's prefix cache    0
    [gpu, dram)  in LMCache's DRAM         bytes / host-to-device rate + fixed
    [dram, ssd)  on LMCache's disk         bytes / disk rate + fixed, and the copy after it
    [ssd, n)     in no tier                prefill at that context

It is never more than the time to compute all of [gpu, n). Loading ends at the tier where computing the rest
is cheaper, and the connector must end there too (`ReloadCost.loaded_tokens`, load_policy.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from continuum_lmcache.errors import ProfileError
from continuum_lmcache.types import Residency, Tier

CHUNK_TOKENS = 256  # LMCache's default
CERTAIN: Mapping[Tier, float] = {}  # every tier keeps what it holds


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds to compute tokens: linear layers, and attention to all tokens before."""

    fixed_s: float  # once a prefill
    per_token_s: float
    per_pair_s: float  # for each pair of a new token and one it attends to
    samples: int  # number of measurements; 0: assumed

    def seconds(self, tokens: int, context_tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        pairs = tokens * context_tokens + tokens * tokens / 2
        return self.fixed_s + tokens * self.per_token_s + pairs * self.per_pair_s

    def slower(self, times: float, samples: int) -> PrefillCurve:
        return PrefillCurve(self.fixed_s * times, self.per_token_s * times, self.per_pair_s * times, samples)


@dataclass(frozen=True, slots=True)
class TransferRate:
    bytes_per_s: float
    fixed_s: float  # once a load
    samples: int  # number of measurements; 0: assumed

    def seconds(self, size_bytes: int) -> float:
        return self.fixed_s + size_bytes / self.bytes_per_s if size_bytes > 0 else 0.0

    def slower(self, times: float, samples: int) -> TransferRate:
        return TransferRate(self.bytes_per_s / times, self.fixed_s * times, samples)


@dataclass(frozen=True, slots=True)
class ReloadCost:
    loaded_tokens: int  # how far loading pays, after the GPU's part
    load_s: float  # DRAM to GPU, after disk to DRAM of the part on disk
    prefill_s: float  # what must be computed, in steps that all requests on the GPU share

    @property
    def total_s(self) -> float:
        return self.load_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class CostModel:
    """A machine and a model, in seconds. Measured by profiles/measure.py, or assumed."""

    prefill: PrefillCurve
    dram: TransferRate  # host to device
    ssd: TransferRate  # disk to host
    kv_bytes_per_token: int
    chunk_tokens: int  # LMCache's; a tail below it is in no tier

    @property
    def measured(self) -> bool:
        return min(self.prefill.samples, self.dram.samples, self.ssd.samples) > 0

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds to compute `tokens` tokens after `context_tokens` whose KV is on the GPU."""
        return self.prefill.seconds(tokens, context_tokens)

    def load_options(self, where: Residency) -> list[ReloadCost]:
        """Load nothing, DRAM's part, or both parts: the last is the whole load."""
        dram_tokens, ssd_tokens = where.dram_tokens, where.ssd_tokens
        return [self.load_cost(where, d, s) for d, s in ((0, 0), (dram_tokens, 0), (dram_tokens, ssd_tokens))]

    def reload_s(self, where: Residency, survival: Mapping[Tier, float] = CERTAIN) -> float:
        """PrefillReload (Continuum, arXiv 2511.02230 §4, eq. 2) in seconds, for a prompt whose tokens are at
        `where`: the cheapest of `load_options`, expected over what the tiers may lose before the return.

        `survival` has for each existing tier the probability, 0 to 1, that it still holds its part
        then, independently; a tier that is missing there loses nothing. The disk has a copy of what
        DRAM holds: what DRAM loses is read from disk, unless the disk has lost it too. What is lost in both
        must be computed, with all that comes after it, since a prefix may have no hole.
        """
        held_tokens = where.dram_tokens + where.ssd_tokens
        if not held_tokens:
            return self.prefill.seconds(where.total_tokens - where.gpu_tokens, where.gpu_tokens)
        has_disk = Tier.SSD in survival or where.ssd_tokens > 0
        disk_keeps = survival.get(Tier.SSD, 1.0) if has_disk else 0.0
        dram_keeps = survival.get(Tier.DRAM, 1.0) if where.dram_tokens else 0.0
        compute_s, dram_s, both_s = (cost.total_s for cost in self.load_options(where))
        disk_s = self.load_cost(where, 0, held_tokens).total_s
        only_dram_s, only_disk_s = min(compute_s, dram_s), min(compute_s, disk_s)
        with_dram_s = expected(disk_keeps, min(only_dram_s, both_s), only_dram_s)
        without_dram_s = expected(disk_keeps, only_disk_s, compute_s)
        return expected(dram_keeps, with_dram_s, without_dram_s)

    @classmethod
    def from_mapping(cls, profile: Mapping[str, Any], where: str = "profile") -> CostModel:
        """From a profile that the caller has read (format: profiles/README.md). Raises ProfileError.

        Sections `prefill`, `dram`, `ssd` have the fields of PrefillCurve and TransferRate. Only the simulator
        reads SIMULATOR_KEYS, nobody UNREAD_KEYS. Any other key is refused.
        """
        if not isinstance(profile, Mapping):
            raise ProfileError(f"{where} must be a mapping with the sections {', '.join(SECTIONS)}")
        refuse_unknown_keys(profile, (*SECTIONS, *COUNTS, *SIMULATOR_KEYS, *UNREAD_KEYS), where)
        return cls(
            **{name: section(profile, name, kind, where) for name, kind in SECTIONS.items()},
            kv_bytes_per_token=int(number(profile, "kv_bytes_per_token", where, least=1)),
            chunk_tokens=int(number(profile, "chunk_tokens", where, least=1)),
        )

    def load_cost(self, where: Residency, dram_tokens: int, ssd_tokens: int) -> ReloadCost:
        """The cost of loading this much from each tier and computing the rest."""
        dram_bytes, ssd_bytes = dram_tokens * self.kv_bytes_per_token, ssd_tokens * self.kv_bytes_per_token
        disk_s = self.ssd.seconds(ssd_bytes) + self.dram.seconds(ssd_bytes)
        there_tokens = where.gpu_tokens + dram_tokens + ssd_tokens
        prefill_s = self.prefill.seconds(where.total_tokens - there_tokens, there_tokens)
        return ReloadCost(dram_tokens + ssd_tokens, self.dram.seconds(dram_bytes) + disk_s, prefill_s)


SECTIONS: dict[str, Any] = {"prefill": PrefillCurve, "dram": TransferRate, "ssd": TransferRate}
COUNTS = ("kv_bytes_per_token", "chunk_tokens")
SIMULATOR_KEYS = ("step", "dram_store", "ssd_store", "kv_tokens")  # no TTL depends on them
UNREAD_KEYS = ("provenance", "steps")  # for people; steps' times are measured while serving


def expected(chance: float, with_it_s: float, without_s: float) -> float:
    """The mean of two costs; the first has this probability."""
    return chance * with_it_s + (1.0 - chance) * without_s


def section(profile: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    given = profile.get(name)
    if not isinstance(given, Mapping):
        raise ProfileError(f"{where} has no section {name!r}; measure it with `continuum-lmcache measure`")
    fields = tuple(kind.__slots__)
    refuse_unknown_keys(given, fields, f"{where}, {name}")
    found = {f: number(given, f, f"{where}, {name}") for f in fields}
    if found.get("bytes_per_s") == 0:
        raise ProfileError(f"{where}, {name}: bytes_per_s is 0; it must be above 0")
    return kind(**found | {"samples": int(found["samples"])})


def number(given: Mapping[Any, Any], name: Any, where: str, least: float = 0.0) -> float:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ProfileError(f"{where}: {name} is {value!r}; it must be a finite number >= {least:g}")
    return value


def refuse_unknown_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := sorted(set(map(str, given)) - set(known)):
        raise ProfileError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")


UNMEASURED = CostModel(
    # An 8B model with grouped queries on an H200, by its data sheet: 16 GFLOP a token and 0.5 MFLOP a pair at
    # half of 989 TFLOP/s. On a slower machine a pin gains more than this predicts.
    prefill=PrefillCurve(fixed_s=0.004, per_token_s=3.2e-5, per_pair_s=1.1e-9, samples=0),
    dram=TransferRate(bytes_per_s=25e9, fixed_s=0.001, samples=0),  # PCIe 4.0 x16
    ssd=TransferRate(bytes_per_s=3e9, fixed_s=0.005, samples=0),  # one NVMe drive
    kv_bytes_per_token=131_072,  # 32 layers x 8 heads x 128 x 2 (K and V) x 2 bytes
    chunk_tokens=CHUNK_TOKENS,
)
"""The assumed costs of a machine without a measured profile. Every `samples` is 0."""


def kv_bytes_per_token(kv_cache_config: Any) -> int:
    """Bytes of one token's KV on one rank, over all layers, by vLLM's KVCacheConfig.

    For layers with one block table the scheduler's config has one spec. Its tensors have
    each layer's page: the smaller one of two strides, since layers or blocks may come first.
    """
    tensors = kv_cache_config.kv_cache_tensors
    pages = {name: min(each.layer_stride, each.block_stride) for each in tensors for name in each.layers}
    total = 0.0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        for name, one in by_layer.items():
            total += pages.get(name, one.page_size_bytes) / one.block_size
    return round(total)
