"""In-process LMCache on the oracle's GPU: its real adapter, over an engine that keeps keys in place of KV."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from bench import BLOCK
from kv_oracle import OracleBench, keys
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from connectors.lmcache.connector import ContinuumLMCacheConnector
from connectors.lmcache.load_check import LoadCheck
from continuum_lmcache.reload.tier_store import TierHit

CHUNK = 32  # tokens; two blocks
KNOWN: dict[str, Any] = {
    "min_retrieve_tokens": 0,
    "priority_limit": None,
    "save_decode_cache": True,
    "local_cpu": True,
    "max_local_cpu_size": 1.0,
    "local_disk": None,
}


class SpanEngine:
    """LMCache's engine. The next `losing` loads load only their first chunk."""

    def __init__(self, slots: list[int], chunk: int) -> None:
        self.slots, self.chunk = slots, chunk
        self.chunks: dict[int, list[int]] = {}  # keys in its slots, by the key of its last token
        self.spoilt: list[str] = []
        self.losing = self.lost = self.loads = self.lag = self.loaded_tokens = 0

    def lookup(self, token_ids: list[int], **_: Any) -> int:
        ends = keys(list(token_ids))[self.chunk - 1 :: self.chunk]
        return self.chunk * len(list(itertools.takewhile(self.chunks.__contains__, ends)))

    def retrieve(
        self, tokens: list[int], mask: Any, slot_mapping: Any, vllm_cached_tokens: int, **_: Any
    ) -> Any:
        came = torch.zeros(len(tokens), dtype=torch.bool)
        names, to = keys(tokens), slot_mapping.tolist()
        starts = list(range(int((~mask).sum()), len(tokens) - self.chunk + 1, self.chunk))
        self.loads += 1
        if self.losing:
            self.losing, self.lost, starts = self.losing - 1, self.lost + 1, starts[:1]
        for start in starts:
            held = self.chunks.get(names[start + self.chunk - 1])
            if held is None:
                break
            for token in range(max(start, vllm_cached_tokens), start + self.chunk):
                self.slots[to[token]] = held[token - start]
            came[start : start + self.chunk] = True
        self.loaded_tokens += int(came.sum())
        return came

    def store(self, tokens: list[int], mask: Any, slot_mapping: Any, req_id: str, **_: Any) -> None:
        names, source = keys(tokens), slot_mapping.tolist()
        for start in range(int((~mask).sum()), len(tokens) - self.chunk + 1, self.chunk):
            end = start + self.chunk
            held = [self.slots[slot] for slot in source[start:end]]
            if self.chunks.setdefault(names[end - 1], held) is held and held != names[start:end]:
                self.spoilt.append(f"tokens [{start}, {end}) of {req_id}")  # existing chunks are kept

    def lookup_unpin(self, *_: Any) -> None:
        pass

    def evict(self, every: int) -> None:
        for name in list(self.chunks)[::every]:
            del self.chunks[name]


def adapter(connector: Any, engine: SpanEngine | None, **settings: Any) -> LMCacheConnectorV1Impl:
    """LMCache's own adapter without its services, for the scheduler's half and for the worker's."""
    lookups = SimpleNamespace(
        lookup_cache=lambda **_: -1,
        lookup=lambda token_ids, **kwargs: connector.engine.lookup(token_ids, **kwargs),
        clear_lookup_status=lambda _: None,
    )
    config = SimpleNamespace(get_extra_config_value=lambda *args: args[-1], **KNOWN | settings)
    counted = SimpleNamespace(
        update_interval_vllm_hit_tokens=lambda _: None, update_interval_prompt_tokens=lambda _: None
    )
    impl = object.__new__(LMCacheConnectorV1Impl)
    vars(impl).update(
        _parent=connector,
        _manager=SimpleNamespace(lookup_client=lookups, lmcache_engine=engine, lmcache_engine_metadata=None),
        _stats_monitor=counted,
        config=config,
        kv_role="kv_both",
        device="cpu",
        kv_caches={"layer": torch.zeros(1)},
        load_specs={},
        _request_trackers={},
        _unfinished_requests={},
        _requests_priority={},
        _invalid_block_ids=set(),
        layerwise_retrievers=[],
        current_layer=0,
        skip_last_n_tokens=0,
        _max_tokens_per_load=settings.get("max_tokens_per_load", 0),
        _lmcache_chunk_size=connector.chunk,
        _block_size=BLOCK,
        force_skip_save=False,
        async_loading=False,
        use_layerwise=False,
        enable_blending=False,
        _discard_partial_chunks=True,
    )
    return impl


class StockConnector(LMCacheConnectorV1):
    """vLLM's LMCacheConnectorV1 over LMCache's adapter; `engine` is set by the bench."""

    engine: SpanEngine

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.settings = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.chunk = self.settings.pop("chunk")
        self._furnish(None)

    def _furnish(self, engine: SpanEngine | None) -> None:
        """Set the constructor's attributes, without LMCache's services."""
        self._lmcache_engine, self._kv_cache_events = adapter(self, engine, **self.settings), None

    def serve(self, engine: SpanEngine) -> StockConnector:
        """The worker's half of it."""
        self.engine = engine
        worker = object.__new__(type(self))
        vars(worker).update(
            _vllm_config=self._vllm_config,
            _role=KVConnectorRole.WORKER,
            _connector_metadata=None,
            engine=engine,
            chunk=self.chunk,
            settings=self.settings,
        )
        worker._furnish(engine)
        return worker

    def get_kv_connector_kv_cache_events(self) -> None:
        return None


class OracleConnector(StockConnector, ContinuumLMCacheConnector):
    """This package's connector over LMCache's adapter."""

    def _furnish(self, engine: SpanEngine | None) -> None:
        super()._furnish(engine)
        tiers = SimpleNamespace(
            locate=self._located,
            transfers=list,
            step_s=lambda: None,
            doubt=lambda: None,
            close=lambda: None,
        )
        self._impl, self.tiers = self._lmcache_engine, tiers
        self._worker, self._load_selector = None, None
        self._kv_bytes_per_token = 8
        self._expected, self._check = [], LoadCheck(engine, BLOCK) if engine is not None else None

    def _located(self, token_ids: Any) -> TierHit:
        """The first half of the chunks is in DRAM."""
        chunks = self.engine.lookup(list(token_ids)) // self.chunk
        return TierHit(-(-chunks // 2) * self.chunk, chunks // 2 * self.chunk)


class EngineBench(OracleBench):
    """The oracle with LMCache in the worker. `settings` are LMCache's."""

    connector = OracleConnector

    def __init__(self, *args: Any, chunk: int = CHUNK, settings: Any = None, **more: Any) -> None:
        self._extra = {"chunk": chunk, **(settings or {})}
        super().__init__(*args, **more)

    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": self.connector.__name__,
            "kv_connector_module_path": "kv_oracle_engine",
            "kv_connector_extra_config": self._extra,
        }

    def join(self) -> Any:
        self.lmcache = SpanEngine(self.slots, self._extra["chunk"])
        return self.scheduler.connector.serve(self.lmcache)

    def spoilt(self) -> list[str]:
        return self.lmcache.spoilt


class StockEngineBench(EngineBench):
    """vLLM's own connector."""

    connector = StockConnector
