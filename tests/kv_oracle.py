"""Whose KV each slot of the GPU holds: a stand-in for the GPU that knows when a request reads another's KV.

A slot holds the key of a prefix: the KV of its last token, computed from the KV of all tokens before it.
Keys move as the real worker and LMCache move KV; vLLM's scheduler and its connector calls, LMCache's adapter
and this package's connector are the real ones, LMCache's engine keeps keys in place of tensors. The model's
next token is a function of the key. A step that reads a slot with another key than its request's computes
garbage, and so does all that is built on it: a request that gets other tokens than its own prefix gives has
read KV that was not its own.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from bench import BLOCK, Bench, ModelRunnerOutput
from lmcache.integration.vllm import vllm_v1_adapter
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from connectors.lmcache import ContinuumLMCacheConnector
from connectors.lmcache_loads import LoadCheck
from continuum_lmcache.tiers import Holding

CHUNK = 32  # tokens; two blocks
VOCABULARY = 3000


def key(before: int, token: int) -> int:
    """Of a prefix, by that of the prefix without its last token."""
    return hash((before, token))


def keys(tokens: list[int]) -> list[int]:
    """Of each of the prompt's prefixes."""
    return list(itertools.accumulate(tokens, key, initial=0))[1:]


def answer(prefix: int) -> int:
    """The model's next token."""
    return 100 + prefix % VOCABULARY


class SpanEngine:
    """LMCache's engine, with keys in place of KV. The next `losing` loads bring their first chunk alone."""

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots
        self.chunks: dict[int, list[int]] = {}  # by the key of its last token, what was in its slots
        self.losing = self.lost = self.loads = 0

    def lookup(self, token_ids: list[int], **_: Any) -> int:
        ends = keys(list(token_ids))[CHUNK - 1 :: CHUNK]
        return CHUNK * len(list(itertools.takewhile(self.chunks.__contains__, ends)))

    def retrieve(
        self, tokens: list[int], mask: Any, slot_mapping: Any, vllm_cached_tokens: int, **_: Any
    ) -> Any:
        came = torch.zeros(len(tokens), dtype=torch.bool)
        names, to = keys(tokens), slot_mapping.tolist()
        first = int((~mask).sum())
        starts = list(range(first, len(tokens) - CHUNK + 1, CHUNK))
        self.loads += 1
        if self.losing:
            self.losing, self.lost, starts = self.losing - 1, self.lost + 1, starts[:1]
        for start in starts:
            held = self.chunks.get(names[start + CHUNK - 1])
            if held is None:
                break
            for token in range(max(start, vllm_cached_tokens), start + CHUNK):
                self.slots[to[token]] = held[token - start]
            came[start : start + CHUNK] = True
        return came

    def store(self, tokens: list[int], mask: Any, slot_mapping: Any, **_: Any) -> None:
        names, source = keys(tokens), slot_mapping.tolist()
        for start in range(int((~mask).sum()), len(tokens) - CHUNK + 1, CHUNK):
            held = [self.slots[slot] for slot in source[start : start + CHUNK]]
            self.chunks.setdefault(names[start + CHUNK - 1], held)  # what is there is kept, as LMCache does

    def lookup_unpin(self, *_: Any) -> None:
        pass


def adapter(connector: Any, engine: SpanEngine | None) -> LMCacheConnectorV1Impl:
    """LMCache's own adapter without its services, for the scheduler's half and for the worker's."""
    lookups = SimpleNamespace(
        lookup_cache=lambda **_: -1,
        lookup=lambda token_ids, **kwargs: connector.engine.lookup(token_ids, **kwargs),
        clear_lookup_status=lambda _: None,
    )
    config = SimpleNamespace(
        min_retrieve_tokens=0,
        priority_limit=None,
        save_decode_cache=True,
        local_cpu=True,
        max_local_cpu_size=1.0,
        local_disk=None,
        get_extra_config_value=lambda *args: args[-1],
    )
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
        _max_tokens_per_load=0,
        _lmcache_chunk_size=CHUNK,
        _block_size=BLOCK,
        force_skip_save=False,
        async_loading=False,
        use_layerwise=False,
        enable_blending=False,
        _discard_partial_chunks=True,
    )
    return impl


