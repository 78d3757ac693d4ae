"""Reads and checks an lmcache.json: its tiers, its known problems, and what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from continuum_lmcache.capacity.kv_budget import GIB, WorkerSpec
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.retention.policies import policy_named
from continuum_lmcache.telemetry.findings import Finding, error, note, warning
from continuum_lmcache.types import Tier

FIELDS = frozenset(  # of vLLM 0.32's KVTransferConfig
    {"kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_connector_extra_config"}
    | {"kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy"}
)
OURS = ("LMCacheConnectorV1", "ContinuumLMCacheConnector")
MP = ("LMCacheMPConnector", "ContinuumLMCacheMPConnector")
CORRECT = "correct it: no server starts with this setting"
EXTRA = "kv_connector_extra_config"
DEFAULTS: Mapping[str, Any] = {  # LMCache 0.5.6, v1/config.py; used where LMCache is not installed
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_disk": None,
    "max_local_disk_size": 0.0,
    "remote_url": None,
    "save_decode_cache": True,
    "extra_config": None,
}


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The settings of an lmcache.json."""

    kind: str
    settings: Mapping[str, Any]  # LMCache's, with the defaults; empty where the LMCache server has them
    continuum: ContinuumConfig
    findings: tuple[Finding, ...]

    def tiers(self, bytes_per_token: int) -> dict[Tier, int]:
        """Tokens that each tier of one rank holds."""
        if not self.settings:
            return {}
        sizes_gib = {
            Tier.DRAM: self.settings["max_local_cpu_size"] if self.settings["local_cpu"] else 0,
            Tier.SSD: self.settings["max_local_disk_size"] if self.settings["local_disk"] else 0,
        }
        return {tier: int(size * GIB / bytes_per_token) for tier, size in sizes_gib.items() if size}


def read(path: Path) -> Mapping[str, Any]:
    """The JSON object of --kv-transfer-config. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read as JSON: {problem}") from problem
    if not isinstance(found, dict) or not isinstance(found.get("kv_connector"), str):
        raise ConfigError(f"{path} names no kv_connector; expected what --kv-transfer-config takes")
    if not isinstance(found.get(EXTRA, {}), dict):
        raise ConfigError(f"{path}: {EXTRA} is {found[EXTRA]!r:.80}; it must be an object")
    return found


def checked(config: Mapping[str, Any], worker: WorkerSpec, lora: bool) -> ConnectorSettings:
    """The connector with all its problems. Wrong settings are findings, not errors."""
    kind, extra = config["kv_connector"], config.get(EXTRA, {})
    findings = list(outer_findings(config, lora))
    continuum, more = continuum_settings(extra)
    findings += more
    if kind not in OURS:
        if kind in MP:
            unseen = "the LMCache server's command line has the sizes of DRAM and disk, this file does not"
            findings.append(note("tiers-unknown", unseen, "look at its --l1-size-gb and --l2-adapter"))
            findings += mp_findings(extra)
        return ConnectorSettings(kind, {}, continuum, tuple(findings))
    settings, more = lmcache_settings(extra, worker)
    findings += [*more, *costly_settings(settings, worker)]
    return ConnectorSettings(kind, settings, continuum, tuple(findings))


def outer_findings(config: Mapping[str, Any], lora: bool) -> Iterator[Finding]:
    """Problems outside the settings."""
    kind = config["kv_connector"]
    if unknown := sorted(config.keys() - FIELDS):
        evidence = f"{unknown[0]!r} is no field of vLLM 0.32's KV transfer config"
        yield warning(
            "unknown-field", evidence, f"vLLM refuses it; LMCache's and our settings go into {EXTRA}"
        )
    if kind not in (*OURS, *MP):
        known = ", ".join((OURS[0], MP[0]))
        yield warning(
            "unknown-connector", f"kv_connector is {kind!r}", f"the doctor does not know it; known: {known}"
        )
    if config.get("kv_role") != "kv_both":
        yield error(
            "kv-role",
            f"kv_role is {config.get('kv_role')!r}",
            'an engine that stores and loads its own KV needs "kv_role": "kv_both"',
        )
    if kind not in (*OURS, *MP) and config.get("kv_load_failure_policy", "fail") == "fail":
        yield warning(
            "load-failure-policy",
            'kv_load_failure_policy is "fail", vLLM\'s default: a KV load that fails fails its request',
            'set "kv_load_failure_policy": "recompute"',
        )
    if lora and kind in (*OURS, *MP):
        yield error(
            "lora",
            "LMCache 0.5.6 does not tell LoRA adapters apart: it would load one's KV for another",
            "drop --enable-lora or the KV connector",
        )


def continuum_settings(extra: Mapping[str, Any]) -> tuple[ContinuumConfig, list[Finding]]:
    """The `continuum.*` settings, or the defaults and the problems."""
    try:
        found = ContinuumConfig.load(extra, os.environ)
        policy_named(found.policy)
    except ConfigError as problem:
        return ContinuumConfig(), [error("continuum-setting", str(problem), CORRECT)]
    if found.profile and not Path(found.profile).is_file():
        missing = f"continuum.profile is {found.profile!r}, which is no file here"
        return found, [error("no-profile-file", missing, "name a profile by a path that the server can read")]
    return found, []


def lmcache_settings(extra: Mapping[str, Any], worker: WorkerSpec) -> tuple[Mapping[str, Any], list[Finding]]:
    """LMCache's settings as our connector would pass them on, and why it would refuse them.

    Read with LMCache's own definitions where it is installed; else taken unchecked.
    """
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # otherwise its import logs to stdout
    try:
        from connectors.lmcache.known_issues import defaults, known_problems
        from connectors.lmcache.settings import DEFAULTS as ALL
        from connectors.lmcache.settings import given
    except ModuleNotFoundError as missing:
        found = [not_installed(missing)]
        try:
            return as_written(extra), found
        except ConfigError as problem:
            return DEFAULTS, [*found, error("lmcache-setting", str(problem), CORRECT)]
    known = {**ALL, "pre_caching_hash_algorithm": "sha256_cbor", "save_decode_cache": True}  # as ours are
    try:
        user = given(extra, os.environ)
    except ConfigError as problem:
        return known, [error("lmcache-setting", str(problem), CORRECT)]
    as_given = known | user
    if refused := known_problems(as_given, os.environ, worker):
        return as_given, [error("lmcache-known-issue", why, CORRECT) for why in refused]
    return as_given | defaults(user, worker), []


def mp_findings(extra: Mapping[str, Any]) -> list[Finding]:
    """Why our MP connector would refuse its settings."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    try:
        from connectors.lmcache_mp.settings import with_defaults
    except ModuleNotFoundError as missing:
        return [not_installed(missing)]
    try:
        with_defaults(extra)
    except ConfigError as problem:
        return [error("lmcache-setting", str(problem), CORRECT)]
    return []


