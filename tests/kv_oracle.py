"""Replaces the GPU by the names of its KV, to find any request that reads another request's KV.

A slot holds the key of a prefix: the KV of its last token, computed from the KV of all tokens before it.
Keys move as the real worker and LMCache move KV; vLLM's scheduler, its connector calls, LMCache's adapters
and this package's connectors are the real ones. LMCache's MP server
(kv_oracle_server.py) and the simulator's fake connector (kv_oracle_fake.py) keep keys instead of tensors. The
model's next token is a function of the key.

Weights have a number, from which the keys of all prefixes follow. While they change, a request that has KV
goes on with both: what it computes then is garbage, which nobody else may ever read.

    a step that reads a slot with another key than its request's computes garbage, and so does all that is
    built on it; the first token that no right KV gives fails the bench, and so does
    a chunk that LMCache keeps under the name of other KV, or a block of vLLM's prefix cache with other KV
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from bench import BLOCK, Bench, ModelRunnerOutput
from lmcache.integration.vllm import vllm_v1_adapter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

TAKES_BATCH = "input_batch" in inspect.signature(ActiveKVConnector.pre_forward).parameters  # vLLM 0.32 on

VOCABULARY = 3000
MOST_ADAPTERS = 3  # with none
NO_DRAFT = -1  # vLLM's placeholder: the worker has drafted itself, or has nothing to draft from


def key(before: int, token: int) -> int:
    """Of a prefix, by that of the prefix without its last token."""
    return hash((before, token))


def keys(tokens: list[int], weights: int = 0, adapter: int = 0) -> list[int]:
    """Of each of the prompt's prefixes, by the number of the weights and of the adapter; 0: none."""
    return list(itertools.accumulate(tokens, key, initial=weights * MOST_ADAPTERS + adapter))[1:]


def adapter_of(request: Any) -> int:
    """vLLM's number of a request's adapter; 0: none."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


def answer(prefix: int) -> int:
    """The model's next token."""
    return 100 + prefix % VOCABULARY


def drafted(prefix: int, number: int) -> list[int]:
    """A drafter's next tokens, the first few of them right."""
    found = []
    for right in range(number):
        found.append(answer(prefix) if right < prefix % (number + 1) else 7)
        prefix = key(prefix, found[-1])
    return found


