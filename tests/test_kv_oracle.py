"""No request attends to KV of other tokens than its own, on a machine like a GPU's (kv_oracle.py).

LMCache's server, vLLM's V1 and V2 model runners, one and two steps in flight. Each case runs once over stock
vLLM and LMCache too, where it is a strict xfail with the upstream issue, if one was found. Any order of
events is tried in test_kv_oracle_machine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

import vllm
from bench import BLOCK, prompt
from kv_oracle_fake import CHUNK, FakeBench
from kv_oracle_server import ServerBench, StockServerBench, in_one_process
from layer_kinds import beside_windows
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from connectors.fake.connector import FakeWorkerSide
from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler

MakeMp = Callable[..., ServerBench]
OURS = (ContinuumScheduler, ContinuumAsyncScheduler)


def cases(fault: str, also_on_0_30: bool = True) -> Any:
    """Our schedulers over both runners, and stock vLLM with LMCache's own connector, which has this fault."""
    stock = pytest.param(AsyncScheduler, True, id="stock", marks=pytest.mark.xfail(strict=True, reason=fault))
    has_fault = also_on_0_30 or not vllm.__version__.startswith("0.30.")
    ours = [(cls, is_v2) for cls in OURS for is_v2 in (False, True)]
    names = [f"{cls.__name__}-V{1 + is_v2}" for cls, is_v2 in ours]
    params = [pytest.param(*each, id=name) for each, name in zip(ours, names, strict=True)]
    return pytest.mark.parametrize(("cls", "is_v2"), [*params, *([stock] if has_fault else [])])


