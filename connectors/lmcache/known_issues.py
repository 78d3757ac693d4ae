"""Settings under which LMCache 0.5.6 caches nothing, hangs or dies: defaults that avoid them, and refusals.

Every case occurred on a running server. Each refusal states the cause, the numbers, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING

from connectors.lmcache.settings import DEFAULTS, PREFIX, given
from continuum_lmcache.capacity.kv_budget import GIB, WorkerSpec
from continuum_lmcache.errors import ConfigError

ALIGN_BYTES = 4096  # of a chunk in LMCache's DRAM pool
FILE_NAME_BYTES = 255  # NAME_MAX of Linux's file systems
KEY_BYTES = 64  # rank, hash and dtype, which LMCache appends to the model's name
POOL_SHARE = 7 / 8  # of the DRAM pool for one load; the rest is for chunks that are being written to disk

LAYERWISE = (
    "{} moves KV layer by layer, in hooks that vLLM 0.32 skips where it replays a FULL CUDA graph, and "
    "LMCache 0.5.6 does not report what was loaded: loads could not be checked or timed; remove it"
)


def with_defaults(
    extra: Mapping[str, Any], environ: Mapping[str, str], machine: WorkerSpec
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The extra config for LMCache, and which of its defaults are ours.

    A second call changes nothing. Raises ConfigError for settings that are unknown or known to fail.
    """
    if extra.get("use_native"):
        raise ConfigError("use_native selects vLLM's old copy of LMCache's adapter; remove it")
    if extra.get("use_layerwise"):
        raise ConfigError(LAYERWISE.format("use_layerwise"))
    user = given(extra, environ)
    settings = {**DEFAULTS, "pre_caching_hash_algorithm": "sha256_cbor", **user}
    for why in known_problems(settings, environ, machine):
        raise ConfigError(why)
    ours = {name: value for name, value in defaults(user, machine).items() if user.get(name) != value}
    return {**extra, **{PREFIX + name: value for name, value in ours.items()}}, ours


def defaults(user: Mapping[str, Any], machine: WorkerSpec) -> dict[str, Any]:
    """Values for what the user did not set. `user` has none of `known_problems`."""
    settings = {**DEFAULTS, **user}
    load_chunks = max(1, int(pool_chunks(settings, machine) * POOL_SHARE))
    found = {
        "pre_caching_hash_algorithm": "sha256_cbor",
        "save_decode_cache": True,  # the next turn's prompt holds this turn's output
        "max_tokens_per_load": load_chunks * settings["chunk_size"],
    }
    found = {name: value for name, value in found.items() if name not in user}
    if settings["local_disk"]:
        # without O_DIRECT the page cache serves reads, and the measured rate of the disk tier is wrong
        found["extra_config"] = {"use_odirect": True, **(settings["extra_config"] or {})}
    return found