class Turn:
    """One request as the worker knows it. `blocks`: of each group of layers."""

    def __init__(
        self,
        prompt_tokens: int,
        tokens: list[int],
        blocks: list[list[int]],
        computed: int = 0,
        weights: int = 0,
        adapter: int = 0,
    ) -> None:
        self.prompt_tokens, self.tokens, self.blocks, self.computed = prompt_tokens, tokens, blocks, computed
        self.weights, self.adapter, self.keys = weights, adapter, keys(tokens, weights, adapter)
        self.drafts: list[int] = []

    def append(self, token: int) -> None:
        self.keys.append(key(self.keys[-1], token))
        self.tokens.append(token)

    def cut(self, tokens: int) -> None:
        del self.tokens[tokens:], self.keys[tokens:]

    def slots(self, position: int) -> list[int]:
        """Of each group."""
        return [blocks[position // BLOCK] * BLOCK + position % BLOCK for blocks in self.blocks]


ANY_CONFIG = functools.cache(VllmConfig)  # for forward contexts, which want one
FULL_AND_PIECEWISE, FULL, PIECEWISE = "FULL_AND_PIECEWISE", "FULL", "PIECEWISE"


class Worker:
    """A GPU worker as vLLM 0.32 has it: its V1 runner, or its V2 runner with CUDA graphs.

    `connector` is the worker's half; `meanwhile` runs beside a step, at any time of it. `windows`: tokens of
    each group's window; 0: its layers attend to all.
    """

    def __init__(self, slots: Any, is_v2: bool, graphs: str, drafts: int, windows: list[int]) -> None:
        self.slots, self.is_v2, self.graphs, self.drafts = slots, is_v2, graphs, drafts
        self.windows = windows
        self.connector: Any = None
        self.meanwhile: Callable[[], None] = lambda: None
        self.turns: dict[str, Turn] = {}
        self.weights = 0
        self.resumed = self.accepted = self.rejected = 0
        self._garbage = itertools.count(-1, -1)
        self._vllm_config = ANY_CONFIG()

    def run(self, output: Any) -> tuple[list[list[int]], Any]:
        """One step: the tokens sampled, by request, and what the connector reports."""
        work = self._take(output)
        step = self._v2_step if self.is_v2 else self._v1_step
        with (
            patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector),
            patch.object(vllm_v1_adapter, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True)),
            step(output, work) as moved,
        ):
            self.meanwhile()
            sampled = [self._forward(self.turns[turn], *numbers) for turn, numbers in work.items()]
            self.meanwhile()
        self.meanwhile()
        return sampled, moved[0]

    @contextmanager
    def _v1_step(self, output: Any, work: dict[str, Any]) -> Iterator[list[Any]]:
        self.connector.handle_preemptions(output.kv_connector_metadata)
        moved: list[Any] = []
        if not work:
            yield moved
            empty = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._vllm_config)
            moved.append(empty.kv_connector_output)
            return
        mixin, is_late = KVConnectorModelRunnerMixin, self.drafts > 0
        with (
            set_forward_context({"layer": object()}, self._vllm_config),
            mixin.maybe_get_kv_connector_output(output, defer_finalize=is_late) as result,
        ):
            yield moved
        if is_late:
            mixin.finalize_kv_connector()  # once the drafter has run
        moved.append(result)

    @contextmanager
    def _v2_step(self, output: Any, work: dict[str, Any]) -> Iterator[list[Any]]:
        active = object.__new__(ActiveKVConnector)
        vars(active).update(
            vllm_config=self._vllm_config,
            kv_connector=self.connector,
            _pending_load_kwargs=None,
            _disabled=False,
        )
        moved: list[Any] = []
        if not work:
            yield moved
            moved.append(active.no_forward(output).kv_connector_output)
            return
        tokens = sum(new for _, new, _ in work.values())
        batch = SimpleNamespace(idx_mapping=None, req_ids=list(work), num_tokens=tokens)
        metadata, is_replay = {"layer": object()}, self._is_replay(work)
        # a FULL graph is replayed outside of a forward context
        with nullcontext() if is_replay else set_forward_context(metadata, self._vllm_config):
            replayed = {"attn_metadata": metadata} if is_replay else {}
            if TAKES_BATCH:
                active.pre_forward(output, batch, **replayed)
            else:
                active.pre_forward(output, request_ids=batch.req_ids, num_tokens=tokens, **replayed)
            yield moved
        active.finish_forward()
        moved.append(active.post_forward(output.finished_req_ids))

    def _is_replay(self, work: dict[str, tuple[int, int, list[int]]]) -> bool:
        """Decodes all of one length, among them prompts of which one token is left."""
        are_decodes = all(computed and new - len(drafts) == 1 for computed, new, drafts in work.values())
        is_uniform = len({new for _, new, _ in work.values()}) == 1
        return self.graphs == FULL or (self.graphs == FULL_AND_PIECEWISE and are_decodes and is_uniform)

    def _take(self, output: Any) -> dict[str, tuple[int, int, list[int]]]:
        """The scheduler's message by request: tokens computed before, tokens to compute, drafts."""
        for turn in output.finished_req_ids:
            self.turns.pop(turn, None)
        computed = {}
        for new in output.scheduled_new_reqs:
            prompt = new.prompt_token_ids
            tokens = new.prefill_token_ids if self.is_v2 else prompt
            self.resumed += len(tokens) > len(prompt)
            computed[new.req_id] = done = new.num_computed_tokens
            blocks = [list(group) for group in new.block_ids]
            self.turns[new.req_id] = Turn(
                len(prompt), list(tokens), blocks, done, self.weights, adapter_of(new)
            )
        cached = output.scheduled_cached_reqs
        for turn_id, blocks, before, outputs in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            turn = self.turns[turn_id]
            if turn_id in cached.resumed_req_ids:
                self.resumed += 1
                tokens = list(cached.all_token_ids[turn_id])
                none: list[list[int]] = [[] for _ in turn.blocks]
                turn = self.turns[turn_id] = Turn(
                    turn.prompt_tokens, tokens, none, 0, self.weights, turn.adapter
                )
            elif not self.is_v2:
                turn.cut(turn.prompt_tokens + outputs)  # vLLM has dropped outputs after a failed load
            for held, more in zip(turn.blocks, blocks or [[]] * len(turn.blocks), strict=True):
                held += more
            computed[turn_id] = min(before, len(turn.tokens) - 1)  # of steps ahead: drafts were rejected
            turn.computed = turn.computed if self.is_v2 else computed[turn_id]
        drafts = output.scheduled_spec_decode_tokens
        return {
            turn: (computed[turn], new, list(drafts.get(turn, ())))
            for turn, new in output.num_scheduled_tokens.items()
        }

    def _forward(self, turn: Turn, computed: int, new: int, drafts: list[int]) -> list[int]:
        """Attend to all tokens before, write the new ones' KV, and sample if they are the last."""
        if NO_DRAFT in drafts and turn.drafts:
            drafts = turn.drafts[: len(drafts)]
        after = list(itertools.accumulate(drafts, key, initial=turn.keys[-1]))  # each draft, were it right
        names, end = turn.keys + after[1:], computed + new
        # the V2 runner counts by itself
        is_right = turn.computed == computed and turn.weights == self.weights and self._holds(turn, computed)
        for position in range(computed, end):
            name = names[position] if is_right else next(self._garbage)
            for slot in turn.slots(position):
                self.slots[slot] = name
        turn.computed = end
        if end < len(names):
            return []
        sampled = [answer(after[0]) if is_right else answer(next(self._garbage))]
        for draft, prefix in zip(drafts, after[1:], strict=True):
            if not is_right or draft != sampled[-1]:
                break
            sampled.append(answer(prefix))
        self.accepted += len(sampled) - 1
        self.rejected += len(drafts) - len(sampled) + 1
        for token in sampled:
            turn.append(token)
        turn.drafts, turn.computed = drafted(turn.keys[-1], self.drafts), len(turn.tokens) - 1
        return sampled

    def _holds(self, turn: Turn, computed: int) -> bool:
        """Whether the slots of these tokens hold their KV, and not another's; of a window, those of its last
        tokens, to which the next one attends."""
        for window, blocks in zip(self.windows, turn.blocks, strict=True):
            first = max(0, computed - window + 1) if window else 0
            for number, start in enumerate(range(0, computed, BLOCK)):
                begin, end, slot = max(start, first), min(start + BLOCK, computed), blocks[number] * BLOCK
                held = list(self.slots[slot + begin - start : slot + end - start])
                if begin < end and held != turn.keys[begin:end]:
                    return False
        return True


