"""A KV connector with only vLLM's interface: it reports what it can load, and not from where."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class StockConnector(KVConnectorBase_V1):
    """Keeps the first `share` of every finished request's tokens; the scheduler's half only."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None, *args: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config, *args)
        self.share = vllm_config.kv_transfer_config.kv_connector_extra_config["stock.share"]
        self.block_tokens = vllm_config.cache_config.block_size
        self.kept: list[list[int]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = list(request.all_token_ids)
        held = max((len(k) for k in self.kept if tokens[: len(k)] == k), default=0)
        found = min(held, len(tokens) - 1) // self.block_tokens * self.block_tokens
        return max(0, found - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        tokens = list(request.all_token_ids)
        self.kept.append(tokens[: int(len(tokens) * self.share)])
        return False, None

    def start_load_kv(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
