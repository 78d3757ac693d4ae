"""No request ever attends to KV that is not its own tokens', on a machine such as a GPU's.

    ORACLE_STEPS=1000000 python -m pytest -s tests/test_kv_oracle.py

In-process LMCache, vLLM's V1 and V2 model runners, one and two steps in flight (kv_oracle.py).
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("lmcache")

from bench import BLOCK, prompt
from bench import settings as settings_of  # noqa: F401
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from kv_oracle import CHUNK, OracleBench
from vllm.v1.request import RequestStatus

import connectors.lmcache
from connectors.lmcache_loads import LoadCheck
from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler

STEPS = int(os.environ.get("ORACLE_STEPS", "3000"))
SEED = int(os.environ.get("ORACLE_SEED", "0"))
BLOCKS = 18
CONTEXT_TOKENS = (BLOCKS - 4) * BLOCK  # of one turn, at most
RUNNERS = pytest.mark.parametrize("is_v2", [False, True], ids=["V1", "V2"])
SCHEDULERS = pytest.mark.parametrize("cls", [ContinuumScheduler, ContinuumAsyncScheduler])
Make = Callable[..., OracleBench]


@pytest.fixture
def make(model: Path, settings_of: Any) -> Make:  # noqa: F811
    settings_of(policy="fcfs")
    return lambda cls, is_v2, **more: OracleBench(cls, model, is_v2, **more)


def resumed(bench: OracleBench) -> None:
    bench.send("a", prompt(40), 120)
    for _ in range(70):
        bench.step()
    bench.preempt_all()
    bench.run_until_idle()


def all_but_one(bench: OracleBench) -> None:
    tokens = prompt(3 * CHUNK)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    bench.turn("a", tokens, out=4)


@RUNNERS
@SCHEDULERS
def test_a_resumed_turn_loads_what_it_had_generated(cls: Any, is_v2: bool, make: Make) -> None:
    """To the V2 runner it comes as a new one, with its prompt alone; LMCache had looked up all its tokens."""
    bench = make(cls, is_v2, blocks=60)
    resumed(bench)
    assert bench.worker.engine.loads == 1


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize("rest", [0, 1])
def test_a_load_of_all_but_one_token_is_made_where_a_full_graph_is_replayed(
    cls: Any, is_v2: bool, rest: int, make: Make
) -> None:
    bench = make(cls, is_v2)
    tokens = prompt(3 * CHUNK + rest)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    bench.turn("a", tokens, out=4)
    assert (bench.worker.engine.loads, bench.worker.replays) == (1, int(is_v2))


@pytest.mark.parametrize(
    ("without", "events"), [("with_all_tokens", resumed), ("with_attn_metadata", all_but_one)]
)
@SCHEDULERS
def test_a_load_that_lmcache_skips_is_found_out_and_computed(
    cls: Any, without: str, events: Callable[[OracleBench], None], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way to skip one, with what keeps from it taken out; with the check gone too, tokens are wrong."""
    monkeypatch.setattr(connectors.lmcache, without, lambda it: it)
    events(make(cls, True, blocks=60))
    monkeypatch.setattr(LoadCheck, "loaded", lambda *_: None)
    with pytest.raises(AssertionError, match="KV of other tokens"):
        events(make(cls, True, blocks=60))


@RUNNERS
@SCHEDULERS
def test_what_was_computed_beside_a_failed_load_is_not_stored(cls: Any, is_v2: bool, make: Make) -> None:
    """vLLM computes it again, but LMCache would keep the first copy: of what attended to nothing."""
    bench = make(cls, is_v2)
    tokens = prompt(5 * CHUNK + 8)
    bench.turn("a", tokens[: 3 * CHUNK])
    bench.scheduler.reset_prefix_cache()
    bench.worker.engine.losing = 1
    bench.turn("b", tokens, out=9)
    bench.scheduler.reset_prefix_cache()
    bench.turn("c", tokens, out=9)
    assert bench.worker.engine.lost == 1 and bench.worker.engine.loads == 2  # the retry computes


