"""The part of vLLM's configuration that a KV connector is built from."""

from __future__ import annotations

from vllm.config import KVTransferConfig, VllmConfig


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    """It is there wherever a connector is built; vLLM's type says that it may not be."""
    found = vllm_config.kv_transfer_config
    assert found is not None
    return found