@pytest.fixture
def make_mp(model: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> MakeMp:
    settings(policy="fcfs")
    in_one_process(monkeypatch)

    def build(cls: Any, is_v2: bool, **more: Any) -> ServerBench:
        kind = StockServerBench if cls is AsyncScheduler else ServerBench
        return kind(cls, model, is_v2, **{"blocks": 80, "chunk": CHUNK, **more})

    return build


def test_a_connector_that_loads_nothing_is_found_out(
    model: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator's connector, without its copies."""
    settings(policy="fcfs")
    all_but_one(FakeBench(ContinuumScheduler, model, True))
    monkeypatch.setattr(FakeWorkerSide, "_load", lambda *_: None)
    with pytest.raises(AssertionError, match="KV of other tokens"):
        all_but_one(FakeBench(ContinuumScheduler, model, True))


def all_but_one(bench: Any) -> None:
    tokens = prompt(3 * CHUNK)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    bench.turn("a", tokens, out=4)


def test_a_request_that_ran_when_the_weights_changed_leaves_none_of_its_kv_in_a_tier(
    model: Path, settings: Any
) -> None:
    """Found by the state machine: a chunk that it completed later was stored as the new weights'."""
    settings(policy="fcfs")
    bench = FakeBench(ContinuumScheduler, model, True, budget_tokens=64 + BLOCK)
    bench.send("a", prompt(4 * CHUNK), 1)
    bench.step()
    bench.new_weights()
    bench.scheduler.on_new_weights("sync")
    bench.run_until_idle()
    bench.scheduler.reset_prefix_cache()
    bench.turn("b", prompt(4 * CHUNK), out=4)
    assert not bench.lmcache.loads
    bench.scheduler.reset_prefix_cache()
    bench.turn("c", prompt(4 * CHUNK), out=4)
    assert bench.lmcache.loads, "what the new weights computed whole is loaded"


def test_weights_do_not_change_above_a_tier_that_keeps_its_kv(model: Path, settings: Any) -> None:
    settings(policy="fcfs")
    bench = FakeBench(ContinuumScheduler, model, True)
    bench.scheduler.connector.reset_cache = lambda: False
    worker = SimpleNamespace(collective_rpc=lambda *_: bench.new_weights())
    with pytest.raises(RuntimeError, match="kept its cache"):
        EngineCore.collective_rpc(SimpleNamespace(scheduler=bench.scheduler, model_executor=worker), "sync")  # type: ignore[arg-type]
    assert bench.worker.weights == 0


# ---- LMCache's MP mode


@cases("LMCache counts on from all that it had found")
def test_what_a_failed_mp_load_should_have_brought_is_not_stored_before_it_is_computed(
    cls: Any, is_v2: bool, make_mp: MakeMp
) -> None:
    """With the prompt's head in vLLM's cache. Beside a decode, a step ends in the last block of a chunk."""
    bench = make_mp(cls, is_v2, budget_tokens=64)
    tokens = prompt(12 * CHUNK + 5)
    bench.turn("a", tokens[: 7 * CHUNK])
    bench.scheduler.reset_prefix_cache()
    bench.turn("b", tokens[: 2 * CHUNK])
    bench.send("d", prompt(5, 9), 60)
    bench.step()
    bench.lmcache.losing = 1
    bench.turn("c", tokens)
    assert bench.lmcache.lost == 1
    bench.scheduler.reset_prefix_cache()
    bench.turn("e", tokens)
    assert bench.lmcache.loads == 3


@cases("LMCache counts its hit as computed where vLLM does not let a turn read it", also_on_0_30=False)
@pytest.mark.parametrize("is_eager", [False, True])
def test_an_mp_turn_that_may_not_read_the_prefix_cache_stores_nothing_before_it_is_computed(
    cls: Any, is_v2: bool, is_eager: bool, make_mp: MakeMp
) -> None:
    """As with `prompt_logprobs`, where it waits for memory. A step ends in the last block of a chunk."""
    bench = make_mp(cls, is_v2, blocks=40, budget_tokens=70, settings={"lmcache.mp.eager_prefetch": is_eager})
    if cls in OURS:
        bench.scheduler.connector.set_load_selector(lambda *_: 4 * CHUNK)
    tokens = waits_for_memory(bench)
    bench.step()  # the others have their lookups' answers
    bench.turn("c", tokens, skip_reading_prefix_cache=True)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("is_v2", [False, True], ids=["V1", "V2"])
def test_what_a_declined_mp_turn_found_on_the_gpu_is_counted_when_it_is_placed(
    cls: Any, is_v2: bool, make_mp: MakeMp
) -> None:
    """While it waits for memory, others take the blocks that it would have hit."""
    bench = make_mp(cls, is_v2, blocks=40, budget_tokens=64)
    bench.scheduler.connector.set_load_selector(lambda *_: 0)
    tokens = waits_for_memory(bench)
    bench.turn("c", tokens)
    assert bench.lmcache.loads == 0


def waits_for_memory(bench: ServerBench) -> list[int]:
    """LMCache has four chunks of this prompt, vLLM three blocks; others take all memory, and then leave."""
    tokens = prompt(9 * CHUNK + 5)
    bench.turn("a", tokens[: 4 * CHUNK])
    bench.scheduler.reset_prefix_cache()
    bench.turn("b", tokens[: 3 * BLOCK + 1])
    bench.send("large", prompt(28 * BLOCK, 9), 150)
    bench.send("small", prompt(1, 8), 200)
    bench.step()
    return tokens


@cases(
    "LMCache counts drafts that were rejected as computed, and a session's next input has that many tokens"
)
def test_an_mp_session_that_goes_on_stores_nothing_before_it_is_computed(
    cls: Any, is_v2: bool, make_mp: MakeMp
) -> None:
    bench = make_mp(
        cls,
        is_v2,
        blocks=100,
        budget_tokens=64,
        drafts=2,
        settings={"lmcache.mp.save_decode_cache": True},
    )
    session = bench.send("a", prompt(50), 9, resumable=True)
    for number in range(1, 4):
        bench.run_until_idle()
        bench.go_on(session, prompt(130, number), 9)
    bench.run_until_idle()
    assert bench.lmcache.chunks and bench.worker.rejected
    bench.scheduler.finish_requests([session], RequestStatus.FINISHED_ABORTED)
    bench.run_until_idle()
    assert bench.used_blocks == 0


@cases("LMCache tells a turn as stored once any of its stores has ended: LMCache/LMCache#5062")
def test_a_finished_mp_turn_keeps_its_blocks_until_all_its_stores_have_ended(
    cls: Any, is_v2: bool, make_mp: MakeMp
) -> None:
    bench = make_mp(cls, is_v2, blocks=15, settings={"lmcache.mp.save_decode_cache": True})
    stored = bench.send("a", prompt(CHUNK + 8), out=60)
    bench.send("b", prompt(8, 1), out=150)
    while len(bench.tokens_of(stored)) < 3 * CHUNK - 3:
        bench.step()
    bench.lmcache.silent_until_s = bench.now_s + 25
    bench.run_until_idle()
    bench.now_s += 25
    bench.turn("c", prompt(8, 2))
    assert len(bench.lmcache.chunks) > 3


@cases("LMCache reports whole chunks, though it leaves out what vLLM has of the first")
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_failed_mp_load_spoils_no_block_that_vllm_had(
    cls: Any, is_v2: bool, is_asked: bool, make_mp: MakeMp
) -> None:
    """Others share them: their turns would be computed again, or fail with it."""
    bench = make_mp(cls, is_v2)
    tokens = prompt(4 * CHUNK + 5)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    bench.turn("b", tokens[: BLOCK + 1])
    sharing = bench.send("d", tokens[: BLOCK + 1] + prompt(3, 7), 60)
    request = bench.scheduler.requests[sharing]
    bench.step()
    bench.send("c", tokens)
    bench.step()
    bench.lmcache.losing = 1
    if not is_asked:  # the server counts as dead
        bench.worker.connector.worker_adapter._health_event.clear()
    lowest = []
    bench.scheduled = lambda _: lowest.append(request.num_computed_tokens)
    bench.run_until_idle()
    assert lowest == sorted(lowest) and bench.lmcache.losing == 1 - is_asked


@cases("LMCache tells a turn that left beside its load at once, and once more: LMCache/LMCache#4938")
def test_a_client_that_leaves_beside_its_mp_load_frees_blocks_when_it_has_ended(
    cls: Any, is_v2: bool, make_mp: MakeMp
) -> None:
    bench = make_mp(cls, is_v2, blocks=20)
    tokens = prompt(6 * CHUNK)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    loading = loads_under_way(bench, tokens)
    bench.scheduler.finish_requests(loading, RequestStatus.FINISHED_ABORTED)
    bench.send("c", prompt(8 * CHUNK, 1), 30)
    bench.run_until_idle()
    assert bench.lmcache.loads == 1 and bench.used_blocks == 0


@cases("LMCache gives up all moves when one ping goes unanswered; the server makes them later")
@pytest.mark.parametrize(("silent_s", "step_s"), [(20, 0.1), (60, 0.5)])  # mq_timeout is 30 s
def test_a_silent_mp_server_writes_to_nobody_elses_blocks_when_it_goes_on(
    cls: Any, is_v2: bool, silent_s: float, step_s: float, make_mp: MakeMp
) -> None:
    bench = make_mp(cls, is_v2, blocks=20)
    tokens = prompt(6 * CHUNK)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    bench.send("c", prompt(BLOCK, 1), 250)
    loads_under_way(bench, tokens)
    bench.lmcache.silent_until_s = bench.now_s + silent_s
    while bench.scheduler.has_requests():
        bench.step(step_s)
    assert bench.used_blocks == 0


def loads_under_way(bench: ServerBench, tokens: list[int]) -> str:
    """A turn whose load the server has not executed yet."""
    bench.lmcache.lag = 9
    loading = bench.send("b", tokens)
    while bench.scheduler.requests[loading].status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        bench.step()
    return loading


@cases("LMCache keeps an earlier lookup's hits when a later one finds nothing", also_on_0_30=False)
def test_an_mp_turn_whose_server_dies_while_it_waits_is_not_stored_before_it_is_computed(
    cls: Any, is_v2: bool, make_mp: MakeMp
) -> None:
    """It was looked up, and found something."""
    bench = make_mp(cls, is_v2, blocks=40, budget_tokens=64)
    tokens = waits_for_memory(bench)
    waiting = bench.send("c", tokens)
    for _ in range(20):
        bench.step()
    request = bench.scheduler.requests[waiting]
    assert request.status == RequestStatus.WAITING
    bench.lmcache.kill(60.0)
    bench.now_s += 15
    while request.status == RequestStatus.WAITING:
        bench.step()
    bench.now_s += 60  # it is back
    bench.run_until_idle()
    assert bench.lmcache.loads == 1  # b's


@cases("LMCache registers again after a ping that failed, and none did: LMCache/LMCache#4642")
def test_an_mp_server_that_was_started_again_between_two_pings_is_used_again(
    cls: Any, is_v2: bool, make_mp: MakeMp
) -> None:
    bench = make_mp(cls, is_v2)
    bench.turn("a", prompt(CHUNK))
    bench.lmcache.kill(0.0)
    bench.turn("b", prompt(CHUNK, 1))
    for story in range(2, 5):
        bench.now_s += 20
        bench.turn("c", prompt(CHUNK, story))
    assert bench.lmcache.chunks


# ---- LMCache's MP mode, and layers with windows


WINDOWS = pytest.mark.parametrize("window", [BLOCK, CHUNK, 3 * CHUNK])


@WINDOWS
@cases("LMCache stores windows that are not there where vLLM had the prompt's start")
def test_windows_that_vllm_has_given_back_are_not_stored(
    cls: Any, is_v2: bool, window: int, make_mp: MakeMp
) -> None:
    """Another program's prompt ends earlier, and attends to them."""
    bench = make_mp(cls, is_v2, spec=beside_windows(window))
    tokens = prompt(12 * CHUNK)
    bench.turn("a", tokens)
    bench.lmcache.evict(1)
    bench.turn("b", tokens + prompt(2 * CHUNK, 1))
    bench.scheduler.reset_prefix_cache()
    bench.turn("c", tokens[: 4 * CHUNK] + prompt(5, 2))


@WINDOWS
@cases("vLLM gives a window's blocks to others while LMCache reads them")
def test_a_windows_blocks_are_not_written_while_a_store_reads_them(
    cls: Any, is_v2: bool, window: int, make_mp: MakeMp
) -> None:
    bench = make_mp(cls, is_v2, blocks=70, budget_tokens=72, spec=beside_windows(window))
    bench.lmcache.lag, bench.step_seconds = 20, lambda _: 0.01  # while it is polled, it executes all
    for story in range(4):
        bench.send(f"p{story}", prompt(12 * CHUNK, story), 20)
    bench.run_until_idle()
    assert bench.lmcache.chunks


@WINDOWS
@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("is_v2", [False, True], ids=["V1", "V2"])
def test_a_turn_loads_all_of_a_prompt_with_windows(
    cls: Any, is_v2: bool, window: int, make_mp: MakeMp
) -> None:
    """Whatever steps computed it, and with its answer."""
    bench = make_mp(
        cls,
        is_v2,
        budget_tokens=72,
        spec=beside_windows(window),
        settings={"lmcache.mp.save_decode_cache": True},
    )
    tokens = bench.turn("a", prompt(9 * CHUNK + 5), out=2 * CHUNK)
    bench.scheduler.reset_prefix_cache()
    loading = bench.send("b", tokens)
    while not (found := bench.lmcache.loads):
        bench.step()
    assert found == 1 and bench.scheduler.requests[loading].num_computed_tokens == 11 * CHUNK
    bench.run_until_idle()


@WINDOWS
@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("is_v2", [False, True], ids=["V1", "V2"])
def test_a_failed_load_of_a_prompt_with_windows_is_computed(
    cls: Any, is_v2: bool, window: int, make_mp: MakeMp
) -> None:
    bench = make_mp(cls, is_v2, spec=beside_windows(window))
    tokens = prompt(9 * CHUNK + 5)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    bench.turn("b", tokens[: 2 * CHUNK])
    bench.lmcache.losing = 1
    bench.turn("c", tokens + prompt(40, 1), out=4)
    assert bench.lmcache.lost == 1 and bench.used_blocks == 0
