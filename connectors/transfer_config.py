"""The part of vLLM's configuration that a KV connector reads."""

from __future__ import annotations

from vllm.config import KVTransferConfig, VllmConfig


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    """vLLM's type is optional, but every process that builds a connector has one."""
    found = vllm_config.kv_transfer_config
    assert found is not None
    return found
