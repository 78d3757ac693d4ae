"""Which prompts are looked up, and leases of lookups that wait too long: renewed, released, or a failed
load; never wrong KV.

The server is the real one, in this process; the clock is ours, but for the server's own lock.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

from lmcache_mp_rig import Clock, MpRig, prompt
from lmcache_mp_server import CHUNK
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from waiting import wait_for

from connectors.kv_names import AdapterNames, WeightsVersion
from connectors.lmcache_mp.connector import ContinuumLMCacheMPConnector
from connectors.lmcache_mp.tier_mirror import MAX_AGE_S
from connectors.lmcache_mp.tracker import ReadLeases
from continuum_lmcache.reload.tier_store import Prefix, TierHit
from continuum_lmcache.types import Residency

Make = Callable[..., MpRig]
Waiting = tuple[MpRig, ContinuumLMCacheMPConnector, SimpleNamespace, Clock]


def look_up(connector: ContinuumLMCacheMPConnector, request: SimpleNamespace) -> int | None:
    """The answer that vLLM's scheduler gets when it polls."""
    found: list[int] = []

    def answered() -> bool:
        tokens, _ = connector.get_num_new_matched_tokens(request, 0)
        found.extend([] if tokens is None else [tokens])
        return bool(found)

    wait_for(answered)
    return found[0]


def waiting_request(
    rig: MpRig, token_ids: list[int], clock: Clock
) -> tuple[ContinuumLMCacheMPConnector, SimpleNamespace]:
    """A request with this prompt, and a connector's scheduler side, as vLLM would hold it."""
    connector = object.__new__(ContinuumLMCacheMPConnector)
    vars(connector).update(
        scheduler_adapter=rig.scheduler,
        request_trackers={},
        lazy_offload=False,
        _can_store=True,
        _reserve_last_token_for_lookup=False,
        _hit_alignment_tokens=CHUNK,
        _connector_stats=SimpleNamespace(record_lookup=lambda _: None),
        _tiers=rig.tiers,
        _poller=rig.follower,
        _version=WeightsVersion(),
        _adapters=AdapterNames(),
        _role=KVConnectorRole.SCHEDULER,
        _eager_prefetch=False,
        _loading=set(),
        _ended_while_loading=set(),
        _leases=ReadLeases(rig.scheduler, 300.0, clock),
    )
    request = SimpleNamespace(
        request_id="waits",
        all_token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_tokens=len(token_ids),
        num_computed_tokens=0,
        num_preemptions=0,
        cache_salt=None,
        status=None,
        sampling_params=None,
        mm_features=[],
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
        lora_request=None,
        block_hashes=[],
    )
    return connector, request


@pytest.fixture
def waiting(mp_rig: Make) -> Waiting:
    """A request whose prompt is in L1."""
    rig, clock, token_ids = mp_rig(), Clock(), prompt(1, 3)[:-1]
    rig.run(token_ids)
    rig.settle()
    return rig, *waiting_request(rig, token_ids, clock), clock


def locked(rig: MpRig) -> int:
    return sum(entry.read_lock.is_locked() for entry in rig.server.l1._objects.values())


def test_after_new_weights_a_waiting_turn_finds_nothing_and_what_it_had_found_is_unlocked(
    waiting: Waiting,
) -> None:
    rig, connector, request, _ = waiting
    assert look_up(connector, request) == 2 * CHUNK and locked(rig)
    assert connector.locate(Prefix(request.all_token_ids)).dram_tokens == 2 * CHUNK
    assert connector.reset_cache()
    assert connector.locate(Prefix(request.all_token_ids)) == TierHit(0, 0)
    assert look_up(connector, request) == 0
    wait_for(lambda: not locked(rig))
    connector.request_finished(request, [])


def renewals(connector: Any) -> list[str]:
    """The requests whose leases are released from here on."""
    given_back: list[str] = []
    stock = connector._leases.release

    def release(tracker: Any) -> None:
        given_back.append(tracker.request_id)
        stock(tracker)

    connector._leases.release = release
    return given_back


def test_a_young_lease_is_used_and_an_old_one_is_looked_up_afresh(waiting: Waiting) -> None:
    rig, connector, request, clock = waiting
    renewed = renewals(connector)
    assert look_up(connector, request) == 2 * CHUNK
    clock.now_s = 99.0
    assert connector.get_num_new_matched_tokens(request, 0) == (2 * CHUNK, True)
    assert not renewed and locked(rig) == 2
    clock.now_s = 101.0
    assert connector.get_num_new_matched_tokens(request, 0) == (None, True)
    assert look_up(connector, request) == 2 * CHUNK
    assert renewed == [request.request_id]
    connector.request_finished(request, [])


