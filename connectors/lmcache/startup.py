"""The start of LMCache in-process: the machine that its settings must fit, and our defaults."""

from __future__ import annotations

import os
from typing import Any

from lmcache import torch_device_type
from lmcache.integration.vllm.utils import calculate_draft_layers, mla_enabled
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import get_kv_cache_torch_dtype
from vllm.v1.kv_cache_interface import KVCacheConfig

from connectors.lmcache.known_issues import with_defaults
from connectors.lmcache.settings import unread
from connectors.transfer_config import transfer_config
from continuum_lmcache.capacity.kv_budget import WorkerSpec
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import kv_bytes_per_token

logger = init_logger("vllm.continuum.lmcache")


def machine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None) -> WorkerSpec:
    """The machine that LMCache's settings must fit. Before the KV cache is laid out, by the model's shape.

    The shape lacks an indexer's layers, and the scales in `fp8_ds_mla` (DeepSeek V3.2).
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    layers = model.get_num_layers(parallel) + calculate_draft_layers(vllm_config)
    values = (1 if mla_enabled(model) else 2) * model.get_num_kv_heads(parallel) * model.get_head_size()
    dtype = get_kv_cache_torch_dtype(cache.cache_dtype, model.dtype)
    shaped = layers * values * dtype.itemsize
    size_bytes = kv_bytes_per_token(kv_cache_config) if kv_cache_config is not None else shaped
    return WorkerSpec(torch_device_type == "cpu", cache.block_size, size_bytes, model.model)


def apply_defaults(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, log: bool) -> None:
    """Put our defaults where LMCache and vLLM read them. Every process does it, with the same result."""
    transfer = transfer_config(vllm_config)
    fits = machine(vllm_config, kv_cache_config)
    extra, ours = with_defaults(transfer.kv_connector_extra_config, os.environ, fits)
    transfer.kv_connector_extra_config = extra
    transfer.kv_load_failure_policy = "recompute" if recomputes_correctly(vllm_config) else "fail"
    if log:
        listed = ", ".join(f"{name}={value}" for name, value in ours.items())
        policy = transfer.kv_load_failure_policy
        logger.info("LMCache defaults: kv_load_failure_policy=%s, %s", policy, listed)
        if names := unread(os.environ):
            logger.warning("LMCache 0.5.6 does not read %s: no effect", ", ".join(names))


def recomputes_correctly(vllm_config: VllmConfig) -> bool:
    """Whether a request whose load failed within a step gets the right tokens when it is computed again.

    Always under this package's schedulers. Under vLLM's own, up to 0.33, not where steps run ahead
    (async scheduling) and not with its newer model runner, the default on GPUs (vllm-project/vllm#49250).
    """
    scheduler = vllm_config.scheduler_config
    ours = "continuum_lmcache." in str(scheduler.scheduler_cls)
    return ours or not (scheduler.async_scheduling or vllm_config.use_v2_model_runner)


def refuse_degraded(impl: Any) -> None:
    """LMCache logs why it cannot start and then serves without caching: raise its error instead."""
    manager = impl._manager
    if manager._init_failed:
        raise ConfigError(f"LMCache could not start: {manager._init_failed_reason.strip().splitlines()[-1]}")
