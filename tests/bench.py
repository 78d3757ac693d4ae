"""vLLM's real scheduler without a model; the test sets the time.

    bench = Bench(blocks=10); bench.send("p", prompt(64)); bench.run_until_idle()

Blocks of 16 tokens. Every step generates one token per scheduled request that has its prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from continuum_lmcache.vllm_plugin.memory.pinned_hits import PinnedHits

BLOCK = 16


def prompt(tokens: int, story: int = 0) -> list[int]:
    """Token ids; prompts of one story are prefixes of each other."""
    return [100 + (story * 977 + i * 31) % 3000 for i in range(tokens)]


def fake_tiers(dram_gb: float, **settings: Any) -> dict[str, Any]:
    """The fake connector's configuration, with chunks of a block."""
    return {
        "kv_connector": "FakeConnector",
        "kv_connector_module_path": "connectors.fake",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"fake.dram_gb": dram_gb, "fake.chunk_tokens": BLOCK},
        **settings,
    }


class Bench:
    """One scheduler, a clock that the test sets, and a runner that answers every request with token 7.

    An asynchronous scheduler schedules each step before the last one's output is known, as vLLM does.
    """

    def __init__(
        self,
        scheduler_cls: Any,
        model: Path,
        blocks: int = 20,
        budget_tokens: int = 2048,
        transfer: dict[str, Any] | None = None,
        log_stats: bool = True,
        chunked: bool = True,
        spec: Any = None,
        drafts: int = 0,
        checks_hits: bool = True,
    ) -> None:
        init_none_hash(sha256)
        is_async = "Async" in scheduler_cls.__name__
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="bfloat16", seed=0, max_model_len=4096),
            scheduler_config=SchedulerConfig(
                max_num_seqs=64,
                max_num_batched_tokens=budget_tokens,
                max_model_len=4096,
                is_encoder_decoder=False,
                async_scheduling=is_async,
                enable_chunked_prefill=chunked,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )
        config.scheduler_config.async_scheduling = is_async  # the CPU platform turns it off
        config.cache_config.num_gpu_blocks = blocks
        if drafts:  # set late: vLLM refuses n-grams beside async scheduling, which other drafters may have
            config.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, prompt_lookup_min=1
            )
        spec = spec or FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        specs = spec if isinstance(spec, list) else [spec]  # one for each group of layers
        if any(isinstance(each, MambaSpec) for each in specs):
            config.cache_config.mamba_cache_mode = "align"
        groups = [KVCacheGroupSpec([f"layer {i}" if i else "layer"], each) for i, each in enumerate(specs)]
        caches = KVCacheConfig(blocks, [], groups)
        retention = "prefix_cache_retention_interval"  # of windows and states; vLLM 0.30 has none
        vars(caches)[retention] = vars(config.cache_config).get(retention)
        self.now_s = 1000.0
        self.sampled = 7  # the answer to every request
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=log_stats,
        )
        coordinator = self.scheduler.kv_cache_manager.coordinator
        found = getattr(coordinator.find_longest_cache_hit, "__self__", None)
        if checks_hits and isinstance(found, PinnedHits):
            coordinator.find_longest_cache_hit = partial(checked_hit, found)
        self.scheduler.clock = lambda: self.now_s
        self.events: deque[Any] = deque(maxlen=10_000)  # what the engine said, in order
        if self.engine is not None:
            self._carry_out = self.scheduler._events.carry_out
            self.scheduler._events.carry_out = self.note_events
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.order: list[str] = []  # request ids, as they first ran
        self.preempted: list[str] = []
        self.done: dict[str, list[int]] = {}  # request id -> all its tokens
        self.stats: deque[Any] = deque(maxlen=10_000)  # of each step, as a front-end gets them
        self.step_seconds: Callable[[Any], float] = lambda _: 0.1  # by the step's output
        self._count = 0
        self._ahead = 1 if is_async else 0
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()

    @property
    def engine(self) -> Any:
        """None under vLLM's own scheduler."""
        return getattr(self.scheduler, "_engine", None)

    @property
    def parts(self) -> Any:
        """What the scheduler has beside its engine."""
        return self.scheduler._parts

    def note_events(self, events: Iterable[Any]) -> None:
        """The scheduler gets the engine's decisions."""
        events = list(events)
        self.events += events
        self._carry_out(events)

    def events_of(self, kind: type) -> list[Any]:
        """All events of that kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def send(
        self, job: str | None, tokens: Sequence[int], /, out: int = 1, salt: str | None = None, **fields: Any
    ) -> str:
        """Add a request and return its id."""
        self._count += 1
        extra = {**({"job_id": job} if job is not None else {}), **fields}
        stop, priority = extra.pop("stop", None), extra.pop("priority", 0)
        resumable = extra.pop("resumable", False)  # a session whose prompt may go on
        session_id = extra.pop("session_id", None)  # vLLM's own, from a header
        lora = extra.pop("lora", None)  # an adapter
        params = SamplingParams(
            max_tokens=out,
            ignore_eos=True,
            temperature=0,
            extra_args=extra,
            stop=stop,
            skip_reading_prefix_cache=extra.pop("skip_reading_prefix_cache", None),
        )
        params.update_from_generation_config({})
        request = Request(
            request_id=f"{job}-{self._count}",
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            arrival_time=self.now_s,
            lora_request=lora,
            cache_salt=salt,
            priority=priority,
            resumable=resumable,
            session_id=session_id,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request.request_id

    def step(self, seconds: float | None = None) -> int:
        """One engine step; returns the tokens it scheduled."""
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        self.order += [new.req_id for new in output.scheduled_new_reqs]
        requests = self.scheduler.requests.items()
        self.preempted += [i for i, r in requests if r.status == RequestStatus.PREEMPTED]
        self.scheduled(output)
        runner = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, self.run(output))
        self._in_flight.append((output, runner))
        self.now_s += self.step_seconds(output) if seconds is None else seconds
        while len(self._in_flight) > (self._ahead if ids else 0):
            self._deliver(*self._in_flight.popleft())
        if self.engine is not None:
            self.engine.check()
        return sum(output.num_scheduled_tokens.values())

    def scheduled(self, output: Any) -> None:
        """A hook for tests between schedule() and the step."""

    def run(self, output: Any) -> list[list[int]]:
        """The worker's step: the tokens sampled, by request."""
        requests = self.scheduler.requests
        return [[] if requests[i].is_prefill_chunk else [self.sampled] for i in output.num_scheduled_tokens]

    def moved(self, output: Any) -> Any:  # noqa: ARG002
        """A worker connector's report with this step's output."""
        return None

    def _deliver(self, output: Any, runner: ModelRunnerOutput) -> None:
        """The runner has finished a step."""
        runner.kv_connector_output = self.moved(output)
        requests = dict(self.scheduler.requests)
        for engine_output in self.scheduler.update_from_output(output, runner).values():
            if engine_output.scheduler_stats is not None:
                self.stats.append(engine_output.scheduler_stats)
        self.done |= {i: list(r.all_token_ids) for i, r in requests.items() if r.is_finished()}

    def run_until_idle(self, max_steps: int = 2000) -> None:
        """Step until nothing is left to do; fails if the engine would spin."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.get_request_counts()}")

    def turn(
        self, job: str | None, tokens: Sequence[int], /, out: int = 1, salt: str | None = None, **fields: Any
    ) -> list[int]:
        """Send, run to the end, and return all the turn's tokens."""
        request_id = self.send(job, tokens, out, salt, **fields)
        self.run_until_idle()
        return self.done[request_id]

    def advance(self, seconds: float) -> None:
        """The engine is idle for this long, and is woken for due deadlines, as by the idle timer."""
        self.now_s += seconds
        self.run_until_idle()

    @property
    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is vLLM's null block


def checked_hit(hits: PinnedHits, block_hashes: Sequence[Any], most_tokens: int) -> Any:
    """A hit from a pin, which must be what vLLM finds then: the same KV, of which there may be two copies."""
    (blocks,), *found = hits.find_longest_cache_hit(block_hashes, most_tokens)
    (stock,), *wanted = hits._find(block_hashes, most_tokens)
    assert [b.block_hash for b in blocks] == [b.block_hash for b in stock] and found == wanted
    return (blocks,), *found


def check_nothing_is_left(bench: Bench) -> None:
    """Without new requests all end, and later all memory is free again."""
    bench.run_until_idle()
    bench.advance(1000.0)
    bench.engine.check()
    assert not bench.engine.turns and not bench.engine.admission.is_waited_for
    bench.scheduler.shutdown()
    assert bench.used_blocks == 0, "blocks leaked"
    assert not bench.engine.pins.pinned
