"""Builds one engine's parts."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import vllm
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from continuum_lmcache import __version__
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.engine import Engine
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cards import assumed_costs, card_of
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel, kv_bytes_per_token
from continuum_lmcache.reload.model_shapes import shape
from continuum_lmcache.retention.learned import Learned
from continuum_lmcache.telemetry.recorder import EventRecorder
from continuum_lmcache.telemetry.samples import MetricSamples
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.vllm_plugin.files import (
    EngineFiles,
    load_durations,
    owns_process,
    path_of_rank,
    recording_path,
)
from continuum_lmcache.vllm_plugin.hooks import rust_frontend
from continuum_lmcache.vllm_plugin.hooks.engine_args import TOOL_PARSER, read_profile
from continuum_lmcache.vllm_plugin.memory.gpu_blocks import GpuBlocks
from continuum_lmcache.vllm_plugin.memory.residency import ResidencyLookup
from continuum_lmcache.vllm_plugin.step_timer import StepTimer
from continuum_lmcache.vllm_plugin.tool_calls import ToolCallReader

logger = init_logger("vllm.continuum_lmcache")


@dataclass
class EngineParts:
    engine: Engine
    residency: ResidencyLookup
    blocks: GpuBlocks
    step_timer: StepTimer
    tool_calls: ToolCallReader
    files: EngineFiles
    from_rust: bool = False  # requests come as vLLM's HTTP server in Rust sends them
    samples: MetricSamples = field(default_factory=MetricSamples)
    ignored: Counter[str] = field(default_factory=Counter)  # fields of requests, by name
    new_weights: Counter[str] = field(default_factory=Counter)  # by the name of the call


def build_parts(scheduler: Scheduler, config: ContinuumConfig, now_s: float) -> EngineParts:
    """Build the parts for one scheduler. Raises ConfigError or ProfileError."""
    rank = scheduler.parallel_config.data_parallel_index
    name = config.tool_durations_file
    durations_path = path_of_rank(Path(name), rank) if name else None
    residency = ResidencyLookup(scheduler.connector)
    learned = Learned(
        costs_of(config, kv_bytes_per_token(scheduler.kv_cache_config), scheduler.vllm_config),
        load_durations(durations_path) if durations_path else ToolDurations(),
        residency.store.capacity_tokens(),
    )
    folder = config.run_output_dir or os.environ.get("RUN_OUTPUT_DIR", "")
    files = EngineFiles(learned.gaps, durations_path)
    if folder:
        files.recording_path, about = recording_path(Path(folder), rank), run_facts(scheduler, config)
        files.recorder = EventRecorder(time.time() - now_s, about, hash_ids=not config.record_ids)
    if (folder or durations_path) and owns_process():
        files.save_on_signals()
        if folder:
            logger.info("recording to %s; kill -USR1 %d writes it now", files.recording_path, os.getpid())
    tokenizer = getattr(scheduler.structured_output_manager, "tokenizer", None)
    told = vars(scheduler.vllm_config.scheduler_config)
    tool_calls = ToolCallReader(tokenizer, *(told.get(name, "") for name in TOOL_PARSER))
    pool = scheduler.kv_cache_manager.block_pool
    engine = Engine(config, learned, pool.num_gpu_blocks, scheduler.block_size, scheduler.hash_block_size)
    blocks = GpuBlocks(scheduler.kv_cache_manager, scheduler.block_size)
    logger.info("KV below the GPU: %s", residency.mode)
    logger.info("tool calls are read by %s", tool_calls.source)
    if not residency.knows_sources:
        text = "the KV connector %s does not report where KV is: TTLs are computed as if it stored none"
        logger.warning(text, type(scheduler.connector).__name__)
    residency.store.set_load_selector(engine.load_policy.tokens_to_load)
    step_timer, rust = StepTimer(learned.rates, residency), told.get(rust_frontend.TOLD)
    if rust is not None:
        rust.show_metrics(config.policy, rank)
    return EngineParts(engine, residency, blocks, step_timer, tool_calls, files, rust is not None)


def run_facts(scheduler: Scheduler, config: ContinuumConfig) -> dict[str, str]:
    ranks, device = scheduler.parallel_config.world_size, current_platform.get_device_name()
    machine = f"{os.cpu_count()} CPU cores" if current_platform.is_cpu() else f"{ranks} x {device}"
    model = scheduler.vllm_config.model_config
    return {
        "model": Path(str(model.model)).name,
        "policy": config.policy,
        "machine": machine,
        "versions": f"continuum-lmcache {__version__}, vLLM {vllm.__version__}",
    }


def costs_of(config: ContinuumConfig, kv_bytes_per_token: int, on: VllmConfig) -> CostModel:
    """The measured profile, or assumed costs that are marked as not measured."""
    if not config.profile:
        logger.warning("continuum.profile is not set: reload costs are assumed, not measured")
        return assumed(kv_bytes_per_token, on)
    path = Path(config.profile)
    costs = read_profile(path)
    if not costs.measured:
        logger.warning("continuum.profile %s was not measured: its numbers are from data sheets", path)
    if costs.kv_bytes_per_token != kv_bytes_per_token:
        text = "continuum.profile %s is of a model with %d bytes of KV a token; this one has %d"
        logger.warning(text, path, costs.kv_bytes_per_token, kv_bytes_per_token)
    return costs


def assumed(kv_bytes_per_token: int, on: VllmConfig) -> CostModel:
    """By the card's data sheet and the model's shape; where one is not known, of an 8B model on an H200."""
    card, model_config = card_of(current_platform.get_device_name()), on.model_config
    if card is not None:
        model, where = model_config.hf_text_config.to_dict(), "the model's config"
        try:
            found = shape(model, where, weights=(0.0, ""))
        except ConfigError as unknown:
            logger.info("costs are not of this model: %s", unknown)
        else:
            sizes = (found.active_parameters, found.attended_values, kv_bytes_per_token)
            return assumed_costs(card, *sizes, on.parallel_config.tensor_parallel_size)
    return replace(UNMEASURED, kv_bytes_per_token=kv_bytes_per_token)
