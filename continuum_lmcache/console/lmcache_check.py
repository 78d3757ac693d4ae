"""Reads and checks the file of --kv-transfer-config: its tiers, its known problems, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from continuum_lmcache.capacity.kv_budget import GIB
from continuum_lmcache.capacity.plan_check import WATERMARK
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.connector_names import AUTOSTART, EXTRA, IN_PROCESS, OURS, OVER_LMCACHE, OVER_NATIVE
from continuum_lmcache.console.machine_specs import read_object
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.policy.named import policy_named
from continuum_lmcache.reload.model_shapes import ModelShape
from continuum_lmcache.telemetry.findings import Finding, error, note, warning
from continuum_lmcache.types import Tier

LMCACHE = (*(name for name, ours in OURS.items() if ours is OVER_LMCACHE), OVER_LMCACHE[0])
NATIVE = (*(name for name, ours in OURS.items() if ours is OVER_NATIVE), OVER_NATIVE[0])
CORRECT = "correct it: no server starts with this setting"


Checked = tuple[Mapping[Tier, float], list[Finding]]
"""The tiers' sizes in GiB (none where LMCache's server has its own command line), and all findings."""


def read(path: Path) -> Mapping[str, Any]:
    """The JSON object of --kv-transfer-config. Raises ConfigError."""
    found = read_object(path, "what --kv-transfer-config takes")
    if not isinstance(found.get("kv_connector"), str):
        raise ConfigError(f"{path} names no kv_connector; expected what --kv-transfer-config takes")
    if not isinstance(found.get(EXTRA, {}), dict):
        raise ConfigError(f"{path}: {EXTRA} is {found[EXTRA]!r:.80}; it must be an object")
    return found


def checked(
    config: Mapping[str, Any], ranks: int, block_tokens: int, kv_bytes: int, window_tokens: int
) -> Checked:
    """The connector with all its problems; `kv_bytes`: of a token, all ranks. Wrong settings are findings."""
    kind, extra = config["kv_connector"], config.get(EXTRA, {})
    sizes_gib: Mapping[Tier, float] = {}
    more: list[Finding] = []
    if kind in NATIVE:
        sizes_gib = {Tier.DRAM: extra.get("cpu_bytes_to_use", 0) / GIB}
    elif kind in LMCACHE:
        asked = {AUTOSTART: True, **extra} if kind == IN_PROCESS else extra
        sizes_gib, more = server_sizes(asked, ranks, block_tokens, kv_bytes, window_tokens)
    return sizes_gib, [*outer_findings(config), *continuum_findings(extra), *more]


def untried(kind: str, shape: ModelShape, on_cpu: bool) -> Iterator[Finding]:
    """What LMCache refuses of this model, or nobody has tried (docs/models.md)."""
    what = shape.special_layers
    if kind not in LMCACHE or not what:
        return
    without = "leave --lmcache out"
    if shape.state_layers and kind == IN_PROCESS:
        refused = f"vLLM starts no {what} with {kind}"
        yield error("lmcache-refuses-model", refused, f"{without}, or name {LMCACHE[1]}")
    elif on_cpu:
        yield error("lmcache-refuses-model", f"LMCache 0.5.6 refuses {what} on a CPU", without)
    else:
        found = f"nobody has tried {what} over LMCache's server on a GPU with this project"
        yield warning("untried-over-lmcache", found, f"try it first, or {without} (docs/models.md)")


def outer_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    kind = config["kv_connector"]
    if kind not in (*LMCACHE, *NATIVE):
        known = ", ".join((*LMCACHE, *NATIVE))
        yield warning(
            "unknown-connector", f"kv_connector is {kind!r}", f"the doctor does not know it; known: {known}"
        )
    if config.get("kv_role") != "kv_both":
        yield error(
            "kv-role",
            f"kv_role is {config.get('kv_role')!r}",
            'an engine that stores and loads its own KV needs "kv_role": "kv_both"',
        )


def continuum_findings(extra: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        found = ContinuumConfig.load(extra, os.environ)
        policy_named(found.policy)
    except ConfigError as problem:
        yield error("continuum-setting", str(problem), CORRECT)
        return
    if found.profile and not Path(found.profile).is_file():
        missing = f"continuum.profile is {found.profile!r}, which is no file here"
        yield error("no-profile-file", missing, "name a profile by a path that the server can read")


def server_sizes(
    extra: Mapping[str, Any], ranks: int, block_tokens: int, kv_bytes: int, window_tokens: int
) -> Checked:
    """The sizes, in GiB, of the server that a worker starts, and why our connector would refuse it."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # otherwise its import logs to stdout
    try:
        from connectors.lmcache_mp.settings import with_defaults
        from connectors.lmcache_mp.translation import EngineShape, misspelt, parse_server_args, translated
    except ModuleNotFoundError as missing:
        unread = f"{missing.name} is not installed here: lmcache.* keys were not read"
        return {}, [note("lmcache-not-installed", unread, "run doctor where the server runs")]
    shape = EngineShape(ranks, block_tokens, kv_bytes, window_tokens)
    try:
        found, said = translated(extra, os.environ, shape)
        with_defaults(found)
        args, _ = parse_server_args(found)
    except ConfigError as problem:
        return {}, [error("lmcache-setting", str(problem), CORRECT)]
    if not found.get(AUTOSTART):
        unseen = "the LMCache server's command line has the sizes of DRAM and disk, this file does not"
        return {}, [note("tiers-unknown", unseen, "look at its --l1-size-gb and --l2-adapter")]
    disks = (a.get("max_capacity_gb", 0) * filled(a.get("eviction")) for a in args.l2_adapter)
    share = args.eviction_trigger_watermark or WATERMARK
    sizes = {Tier.DRAM: args.l1_size_gb * share, Tier.SSD: sum(disks)}
    more = [warning("misspelt-variable", why, "correct it, or unset it") for why in misspelt(os.environ)]
    more.append(note("lmcache-server", said, "nothing, if that is meant"))
    return {tier: size for tier, size in sizes.items() if size}, more


def filled(eviction: Any) -> float:
    """The share of an adapter's size that is filled before LMCache evicts; all of it if it never does."""
    if not isinstance(eviction, Mapping):
        return 1.0
    share = eviction.get("trigger_watermark")
    return share if isinstance(share, float) and 0 < share <= 1 else WATERMARK