def not_installed(missing: ModuleNotFoundError) -> Finding:
    unread = f"{missing.name} is not installed here: lmcache.* keys are taken as they are written"
    return note("lmcache-not-installed", unread, "run doctor where the server runs")


def as_written(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """LMCache's settings without LMCache. Raises ConfigError for one with another type than its default."""
    written = {k.removeprefix("lmcache."): v for k, v in extra.items() if k.startswith("lmcache.")}
    for name in written.keys() & DEFAULTS.keys():
        value, default = written[name], DEFAULTS[name]
        is_number = isinstance(value, int | float) and abs(value) < 2**63
        if isinstance(default, int | float) and not is_number:
            raise ConfigError(f"lmcache.{name} is {value!r:.80}; it must be like {default!r}")
        if name == "extra_config" and not isinstance(value, dict | None):
            raise ConfigError(f"lmcache.{name} is {value!r:.80}; it must be an object")
    return {**DEFAULTS, **written}


def costly_settings(settings: Mapping[str, Any], worker: WorkerSpec) -> Iterator[Finding]:
    """Settings that work but cost something."""
    if not settings["local_cpu"] and not settings["local_disk"] and not settings["remote_url"]:
        yield error(
            "no-tier", "local_cpu is false and there is no disk: nothing is kept", "set lmcache.local_cpu"
        )
    if not settings["save_decode_cache"]:
        yield warning(
            "answers-not-saved",
            "save_decode_cache is false: what a turn generates is computed again for the next one",
            "remove it; true is our default",
        )
    if not worker.on_cpu and settings["chunk_size"] % worker.block_tokens:
        yield warning(
            "chunk-splits-blocks",
            f"chunk_size {settings['chunk_size']} is no multiple of vLLM's {worker.block_tokens}-token block",
            "loads end inside a block, which is computed again: use a multiple",
        )
    if settings["remote_url"]:
        yield note(
            "remote",
            "remote_url is set",
            "the scheduler sees DRAM and disk only; a remote hit counts as none",
        )
    yield from on_this_machine(settings)


def on_this_machine(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Compares the tiers' sizes with the machine that runs the doctor."""
    wanted = settings["max_local_cpu_size"] * GIB
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > total:
        yield note(
            "dram-exceeds-this-machine",
            f"max_local_cpu_size is {wanted / GIB:g} GiB, this machine has {total / GIB:.1f}",
            "fine if the server runs elsewhere; else lower it, it is allocated at the start",
        )
    if not settings["local_disk"]:
        return
    if (settings["extra_config"] or {}).get("use_odirect") is False:
        yield warning(
            "page-cache",
            "use_odirect is false: reads come from the page cache while there is free memory",
            "remove it: else the disk's measured rate is that of memory, and falls later",
        )
    folder = Path(str(settings["local_disk"]).removeprefix("file://"))
    try:
        home = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    except OSError as problem:
        unseen = f"local_disk is {str(folder)!r:.80}, which cannot be read here: {problem.strerror}"
        yield warning("disk-unseen", unseen, "name a folder that the server can write to")
        return
    free, size = shutil.disk_usage(home).free, settings["max_local_disk_size"] * GIB
    if size > free:
        yield warning(
            "disk-too-small",
            f"max_local_disk_size is {size / GIB:g} GiB, and {free / GIB:.1f} are free at {folder} here",
            "writes will fail when the disk is full: lower it, or name another disk",
        )