class OracleBench(Bench):
    """The bench with that worker under it; it fails at the first token that no right KV gives."""

    connector: str
    module: str | None
    settings: dict[str, Any]  # the connector's own

    def __init__(
        self,
        scheduler_cls: Any,
        model: Path,
        is_v2: bool,
        blocks: int = 24,
        graphs: str = FULL_AND_PIECEWISE,
        drafts: int = 0,
        failure_policy: str = "recompute",
        **more: Any,
    ) -> None:
        self.slots = self.new_slots(blocks)
        transfer = {
            "kv_role": "kv_both",
            "kv_load_failure_policy": failure_policy,
            "kv_connector": self.connector,
            "kv_connector_module_path": self.module,
            "kv_connector_extra_config": self.settings,
        }
        super().__init__(scheduler_cls, model, blocks, drafts=drafts, transfer=transfer, **more)
        self.scheduler.use_v2_model_runner = is_v2
        specs = [group.kv_cache_spec for group in self.scheduler.kv_cache_config.kv_cache_groups]
        windows = [getattr(spec, "sliding_window", None) or 0 for spec in specs]
        self.worker = Worker(self.slots, is_v2, graphs, drafts, windows)
        self.worker.connector = self.join()
        self._moved: dict[int, Any] = {}  # the connector's reports of the steps in flight
        self._right: dict[str, Turn] = {}  # each request's tokens, as the model would have them
        self._has_both: set[str] = set()  # requests that had KV when the weights changed
        self._cached: dict[int, list[int]] = {}  # by block: of which tokens vLLM says that it has the KV
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._cache, self._pool.cache_full_blocks = self._pool.cache_full_blocks, self._note_cached

    def new_slots(self, blocks: int) -> Any:
        """The GPU's memory: names of KV by slot."""
        return [0] * (blocks * BLOCK)

    def join(self) -> Any:
        """The worker's half of the connector, once the scheduler's is there."""
        raise NotImplementedError

    def spoilt(self) -> list[str]:
        """LMCache's chunks under wrong names, in words."""
        raise NotImplementedError

    def send(self, job: str | None, tokens: Any, /, *args: Any, **fields: Any) -> str:
        request_id = super().send(job, tokens, *args, **fields)
        self._right[request_id] = self._turn(self.scheduler.requests[request_id])
        return request_id

    def go_on(self, session: str, tokens: list[int], out: int) -> None:
        """A streaming session's next input, once it waits for it. The last token it sampled is dropped."""
        request = self.scheduler.requests[session]
        assert request.status == RequestStatus.WAITING_FOR_STREAMING_REQ, request.status
        params = SamplingParams(max_tokens=out, ignore_eos=True, temperature=0)
        self.scheduler.add_request(Request(session, list(tokens), params, None, resumable=True))
        self._right[session] = self._turn(request)

    def _turn(self, request: Any) -> Turn:
        tokens, weights = list(request.all_token_ids), self.worker.weights
        return Turn(request.num_prompt_tokens, tokens, [], 0, weights, adapter_of(request))

    def new_weights(self) -> None:
        """The worker has others from now on. A request that has run may go on with the KV that it has."""
        self.worker.weights += 1
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        in_flight = {
            request_id for output, _ in self._in_flight for request_id in output.num_scheduled_tokens
        }
        for request_id, request in self.scheduler.requests.items():
            loads = request.status in (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.PREEMPTED)
            goes_on = request_id in self.order and manager.req_to_blocks.get(request_id) and not loads
            if request_id in in_flight or goes_on:
                self._has_both.add(request_id)
            else:
                self._right[request_id] = self._turn(request)

    def step(self, seconds: float | None = None) -> int:
        tokens = super().step(seconds)
        self.check(self._scheduled)
        return tokens

    def run(self, output: Any) -> list[list[int]]:
        self._scheduled = dict(self.scheduler.requests)
        sampled, moved = self.worker.run(output)
        self._moved[id(output)] = moved
        return sampled

    def moved(self, output: Any) -> Any:
        return self._moved.pop(id(output))

    def tokens_of(self, request_id: str) -> list[int]:
        """A request's tokens so far, or all it had when it ended."""
        request = self.scheduler.requests.get(request_id)
        return list(request.all_token_ids) if request is not None else self._right[request_id].tokens[:]

    def drain(self) -> None:
        """End the steps in flight."""
        while self._in_flight:
            self._deliver(*self._in_flight.popleft())

    def preempt_all(self) -> None:
        """Every running request loses its blocks, and nothing stays cached."""
        self.drain()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _deliver(self, output: Any, runner: ModelRunnerOutput) -> None:
        super()._deliver(output, runner)
        if self.worker.drafts and not self._ahead:
            ids = [i for i in runner.req_ids if i in self.worker.turns]
            drafts = [list(self.worker.turns[i].drafts) for i in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _note_cached(self, **call: Any) -> None:
        """BlockPool.cache_full_blocks."""
        self._cache(**call)
        right = self._up_to(call["request"])
        for number in range(call["num_cached_blocks"], call["num_full_blocks"]):
            names = right.keys[number * BLOCK : (number + 1) * BLOCK]
            if not call["blocks"][number].is_null:
                self._cached[call["blocks"][number].block_id] = names

    def _up_to(self, request: Any) -> Turn:
        """The model's right tokens for the request, as many as it has now."""
        if request.request_id in self._has_both:
            turn = self._turn(request)
            self._right[request.request_id] = turn
        right = self._right[request.request_id]
        while len(right.tokens) < request.num_tokens:
            right.append(answer(right.keys[-1]))
        return right

    def check(self, requests: dict[str, Any]) -> None:
        """Every request's tokens are the model's answers to its own prefix, and what is cached is whole."""
        for turn, request in requests.items():
            right, got = self._up_to(request), list(request.all_token_ids)
            if got == right.tokens[: len(got)]:
                continue
            at = next(i for i, token in enumerate(got) if token != right.tokens[i])
            raise AssertionError(
                f"{turn}, of {request.num_prompt_tokens} prompt tokens, got {got[at]} as its token {at}, "
                f"right is {right.tokens[at]}: it has attended to KV of other tokens or weights"
            )
        assert not self.spoilt(), f"LMCache keeps KV of other tokens than it says: {self.spoilt()}"
        if any(kv and kv.invalid_block_ids for kv in self._moved.values()):
            return  # vLLM does not know yet
        for block_id, names in list(self._cached.items()):
            if self._pool.blocks[block_id].block_hash is None:
                del self._cached[block_id]
            else:
                held = list(self.slots[block_id * BLOCK : (block_id + 1) * BLOCK])
                assert held == names, (
                    f"vLLM's prefix cache has KV of other tokens or weights in its block {block_id}"
                )
