"""After any events in any order, no request attends to KV that is not its own (kv_oracle.py).

    ORACLE_STEPS=1000000 python -m pytest -s tests/test_kv_oracle_machine.py    # ORACLE_SEED=... repeats one
    ORACLE_STOCK=1 ...      # vLLM's own scheduler and the stock connectors: shows their known faults
    ORACLE_MIX=native ...   # over vLLM's own offloading alone

LMCache's server, vLLM's own offloading, and the simulator's fake connector; vLLM's V1 and V2 model runners;
one and two steps in flight; with and without drafts; chunks of 32 tokens, and of 256 as on a GPU.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("lmcache")

import vllm
from bench import BLOCK, prompt
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from kv_oracle import FULL, FULL_AND_PIECEWISE, PIECEWISE
from kv_oracle_fake import FakeBench
from kv_oracle_native import NativeBench, StockNativeBench
from kv_oracle_server import ServerBench, StockServerBench, in_one_process
from layer_kinds import FULL as FULL_LAYERS
from layer_kinds import beside_windows
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from connectors.kv_names import AdapterNames, WeightsVersion
from connectors.lmcache_mp.connector import ContinuumLMCacheMPConnector as OurConnector
from connectors.lmcache_mp.tracker import Tracker
from continuum_lmcache.vllm_plugin.memory.gpu_blocks import GpuBlocks
from continuum_lmcache.vllm_plugin.scheduler import (
    ContinuumAsyncScheduler,
    ContinuumMixin,
    ContinuumScheduler,
)

STEPS = int(os.environ.get("ORACLE_STEPS", "3000"))
IS_LONG = "ORACLE_STEPS" in os.environ  # then each run draws anew
SEED = int(os.environ.get("ORACLE_SEED") or (secrets.randbelow(1 << 31) if IS_LONG else 0))
IS_STOCK = bool(os.environ.get("ORACLE_STOCK"))
ADAPTERS = {
    "MP": StockServerBench if IS_STOCK else ServerBench,
    "native": StockNativeBench if IS_STOCK else NativeBench,
    "fake": FakeBench,
}
WINDOWS = "MP-0.5 MP-1 MP-3"  # chunks that a window has
MIXES = os.environ.get("ORACLE_MIX", f"MP MP MP fake,native,{WINDOWS}").split(",")
MIX = MIXES[0].split()
SCHEDULERS = (Scheduler, AsyncScheduler) if IS_STOCK else (ContinuumScheduler, ContinuumAsyncScheduler)
SMALL, AS_ON_GPUS = (32, 18, 64), (256, 72, 256)  # tokens of a chunk, blocks, tokens of a step
SERVER_TROUBLE = st.sampled_from(["slow", "slow", "silent", "silent", "killed"])
RARELY = st.sampled_from([False, False, False, True])
MOST = st.sampled_from([True, True, False])
TURN = st.tuples(
    st.sampled_from("abcd"), st.integers(1, 60), st.integers(1, 20), RARELY, st.sampled_from([0, 0, 0, 1, 2])
)
taken: Counter[str] = Counter()


class Machine(RuleBasedStateMachine):
    """One engine whose memory is too small for its programs. Rules are events between steps."""

    model: ClassVar[Path]

    @initialize(
        adapter=st.sampled_from(range(4)).map(lambda n: MIX[n % len(MIX)]),  # MIX differs by test
        sizes=st.sampled_from([SMALL, SMALL, AS_ON_GPUS]),
        is_async=MOST,
        is_v2=MOST,
        drafts=st.sampled_from([0, 0, 2]),
        graphs=st.sampled_from([FULL_AND_PIECEWISE, FULL_AND_PIECEWISE, FULL, PIECEWISE]),
        is_eager=st.booleans(),
        fails=RARELY,
        lag=st.sampled_from([0, 4, 16, 60]),
        knows_all=st.booleans(),
    )
    def start(
        self,
        adapter: str,
        sizes: tuple[int, int, int],
        is_async: bool,
        is_v2: bool,
        drafts: int,
        graphs: str,
        is_eager: bool,
        fails: bool,
        lag: int,
        knows_all: bool,
    ) -> None:
        """`lag`: ticks of the server, which says that it `knows_all` that its tiers hold."""
        self.chunk, blocks, budget_tokens = sizes
        self.is_async, self.drafts, self.session = is_async, drafts, ""
        self.context_tokens = blocks * BLOCK * 3 // 4  # of one turn, at most
        self.adapter, _, window_chunks = adapter.partition("-")
        window = int(float(window_chunks or 0) * self.chunk)
        spec = beside_windows(window) if window else [FULL_LAYERS]
        taken["models with windows"] += bool(window)
        adapter = self.adapter
        self.bench = ADAPTERS[adapter](
            SCHEDULERS[is_async],
            self.model,
            is_v2,
            blocks * len(spec),
            spec=spec,
            budget_tokens=budget_tokens,
            chunk=self.chunk,
            drafts=drafts,
            graphs=graphs,
            failure_policy="fail" if fails or IS_STOCK else "recompute",
            settings={"lmcache.mp.eager_prefetch": is_eager} if adapter == "MP" else {},
        )
        self.bench.lmcache.lag, self.bench.lmcache.knows_all = lag, knows_all
        self.last: dict[str, str] = {}  # a program's last request
        self.stories = itertools.count()

    @rule(turns=st.lists(TURN, min_size=1, max_size=4), steps=st.integers(0, 20))
    def arrive(self, turns: list[tuple[str, int, int, bool, int]], steps: int) -> None:
        """Turns that begin with their programs' last tokens so far, perhaps with another adapter. Some may
        not read the prefix cache."""
        for job, new, out, skips, adapter in turns:
            story = next(self.stories)
            tokens = prompt(new * self.chunk // 32 + story % 16, story)
            history = self.bench.tokens_of(self.last[job]) if job in self.last else []
            if len(history) + len(tokens) + out <= self.context_tokens:
                tokens = history + tokens
            lora = LoRARequest(f"adapter {adapter}", adapter, "no/folder") if adapter else None
            self.last[job] = self.bench.send(job, tokens, out, skip_reading_prefix_cache=skips, lora=lora)
            taken["turns of adapters"] += adapter > 0
        self.run(steps)

    @rule(turns=st.lists(TURN, min_size=1, max_size=4), steps=st.integers(0, 20))
    def arrive_after_others(self, turns: list[tuple[str, int, int, bool, int]], steps: int) -> None:
        """After the GPU has served others and evicted it."""
        self.run(20)
        self.bench.scheduler.reset_prefix_cache()
        self.arrive(turns, steps)

    @rule(program=st.sampled_from("abcd"), rest=st.integers(0, 1), out=st.integers(1, 9))
    def ask_again(self, program: str, rest: int, out: int) -> None:
        """A prompt that a tier holds, or one token more, on an idle engine that has lost it."""
        tokens = self.bench.tokens_of(self.last[program]) if program in self.last else []
        if len(tokens) > self.chunk:
            self.run(20)
            self.bench.scheduler.reset_prefix_cache()
            whole = min(len(tokens), self.context_tokens) // self.chunk * self.chunk
            self.last[program] = self.bench.send(program, tokens[: whole + rest], out)

    @rule(new=st.integers(1, 40), out=st.integers(1, 20), steps=st.integers(0, 20))
    def stream(self, new: int, out: int, steps: int) -> None:
        """The streaming session's next input, if it waits for it; or its first. vLLM itself goes wrong where
        it ends an input within a step's drafts, which it can only without steps ahead, or on 0.30."""
        if self.drafts and (not self.is_async or vllm.__version__.startswith("0.30.")):
            return
        request = self.bench.scheduler.requests.get(self.session)
        tokens = prompt(new * self.chunk // 32, next(self.stories))
        if request is None:
            self.session = self.bench.send(None, tokens, out, resumable=True)
        elif request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            if request.num_tokens + len(tokens) + out > self.context_tokens:
                self.bench.scheduler.finish_requests([self.session], RequestStatus.FINISHED_ABORTED)
            else:
                taken["sessions went on"] += 1
                self.bench.go_on(self.session, tokens, out)
        self.run(steps)

    @rule(steps=st.integers(1, 20), seconds=st.sampled_from([0.05, 0.5]))
    def run(self, steps: int, seconds: float = 0.05) -> None:
        for _ in range(steps):
            if not self.bench.scheduler.requests and not self.bench._in_flight:
                break  # the engine sleeps
            taken["steps"] += 1
            self.bench.step(seconds)

    @rule(state=st.integers(0, 5), which=st.integers(0, 5), is_within=st.booleans())
    def abort(self, state: int, which: int, is_within: bool) -> None:
        """One of those in one of the states that there are, between two steps or within one."""
        if is_within and self.bench.scheduler.requests:
            self.bench.scheduled = lambda _: self.leave(state, which)
            self.run(1)
            self.bench.scheduled = lambda _: None
        else:
            self.leave(state, which)

    def leave(self, state: int, which: int) -> None:
        live: dict[str, list[str]] = {}
        for request_id, request in self.bench.scheduler.requests.items():
            if not request.is_finished():
                live.setdefault(request.status.name, []).append(request_id)
        if live:
            name = sorted(live)[state % len(live)]
            taken[f"aborted, {name}"] += 1
            request_id = live[name][which % len(live[name])]
            self.bench.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @rule(what=st.sampled_from(["losing", "evict", "preempt", "reset", "clear"]), number=st.integers(1, 3))
    def trouble(self, what: str, number: int) -> None:
        """Loads bring less than was found; LMCache evicts; the GPU's cache is lost, or the requests too."""
        if what == "losing":
            self.bench.lmcache.losing += number
        elif what == "evict":
            self.bench.lmcache.evict(number)
        elif what == "preempt":
            self.preempt_all()
        else:
            self.bench.scheduler.reset_prefix_cache(reset_connector=what == "clear")

    @rule(
        way=st.sampled_from(["seen", "seen", "abort", "preempt", "pause"]),
        is_reset_first=st.booleans(),
        program=st.sampled_from("abcd"),
        steps=st.integers(0, 20),
    )
    def new_weights(self, way: str, is_reset_first: bool, program: str, steps: int) -> None:
        """By a call that vLLM shows; or unseen, beside a reset that succeeds. Then a program returns."""
        if IS_STOCK:
            return
        self.change_weights(way, is_reset_first)
        tokens = self.bench.tokens_of(self.last[program]) if program in self.last else []
        if self.chunk < len(tokens) <= self.context_tokens:
            self.last[program] = self.bench.send(program, tokens, 1)
        self.run(steps)

    def change_weights(self, way: str, is_reset_first: bool) -> None:
        taken[f"new weights, {way}"] += 1
        if way == "seen":
            worker = SimpleNamespace(collective_rpc=lambda *_: self.bench.new_weights())
            engine: Any = SimpleNamespace(scheduler=self.bench.scheduler, model_executor=worker)
            EngineCore.collective_rpc(engine, "reload_weights")
            return
        if way == "pause":
            self.pause()
            return
        if way == "abort":
            self.bench.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self.run_out()
        else:
            self.preempt_all()
        if not self.bench.scheduler.reset_prefix_cache():
            return  # others load, or are stored
        events = [self.bench.new_weights, self.reset_all]
        for event in reversed(events) if is_reset_first else events:
            event()

    def pause(self) -> None:
        """vLLM's /pause?mode=keep, which empties the caches once the engine has no work, then new weights."""
        scheduler = self.bench.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(3000):
            if not scheduler.has_requests() and not self.bench._in_flight:
                break
            self.run(1)
        session = scheduler.requests.get(self.session)
        status = session.status if session is not None else None
        held = scheduler.kv_cache_manager.get_blocks(self.session).blocks[0] if session is not None else ()
        has_next_piece = status == RequestStatus.WAITING and held  # vLLM raises beside this one too
        try:
            if status != RequestStatus.WAITING_FOR_STREAMING_REQ and not has_next_piece:
                assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                self.bench.new_weights()
        finally:
            scheduler.set_pause_state(PauseState.UNPAUSED)

    def reset_all(self) -> None:
        assert self.bench.scheduler.reset_prefix_cache(reset_connector=True)

    @rule(what=SERVER_TROUBLE, seconds=st.sampled_from([0.0, 0.2, 1.0, 3.0, 12.0, 60.0]))
    def server_trouble(self, what: str, seconds: float) -> None:
        """The server answers some ticks later, or is silent for this long, or restarts after this long."""
        if self.adapter != "MP":
            return
        taken[what] += 1
        server = self.bench.lmcache
        if what == "slow":
            server.lag = int(min(seconds, 12) * 8)
        elif what == "silent":
            server.silent_until_s = server.now_s + seconds
        else:
            server.kill(seconds)

    @rule(seconds=st.sampled_from([1.0, 6.0, 20.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now_s += seconds

    @rule(way=st.sampled_from(["load", "load", "load", "partial", "recompute"]))
    def choose(self, way: str) -> None:
        """The share of a hit that is loaded, from now on."""
        connector = self.bench.scheduler.connector
        if IS_STOCK:
            return
        judged = self.judged = getattr(self, "judged", None) or self.bench.engine.load_policy.tokens_to_load
        allowed = {"load": 1 << 30, "recompute": 0}
        connector.set_load_selector(
            lambda turn, where: min(judged(turn, where), allowed.get(way, where.dram_tokens))
        )

    def preempt_all(self) -> None:
        """vLLM does not support it beside a load, ended or not."""
        self.bench.drain()
        running = {request.request_id for request in self.bench.scheduler.running}
        manager = self.bench.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        if {i for i, blocks in manager.req_to_blocks.items() if blocks} <= running:
            self.bench.preempt_all()

    def run_out(self) -> None:
        """Without new input all should end."""
        for _ in range(3000):
            request = self.bench.scheduler.requests.get(self.session)
            if request is not None and request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                self.bench.scheduler.finish_requests([self.session], RequestStatus.FINISHED_ABORTED)
            if not self.bench.scheduler.requests and not self.bench._in_flight:
                break
            self.run(1)

    def teardown(self) -> None:
        """Without new requests all end, and all memory is free again."""
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        self.run_out()
        if self.session in bench.scheduler.requests:  # vllm#49439: it and a load wait for each other's memory
            taken["sessions that never went on"] += 1
            bench.scheduler.finish_requests([self.session], RequestStatus.FINISHED_ABORTED)
            self.run_out()
        assert not bench.scheduler.requests, f"still here: {list(bench.scheduler.requests.values())}"
        bench.now_s += 10_000
        bench.step()
        assert bench.used_blocks == 0
        taken[f"answers compared, {self.adapter}"] += getattr(bench, "compared", 0)
        loads, lost = f"loads, {self.adapter}", f"short loads, {self.adapter}"
        taken.update({loads: bench.lmcache.loads, lost: bench.lmcache.lost})
        worker = bench.worker
        taken.update({"resumed": worker.resumed})
        taken.update({"drafts right": worker.accepted, "drafts wrong": worker.rejected})
        bench.scheduler.shutdown()


def run_machine(model: Path, steps: int) -> None:
    """Random orders of events, until so many steps are taken."""
    Machine.model, end = model, taken["steps"] + steps
    print(f"ORACLE_SEED={SEED}")  # repeats it
    logging.disable(logging.CRITICAL)
    try:
        for number in itertools.count():
            if taken["steps"] >= end:
                break
            seed(SEED + number)(Machine)
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=max(2, min(10, steps // 1000)),
                    stateful_step_count=40,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                ),
            )
    finally:
        logging.disable(logging.NOTSET)
        print(dict(taken))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.timeout(max(900, STEPS // 50))
def test_no_order_of_events_lets_a_request_attend_to_kv_that_is_not_its_own(
    mix: str, model: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(policy="static-ttl", static_ttl_s=1, max_pinned_share=0.4)
    in_one_process(monkeypatch)
    monkeypatch.setitem(globals(), "MIX", mix.split())
    run_machine(model, STEPS)
    common = ["resumed", "sessions went on"]
    common += ["loads, MP", "short loads, MP"] if "MP" in mix else ["loads, native"]
    assert all(taken[event] for event in common), taken


MENDS = {
    "the tiers' names": lambda patched: patched.setattr(WeightsVersion, "renew", lambda _: None),
    "the adapters' names": lambda patched: patched.setattr(AdapterNames, "of", lambda *_: b""),
    "the GPU's cache": lambda patched: patched.setattr(GpuBlocks, "forget_all", lambda _: None),
    "stores of two weights": lambda patched: patched.setattr(OurConnector, "_is_pure", lambda *_: True),
    "the watch of calls": lambda patched: patched.setattr(ContinuumMixin, "on_new_weights", lambda *_: None),
    "windows that are gone": lambda patched: (
        patched.setitem(globals(), "MIX", WINDOWS.split()),
        patched.setattr(Tracker, "without_windows", lambda *_: None),
    ),
    "loaded turns that wait": lambda patched: patched.setattr(
        ContinuumMixin, "_forget_loaded", lambda _: None
    ),
}


@pytest.mark.parametrize("mend", MENDS)
def test_the_machine_finds_kv_of_other_tokens_weights_or_adapters_where_a_mend_is_taken_out(
    mend: str, model: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(policy="static-ttl", static_ttl_s=1, max_pinned_share=0.4)
    in_one_process(monkeypatch)
    MENDS[mend](monkeypatch)
    # beside loaded turns that wait vLLM's reset raises, if it comes first
    with pytest.raises((AssertionError, RuntimeError), match="KV of other tokens|Failed to reset KV cache"):
        run_machine(model, 20_000)