class OracleConnector(ContinuumLMCacheConnector):
    """This package's connector over LMCache's adapter; `engine` is set by the worker."""

    engine: SpanEngine

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        tiers = SimpleNamespace(
            locate=lambda token_ids: Holding(self.engine.lookup(list(token_ids)), 0),
            transfers=list,
            step_s=lambda: None,
            chunks=lambda *_: [],
            doubt=lambda: None,
            close=lambda: None,
        )
        self._furnish(None, tiers)

    def _furnish(self, engine: SpanEngine | None, tiers: Any) -> None:
        """What the constructors would, LMCache's services left out."""
        self._impl = self._lmcache_engine = adapter(self, engine)
        self._tiers, self._worker, self._rule, self._dead, self._wanted = tiers, None, None, [], []
        self._never_saves, self._kv_bytes_per_token, self._kv_cache_events = False, 8, None
        self._is_shared = False
        self._expected, self._check = [], LoadCheck(engine, BLOCK) if engine is not None else None

    def serve(self, engine: SpanEngine) -> OracleConnector:
        """The worker's half of it."""
        self.engine = engine
        worker = object.__new__(OracleConnector)
        vars(worker).update(_vllm_config=self._vllm_config, _role=KVConnectorRole.WORKER, engine=engine)
        worker._connector_metadata = None
        worker._furnish(engine, None)
        return worker

    def get_kv_connector_kv_cache_events(self) -> None:
        return None


ANY_CONFIG = functools.cache(VllmConfig)  # for forward contexts, which want one


class Turn:
    """One request as the worker knows it."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens, self.blocks = tokens, blocks
        self.keys = keys(tokens)

    def append(self, token: int) -> None:
        self.keys.append(key(self.keys[-1], token))
        self.tokens.append(token)

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK


class Worker:
    """A GPU worker as vLLM 0.32 has it: its V1 runner, or its V2 runner with FULL CUDA graphs for decodes."""

    def __init__(self, connector: OracleConnector, is_v2: bool, blocks: int) -> None:
        self.is_v2 = is_v2
        self.slots = [0] * (blocks * BLOCK)
        self.engine = SpanEngine(self.slots)
        self.turns: dict[str, Turn] = {}
        self.replays = 0  # FULL graphs in steps with loads
        self.resumed = 0
        self._garbage = itertools.count(-1, -1)
        self._vllm_config = ANY_CONFIG()
        self._active = object.__new__(ActiveKVConnector)
        vars(self._active).update(
            vllm_config=self._vllm_config,
            kv_connector=connector.serve(self.engine),
            _pending_load_kwargs=None,
            _disabled=False,
        )

    def run(self, output: Any) -> tuple[list[list[int]], Any]:
        """One step: the tokens sampled, by request, and what the connector reports."""
        work = self._take(output)
        batch = SimpleNamespace(
            idx_mapping=None, req_ids=list(work), num_tokens=sum(n for _, n in work.values())
        )
        is_replay = self.is_v2 and all(new == 1 and computed for computed, new in work.values())
        self.replays += bool(is_replay and output.has_sync_kv_loads)
        metadata = {"layer": object()} if work else None
        # a FULL graph is replayed outside of a forward context, and so is a step without work
        context = nullcontext() if is_replay else set_forward_context(metadata, self._vllm_config)
        with context:
            self._active.pre_forward(output, batch, attn_metadata=metadata if is_replay else None)
            sampled = [self._forward(self.turns[turn], *numbers) for turn, numbers in work.items()]
        self._active.finish_forward()
        with patch.object(vllm_v1_adapter, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True)):
            return sampled, self._active.post_forward(output.finished_req_ids)

    def _take(self, output: Any) -> dict[str, tuple[int, int]]:
        """What the scheduler sent: by request, the tokens computed before and those to compute now."""
        for turn in output.finished_req_ids:
            self.turns.pop(turn, None)
        computed = {}
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self.is_v2 else new.prompt_token_ids
            self.resumed += len(tokens) > len(new.prompt_token_ids)
            self.turns[new.req_id] = Turn(list(tokens), list(new.block_ids[0]))
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for turn, blocks, before in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if turn in cached.resumed_req_ids:
                self.resumed += 1
                self.turns[turn] = Turn(list(cached.all_token_ids[turn]), [])
            self.turns[turn].blocks += blocks[0] if blocks is not None else []
            computed[turn] = before
        return {turn: (computed[turn], new) for turn, new in output.num_scheduled_tokens.items()}

    def _forward(self, turn: Turn, computed: int, new: int) -> list[int]:
        """Attend to all tokens before, write the new ones' KV, and sample if they are the last."""
        own = (self.slots[turn.slot(p)] == turn.keys[p] for p in range(computed))
        is_right = all(own)
        for position in range(computed, computed + new):
            self.slots[turn.slot(position)] = turn.keys[position] if is_right else next(self._garbage)
        if computed + new < len(turn.tokens):
            return []
        token = answer(turn.keys[-1]) if is_right else answer(next(self._garbage))
        turn.append(token)
        return [token]


