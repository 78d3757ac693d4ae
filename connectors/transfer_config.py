"""The part of vLLM's configuration that a KV connector reads."""

from __future__ import annotations

from vllm.config import KVTransferConfig, VllmConfig

from continuum_lmcache.errors import ConfigError


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    """vLLM's type is optional, but every process that builds a connector has one."""
    found = vllm_config.kv_transfer_config
    assert found is not None
    return found


def refuse_kv_of_more_than_tokens(vllm_config: VllmConfig) -> None:
    """Raise ConfigError where KV depends on what LMCache 0.5.6's keys, made of token ids, do not contain."""
    if vllm_config.model_config.enable_prompt_embeds:
        raise ConfigError(
            "LMCache 0.5.6 does not tell prompt embeddings apart: it would load one prompt's KV for another; "
            "drop --enable-prompt-embeds or the KV connector"
        )
