"""Builds a real vLLM scheduler for a simulated machine. No worker, no GPU, no weights."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from connectors.fake.connector import FakeConnector
from connectors.tier_model import Namer
from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler
from experiments import policies
from experiments.sim import peers
from experiments.sim.clock import VirtualClock
from experiments.sim.patience import Patience
from experiments.sim.step_time import MACHINES, Machine
from experiments.sim.streams import stream_names
from experiments.sweep.cases import PEERS

STOCK = "stock"
VALUE_BYTES = 2  # the simulator's model keeps its KV in bfloat16


class LabConnector(FakeConnector):
    """The fake connector, with chunks named by stream and no worker behind it."""

    namer: Namer = staticmethod(stream_names)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of one simulated engine."""

    policy: str = STOCK  # vLLM's own fcfs, one of cases.PEERS, or a name in policies.known()
    tiers: Mapping[str, Any] | None = None  # fake.* settings; None: no offloading
    continuum: Mapping[str, Any] = field(default_factory=dict)  # continuum.* settings
    machine: Machine = MACHINES["a100"]
    step_tokens: int = 2048  # the prefill chunk: max_num_batched_tokens
    max_seqs: int = 256
    block_tokens: int = 64  # 16 is vLLM's default, 2.6 times slower here, and 0.5 % different
    shared_tokens: int = 2048  # a system prompt that all programs begin with
    async_scheduling: bool = False
    skip_blocked: bool = True  # do not ask in vain for a head that cannot be placed (patience.py)
    wrong_hints: bool = False  # clients name the wrong tool, and end programs that go on (agents.py)
    untold_ends: bool = False  # clients do not say that a turn is their last
    gate: bool = False  # a router's gate in front of the engine (gate.py)
    told_gbps: float | None = None  # of the disk, as a wrong profile has it; None: as it is
    log_stats: bool = False  # as in a server; the simulator does not read them
    merge_steps: int = 1  # decode-only steps taken together, at most; for exploring, not for claims

    @property
    def blocks(self) -> int:
        """GPU blocks that requests can use."""
        return self.machine.kv_tokens // self.block_tokens


def build_scheduler(setup: Setup, clock: VirtualClock, max_model_len: int, until: ExitStack) -> Scheduler:
    """The scheduler of `setup`, with `clock` as its time; its files exist until `until` closes."""
    for name in ("vllm", "agentinfer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="simulator-")))
    config = _vllm_config(setup, folder, max_model_len)
    spec = FullAttentionSpec(
        block_size=setup.block_tokens,
        num_kv_heads=1,
        head_size=head_size(setup.machine),
        dtype=torch.bfloat16,
    )
    config.cache_config.num_gpu_blocks = setup.blocks + 1  # one is vLLM's null block
    return _scheduler_class(setup, clock)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(setup.blocks + 1, [], [KVCacheGroupSpec(["layer.0"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=setup.block_tokens,
        log_stats=setup.log_stats,
    )


def _scheduler_class(setup: Setup, clock: VirtualClock) -> type[Scheduler]:
    stock, ours = (
        (AsyncScheduler, ContinuumAsyncScheduler)
        if setup.async_scheduling
        else (Scheduler, ContinuumScheduler)
    )
    base = stock if setup.policy == STOCK else ours
    if setup.policy in PEERS:
        base = peers.scheduler_class(setup.policy)
    bases = (base, Patience) if base is not Scheduler else (Patience,)
    return type(
        "LabScheduler", bases if setup.skip_blocked else (base,), {"clock": staticmethod(clock.monotonic)}
    )


def _vllm_config(setup: Setup, folder: Path, max_model_len: int) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(_hf_config(setup.machine, max_model_len)))
    plain = setup.policy in (STOCK, *PEERS) and setup.tiers is None
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max_model_len,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.max_seqs,
            max_num_batched_tokens=setup.step_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=setup.block_tokens, enable_prefix_caching=True),
        kv_transfer_config=None if plain else _connector(setup, folder),
        additional_config=peers.engine_config(setup.policy, setup.machine) if setup.policy in PEERS else {},
    )
    config.scheduler_config.async_scheduling = setup.async_scheduling  # CPU builds of vLLM turn it off
    return config


def _connector(setup: Setup, folder: Path) -> KVTransferConfig:
    """The simulator's connector with its tiers, and the policy's settings beside them.

    Without offloading a policy still needs a connector for its settings: its tiers have size 0.
    """
    tiers: dict[str, Any] = {"dram_gb": 0.0}
    if setup.tiers is not None:
        tiers = {**rates(setup.machine), **setup.tiers}
    extra = {f"fake.{key}": value for key, value in tiers.items()}
    if setup.policy not in (STOCK, *PEERS):
        ssd_gbps = tiers.get("ssd_load_gbps") if setup.told_gbps is None else setup.told_gbps
        data = setup.machine.policy_profile(tiers.get("chunk_tokens", 256), ssd_gbps)
        profile = folder / "profile.yaml"
        profile.write_text(yaml.safe_dump(data))
        settings = {"policy": policies.setting(setup.policy), "profile": str(profile), **setup.continuum}
        extra |= {f"continuum.{key}": value for key, value in settings.items()}
    return KVTransferConfig(
        kv_connector=LabConnector.__name__,
        kv_connector_module_path=LabConnector.__module__,
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )


def rates(machine: Machine) -> dict[str, Any]:
    """The fake connector's links, as the machine's profile has them."""
    costs = machine.costs
    links = {
        "load_gbps": costs.dram,
        "ssd_load_gbps": costs.ssd,
        "ssd_store_gbps": machine.ssd_store,
    }
    gbps = {key: rate.bytes_per_s / 1e9 for key, rate in links.items()}
    return gbps | {"load_latency_s": costs.dram.fixed_s}


def head_size(machine: Machine) -> int:
    """All of a token's KV as one head of one layer: only its bytes matter to a scheduler."""
    return machine.kv_bytes_per_token // (2 * VALUE_BYTES)


def _hf_config(machine: Machine, max_model_len: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": head_size(machine),
        "head_dim": head_size(machine),
        "intermediate_size": head_size(machine),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "max_position_embeddings": max_model_len,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    }