def test_an_eager_lookups_lease_is_as_old_as_the_request(waiting: Waiting) -> None:
    """lmcache.mp.eager_prefetch locks what it finds when the request arrives, which may queue for minutes."""
    rig, connector, request, clock = waiting
    renewed = renewals(connector)
    connector._eager_prefetch, request.resumable = True, False
    connector.on_new_request(request)
    wait_for(lambda: locked(rig) == 2)
    clock.now_s = 101.0
    assert look_up(connector, request) == 2 * CHUNK
    assert renewed == [request.request_id] and locked(rig) == 2
    connector.request_finished(request, [])


def test_a_fresh_lookup_that_finds_less_leaves_nothing_of_the_old_one(waiting: Waiting) -> None:
    """Otherwise LMCache counts the old hits as computed, and stores their blocks before they are."""
    rig, connector, request, clock = waiting
    assert look_up(connector, request) == 2 * CHUNK
    clock.now_s = 101.0
    connector.get_num_new_matched_tokens(request, 0)
    wait_for(lambda: not locked(rig))
    rig.server.forget(request.all_token_ids)
    assert look_up(connector, request) == 0
    tracker = connector.request_trackers["waits"]
    assert (tracker.num_lmcache_hit_tokens, tracker.num_stored_tokens) == (0, 0)
    connector.request_finished(request, [])


def test_a_request_that_ends_before_its_load_unlocks_what_was_found(waiting: Waiting) -> None:
    rig, connector, request, _ = waiting
    assert look_up(connector, request) == 2 * CHUNK and locked(rig) == 2
    connector.request_finished(request, [])
    wait_for(lambda: not locked(rig))


def test_a_request_that_ends_before_its_lookup_leaves_nothing_behind(waiting: Waiting) -> None:
    _, connector, request, _ = waiting
    assert connector.request_finished(request, []) == (True, None)
    assert connector.request_trackers == {} and connector.hit_at_lookup("waits") is None


def test_a_return_whose_answer_never_comes_holds_its_request_for_no_longer_than_a_message_may_take(
    waiting: Waiting,
) -> None:
    """The server was started again between two of LMCache's pings, and nothing shows that it was away."""
    rig, connector, request, clock = waiting
    assert look_up(connector, request) == 2 * CHUNK
    clock.now_s = 101.0
    connector.get_num_new_matched_tokens(request, 0)
    lost = SimpleNamespace(query=lambda: False)
    tracker = connector.request_trackers["waits"]
    tracker.returning = tracker.returning[0], [lost]
    for _ in range(3):
        assert connector.get_num_new_matched_tokens(request, 0) == (None, True)
    clock.now_s += rig.scheduler._mq_timeout + 1.0
    assert look_up(connector, request) == 2 * CHUNK
    assert tracker.returning is None
    connector.request_finished(request, [])


def has_asked(connector: Any) -> bool:
    """Whether a lookup was sent; its answer may be there at once or some calls later."""
    return bool(connector.scheduler_adapter._pending_lookups)


def test_a_turn_whose_kv_is_on_the_gpu_starts_without_a_lookup_and_stores_nothing_again(
    waiting: Waiting,
) -> None:
    rig, connector, request, _ = waiting
    assert connector.get_num_new_matched_tokens(request, 2 * CHUNK) == (0, False)
    assert not has_asked(connector) and not locked(rig)
    tracker = connector.request_trackers["waits"]
    assert (tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens) == (2 * CHUNK, 0)
    assert tracker.num_stored_tokens == 2 * CHUNK
    connector.request_finished(request, [])


def test_a_turn_that_loses_its_kv_on_the_gpu_while_it_waits_is_looked_up(waiting: Waiting) -> None:
    rig, connector, request, _ = waiting
    for _ in range(3):
        assert connector.get_num_new_matched_tokens(request, 2 * CHUNK) == (0, False)
    assert look_up(connector, request) == 2 * CHUNK and locked(rig) == 2
    tracker = connector.request_trackers["waits"]
    assert (tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens) == (0, 2 * CHUNK)
    connector.request_finished(request, [])
    wait_for(lambda: not locked(rig))


def test_a_turn_that_waits_sees_what_is_stored_meanwhile(waiting: Waiting) -> None:
    rig, connector, request, _ = waiting
    rig.forget(request.all_token_ids, CHUNK)
    assert connector.get_num_new_matched_tokens(request, CHUNK) == (0, False)
    rig.run(request.all_token_ids)
    rig.settle()
    connector.get_num_new_matched_tokens(request, CHUNK)
    assert has_asked(connector)
    wait_for(lambda: connector.get_num_new_matched_tokens(request, CHUNK) == (CHUNK, True))
    connector.request_finished(request, [])


@pytest.mark.parametrize(
    ("knows_all", "on_gpu", "is_asked"), [(False, 0, True), (False, 2, False), (True, 0, False)]
)
def test_what_others_store_in_l2_is_found_unless_the_gpu_has_half_of_the_prompt(
    waiting: Waiting, knows_all: bool, on_gpu: int, is_asked: bool
) -> None:
    rig, connector, request, _ = waiting
    rig.forget(request.all_token_ids)
    assert rig.follower.knows_all, "its disk is its own"
    rig.follower.knows_all = knows_all
    connector.get_num_new_matched_tokens(request, on_gpu * CHUNK)
    assert has_asked(connector) == is_asked
    if is_asked:
        assert look_up(connector, request) == 0
    connector.request_finished(request, [])