class OracleBench(Bench):
    """The bench with that worker under it; it fails at the first token that no right KV gives."""

    def __init__(self, scheduler_cls: Any, model: Path, is_v2: bool, blocks: int = 24, **more: Any) -> None:
        transfer = {
            "kv_connector": "OracleConnector",
            "kv_connector_module_path": "kv_oracle",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        super().__init__(scheduler_cls, model, blocks, transfer=transfer, **more)
        self.scheduler.use_v2_model_runner = is_v2
        self.worker = Worker(self.scheduler.connector, is_v2, blocks)
        self._right: dict[str, Turn] = {}  # each request's tokens, as the model would have them

    def send(self, job: str | None, tokens: Any, /, *args: Any, **fields: Any) -> str:
        request_id = super().send(job, tokens, *args, **fields)
        self._right[request_id] = Turn(list(tokens), [])
        return request_id

    def step(self, seconds: float | None = None) -> int:
        output = self.scheduler.schedule()
        requests = dict(self.scheduler.requests)
        ids = list(output.num_scheduled_tokens)
        sampled, moved = self.worker.run(output)
        runner = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={turn: i for i, turn in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=moved,
        )
        self.scheduled(output)
        self._in_flight.append((output, runner))
        self.now_s += 0.1 if seconds is None else seconds
        while len(self._in_flight) > (self._ahead if ids else 0):
            self._deliver(*self._in_flight.popleft())
        self.check(requests)
        return output.total_num_scheduled_tokens

    def tokens_of(self, request_id: str) -> list[int]:
        """A request's tokens so far, or all it had when it ended."""
        request = self.scheduler.requests.get(request_id)
        return list(request.all_token_ids) if request is not None else self._right[request_id].tokens[:]

    def drain(self) -> None:
        """The steps under way end."""
        while self._in_flight:
            self._deliver(*self._in_flight.popleft())

    def preempt_all(self) -> None:
        """Every running request loses its blocks, and nothing stays cached."""
        self.drain()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _deliver(self, output: Any, runner: ModelRunnerOutput) -> None:
        requests = dict(self.scheduler.requests)
        self.scheduler.update_from_output(output, runner)
        self.done |= {i: list(r.all_token_ids) for i, r in requests.items() if r.is_finished()}

    def check(self, requests: dict[str, Any]) -> None:
        """Every request's tokens are the model's answers to its own prefix."""
        for turn, request in requests.items():
            right = self._right[turn]
            while len(right.tokens) < request.num_tokens:
                right.append(answer(right.keys[-1]))
            got = list(request.all_token_ids)
            at = next((i for i, token in enumerate(got) if token != right.tokens[i]), None)
            assert at is None, (
                f"{turn}, of {request.num_prompt_tokens} prompt tokens, got {got[at]} as its token {at}, "
                f"right is {right.tokens[at]}: it has attended to KV of other tokens than its own"
            )