TURN = st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.integers(1, 20))
taken: Counter[str] = Counter()


class Machine(RuleBasedStateMachine):
    """One engine whose memory is too small for its programs. Rules are what may happen between steps."""

    model: ClassVar[Path]

    @initialize(cls=st.sampled_from([ContinuumScheduler, ContinuumAsyncScheduler]), is_v2=st.booleans())
    def start(self, cls: Any, is_v2: bool) -> None:
        self.bench = OracleBench(cls, self.model, is_v2, BLOCKS, budget_tokens=64)
        self.last: dict[str, str] = {}  # a program's last request
        self.stories = itertools.count()

    @rule(turns=st.lists(TURN, min_size=1, max_size=4))
    def arrive(self, turns: list[tuple[str, int, int]]) -> None:
        """Turns that begin with what their programs' last ones had, as far as those have come."""
        for job, new, out in turns:
            history = self.bench.tokens_of(self.last[job]) if job in self.last else []
            if len(history) + new + out > CONTEXT_TOKENS:
                history = []
            tokens = history + prompt(new, next(self.stories))
            self.last[job] = self.bench.send(job, tokens, out)

    @rule(program=st.sampled_from("abcd"), rest=st.integers(0, 1), out=st.integers(1, 9))
    def ask_again(self, program: str, rest: int, out: int) -> None:
        """What a tier holds, or one token more, on an engine that does nothing else and has lost it."""
        tokens = self.bench.tokens_of(self.last[program]) if program in self.last else []
        if len(tokens) > CHUNK:
            for _ in range(20):
                self.step()
            self.bench.scheduler.reset_prefix_cache()
            whole = min(len(tokens), CONTEXT_TOKENS - 9) // CHUNK * CHUNK
            self.last[program] = self.bench.send(program, tokens[: whole + rest], out)

    @rule(steps=st.integers(1, 10))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        live = [i for i, r in self.bench.scheduler.requests.items() if not r.is_finished()]
        if live:
            self.bench.scheduler.finish_requests(live[which % len(live)], RequestStatus.FINISHED_ABORTED)

    @rule(what=st.sampled_from(["losing", "evict", "preempt", "reset", "losing"]), number=st.integers(1, 3))
    def trouble(self, what: str, number: int) -> None:
        """Loads bring less than was found; LMCache evicts; the GPU's cache is lost, or the requests too."""
        engine = self.bench.worker.engine
        if what == "losing":
            engine.losing += number
        elif what == "evict":
            for chunk in list(engine.chunks)[::number]:
                del engine.chunks[chunk]
        elif what == "preempt":
            self.bench.preempt_all()
        else:
            self.bench.scheduler.reset_prefix_cache()

    def step(self) -> None:
        taken["steps"] += 1
        self.bench.step(0.05)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(3000):
            if not self.bench.scheduler.requests and not self.bench._in_flight:
                break
            self.step()
        assert not self.bench.scheduler.requests, f"still here: {list(self.bench.scheduler.requests)}"
        worker = self.bench.worker
        taken.update(
            {"loads": worker.engine.loads, "short loads": worker.engine.lost, "replays": worker.replays}
        )
        taken["resumed"] += worker.resumed
        self.bench.scheduler.shutdown()


@pytest.mark.timeout(max(300, STEPS // 50))
def test_no_order_of_events_lets_a_request_attend_to_kv_that_is_not_its_own(
    model: Path,
    settings_of: Any,  # noqa: F811
) -> None:
    settings_of(policy="static-ttl", static_ttl_s=1, max_pinned_share=0.4)
    Machine.model = model
    for name in ("vllm", "lmcache"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for number in itertools.count():
        if taken["steps"] >= STEPS:
            break
        seed(SEED + number)(Machine)
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=max(2, STEPS // 1000),
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(dict(taken))
    assert all(taken[event] for event in ("loads", "short loads", "replays", "resumed")), taken