def pool_chunks(settings: Mapping[str, Any], machine: WorkerSpec) -> int:
    """How many chunks LMCache's DRAM pool holds."""
    chunk_bytes: int = settings["chunk_size"] * machine.kv_bytes_per_token
    aligned_bytes = -(-chunk_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return int(settings["max_local_cpu_size"] * GIB) // aligned_bytes


def known_problems(settings: Mapping[str, Any], environ: Mapping[str, str], machine: WorkerSpec) -> list[str]:
    """Why LMCache fails, hangs or caches nothing under `settings`: the first reason of each kind."""
    kinds = [
        _modes(settings),
        _hash(settings["pre_caching_hash_algorithm"], environ),
        _dram(settings, machine),
        _disk(settings, machine),
        _on_cpu(settings, machine),
    ]
    return [why for kind in kinds if (why := next(kind, None)) is not None]


def _modes(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings["enable_async_loading"]:
        yield (
            f"{PREFIX}enable_async_loading is broken in LMCache 0.5.6: the second hit on a chunk frees it "
            "twice and the engine dies; remove it"
        )
    for name in ("use_layerwise", "enable_blending"):
        if settings[name]:
            yield LAYERWISE.format(PREFIX + name)
    if settings["use_gpu_connector_v3"]:
        yield (
            f"{PREFIX}use_gpu_connector_v3 dies at its first store in LMCache 0.5.6, since vLLM packs K and "
            "V (LMCache issue 4463); remove it"
        )
    policy = settings["cache_policy"]
    if policy.upper() not in POLICY_MAPPING:
        known = ", ".join(POLICY_MAPPING)
        yield f"{PREFIX}cache_policy is {policy!r}; it must be one of {known}"


def _hash(algorithm: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Scheduler and worker are two processes: with different seeds their hashes differ, and nothing hits."""
    seeded = environ.get("PYTHONHASHSEED", "random") != "random"
    if not algorithm.startswith("sha256") and not seeded:
        yield (
            f"{PREFIX}pre_caching_hash_algorithm is {algorithm!r}, which differs between processes unless "
            "PYTHONHASHSEED is set: nothing would ever hit; set PYTHONHASHSEED=0 or use 'sha256_cbor'"
        )


def _dram(settings: Mapping[str, Any], machine: WorkerSpec) -> Iterator[str]:
    dram_gib, chunk_tokens = settings["max_local_cpu_size"], settings["chunk_size"]
    if chunk_tokens <= 0:
        yield f"{PREFIX}chunk_size is {chunk_tokens}; it must be a number of tokens above 0"
    if dram_gib <= 0 or pool_chunks(settings, machine) < 1:
        needed_mib = chunk_tokens * machine.kv_bytes_per_token / 2**20
        yield (
            f"{PREFIX}max_local_cpu_size is {dram_gib:g} GiB, but one chunk of {chunk_tokens} tokens takes "
            f"{needed_mib:.1f} MiB, and disk loads pass through DRAM too; give it more"
        )
    per_load = settings.get("max_tokens_per_load", 0)
    if 0 < per_load < chunk_tokens or per_load < 0:
        yield (
            f"{PREFIX}max_tokens_per_load is {per_load}; it must be 0 (no limit) or at least one chunk, "
            f"{chunk_tokens} tokens"
        )


def _disk(settings: Mapping[str, Any], machine: WorkerSpec) -> Iterator[str]:
    disk, size_gib = settings["local_disk"], settings["max_local_disk_size"]
    if disk and size_gib <= 0:
        yield (
            f"{PREFIX}local_disk is {disk!r} but max_local_disk_size is {size_gib:g}: nothing would be kept "
            "there; set it, in GiB"
        )
    if size_gib > 0 and not disk:
        yield (
            f"{PREFIX}max_local_disk_size is {size_gib:g} GiB but local_disk is not set: there would be no "
            'disk tier; set it, e.g. "file://./lmcache-disk/"'
        )
    if disk and "://" in disk:
        yield f"{PREFIX}local_disk is {disk!r}; it must be a directory or a file:// URL"
    name_bytes = len(machine.model.encode()) + KEY_BYTES
    if disk and name_bytes > FILE_NAME_BYTES:
        yield (
            f"the model's name has {len(machine.model)} characters and LMCache's disk files are named by it: "
            f"about {name_bytes} bytes, of {FILE_NAME_BYTES} allowed; serve the model from a shorter path"
        )


def _on_cpu(settings: Mapping[str, Any], machine: WorkerSpec) -> Iterator[str]:
    """vLLM's CPU blocks are opaque, so only whole ones can be moved."""
    if not machine.on_cpu:
        return
    chunk_tokens, block_tokens = settings["chunk_size"], machine.block_tokens
    if chunk_tokens % block_tokens:
        fix = -(-chunk_tokens // block_tokens) * block_tokens
        yield (
            f"{PREFIX}chunk_size is {chunk_tokens} tokens and vLLM's block {block_tokens}; on a CPU a chunk "
            f"must be whole blocks: set chunk_size to {fix} or --block-size to a divisor of {chunk_tokens}"
        )
    if settings["save_unfull_chunk"]:
        yield f"{PREFIX}save_unfull_chunk moves parts of blocks, which a CPU cannot; remove it"