def test_a_server_that_does_not_report_its_tiers_is_asked_for_every_prompt(waiting: Waiting) -> None:
    rig, connector, request, _ = waiting
    rig.follower._clock.now_s += 2 * MAX_AGE_S
    connector.get_num_new_matched_tokens(request, 2 * CHUNK)
    assert has_asked(connector)
    wait_for(lambda: connector.get_num_new_matched_tokens(request, 2 * CHUNK) == (0, False))
    connector.request_finished(request, [])


def test_a_preempted_turn_is_counted_anew(waiting: Waiting) -> None:
    _, connector, request, _ = waiting
    assert connector.get_num_new_matched_tokens(request, 2 * CHUNK) == (0, False)
    del connector.request_trackers["waits"]  # as LMCache does when it returns
    assert connector.get_num_new_matched_tokens(request, 2 * CHUNK) == (0, False)
    tracker = connector.request_trackers["waits"]
    assert (tracker.num_vllm_hit_tokens, tracker.num_stored_tokens) == (2 * CHUNK, 2 * CHUNK)
    connector.request_finished(request, [])


def test_a_load_that_would_be_slower_than_computing_is_not_looked_up(waiting: Waiting) -> None:
    rig, connector, request, _ = waiting
    asked: list[Residency] = []
    connector.set_load_selector(lambda _, where: asked.append(where) or 0)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert asked == [Residency(0, 2 * CHUNK, 0, request.num_tokens)]
    assert not has_asked(connector) and not locked(rig)
    assert connector.request_trackers["waits"].num_lmcache_hit_tokens == 0, "they are not computed"
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False), "and not priced at every step"
    assert len(asked) == 1
    connector.request_finished(request, [])


def test_where_only_drams_part_pays_the_disks_is_not_read(mp_rig: Make) -> None:
    rig, token_ids = mp_rig(3, 12), prompt(1, 4)[:-1]
    rig.run(token_ids)
    rig.settle()
    rig.run(prompt(2, 1))
    rig.settle()
    connector, request = waiting_request(rig, token_ids, Clock())
    asked: list[Residency] = []
    connector.set_load_selector(lambda _, where: asked.append(where) or where.dram_tokens)
    assert look_up(connector, request) == 2 * CHUNK
    assert asked == [Residency(0, 2 * CHUNK, CHUNK, request.num_tokens)]
    rig.follower.poll()
    assert rig.locate(token_ids) == TierHit(2 * CHUNK, CHUNK), "the third chunk is on the disk alone"
    connector.request_finished(request, [])


def test_what_a_lookup_finds_beyond_the_mirror_is_declined_and_unlocked_where_computing_is_faster(
    waiting: Waiting,
) -> None:
    rig, connector, request, _ = waiting
    asked: list[Residency] = []
    connector.set_load_selector(lambda _, where: asked.append(where) or 0)
    rig.follower._clock.now_s += 2 * MAX_AGE_S
    assert look_up(connector, request) == 0
    assert asked == [Residency(0, 2 * CHUNK, 0, request.num_tokens)]
    wait_for(lambda: not locked(rig))
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.request_finished(request, [])


def test_a_lease_that_ended_gives_a_failed_load_and_never_another_prompts_kv(mp_rig: Make) -> None:
    rig = mp_rig(4, 8, "--l1-read-ttl-seconds", "1")
    first, second = prompt(1, 2), prompt(2, 2)
    rig.store("a", first, 0)
    rig.settle()
    assert rig.lookup("b", first) == 2 * CHUNK
    wait_for(lambda: not locked(rig))
    assert rig.load("b", first, 2 * CHUNK) == 0  # still there, but not locked
    assert rig.lookup("c", first) == 2 * CHUNK
    wait_for(lambda: not locked(rig))
    rig.server.forget(first)
    rig.store("d", second, 0)  # into the memory that is free now
    assert rig.load("c", first, 2 * CHUNK) == 0
    for request_id in "bc":
        rig.scheduler.end_session(request_id)


def test_a_load_longer_than_a_third_of_the_lease_is_not_trusted(mp_rig: Make) -> None:
    rig, clock = mp_rig(), Clock()
    rig.run(prompt(1, 2))
    rig.worker._clock = clock
    stock = rig.worker._retrieve

    def slow(*args: object, **kwargs: object) -> None:
        stock(*args, **kwargs)
        clock.now_s += 101.0

    rig.worker._retrieve = slow
    assert rig.load("slow", prompt(1, 2), rig.lookup("slow", prompt(1, 2))) == 0
    assert rig.worker.report() is None
    rig.scheduler.end_session("slow")
