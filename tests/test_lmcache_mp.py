"""The connector's parts against the real MP server in this process (lmcache_mp_rig.py), and by themselves."""

from __future__ import annotations

import json
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

import grpc
import msgspec
import torch
from contract.test_tier_store import Programs
from hypothesis import given
from hypothesis import strategies as st
from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename
from lmcache.v1.distributed.storage_controllers.utils import L2AdapterDescriptor
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallResponse
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache_mp_rig import Clock, MpEngine, MpRig, op, prompt
from lmcache_mp_server import CHUNK, MODEL, PAGE, MpServer, patient
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from waiting import wait_for

from connectors.lmcache_mp import connector, startup, tier_mirror
from connectors.lmcache_mp.connector import ContinuumLMCacheMPConnector
from connectors.lmcache_mp.load_join import LoadLookupJoin
from connectors.lmcache_mp.server import module
from connectors.lmcache_mp.server.deadline import with_deadline
from connectors.lmcache_mp.server.module import TierChangeLog, stored_before
from connectors.lmcache_mp.settings import with_defaults
from connectors.lmcache_mp.startup import caller
from connectors.lmcache_mp.tier_mirror import (
    MAX_AGE_S,
    MpTierMirror,
    MpTiers,
    TierPoller,
)
from connectors.lmcache_mp.tracker import Window
from connectors.lmcache_mp.wire import ChangesReply, ChangesRequest, LookupResult, NumberedChange
from continuum_lmcache import __version__
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import kv_bytes_per_token
from continuum_lmcache.reload.tier_store import KVTransfer, TierHit
from continuum_lmcache.types import Tier

Make = Callable[..., MpRig]


# ---- residency


class Unread(list[int]):
    """Tokens that nobody may look at."""

    def __getitem__(self, at: Any) -> Any:
        raise AssertionError("each chunk's tokens are read again")


def test_a_prompt_that_was_located_once_is_located_by_vllms_block_hashes_alone() -> None:
    poller = TierPoller(lambda *_: msgspec.msgpack.encode(ANSWER), ChangesRequest("m", 1))
    tiers = MpTiers(poller, TokenHasher(CHUNK, "blake3"), bytes_per_token=8, block_tokens=CHUNK // 2)
    tokens, hashes = prompt(1, 3), [b"%d" % block for block in range(6)]
    names = list(tiers._names(tokens, "", ()))
    poller.mirror._stored[0].update(names[:2])
    assert tiers.locate(tokens, "", hashes) == TierHit(2 * CHUNK, 0)
    assert tiers.locate(Unread(tokens), "", hashes) == TierHit(2 * CHUNK, 0)
    assert tiers.locate(tokens, "other weights", hashes) == TierHit(0, 0)


def test_what_an_earlier_server_left_in_l2_is_known_at_the_start(tmp_path: Path) -> None:
    """So a prompt that nobody stored is not looked up: L2 answers that after the writes in its queue."""
    directory = tmp_path / "kept"
    first = MpRig(directory, 16, 64)
    first.run(prompt(1, 3))
    first.settle()
    first.close()
    (directory / "notes.txt").touch()  # no file of LMCache's
    rig = MpRig(directory, 16, 64)
    assert rig.follower.knows_all
    assert rig.locate(prompt(1, 3)) == TierHit(0, 3 * CHUNK)
    assert rig.locate(prompt(2, 3)) == TierHit(0, 0)
    assert rig.run(prompt(1, 3)) == TierHit(0, 3 * CHUNK)
    rig.close()


def test_l2_is_asked_only_for_what_it_has_and_l1_lacks(mp_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache asks it for every key, and it answers after the writes in its queue."""
    rig, asked = mp_rig(), []
    adapter = rig.server._adapter
    ask = adapter.submit_lookup_and_lock_task
    monkeypatch.setattr(
        adapter,
        "submit_lookup_and_lock_task",
        lambda keys, *more: asked.append(len(keys)) or ask(keys, *more),
    )
    rig.run(prompt(1, 2))
    rig.settle()
    assert rig.run(prompt(1, 3)) == TierHit(2 * CHUNK, 0)  # its end is nowhere
    rig.settle()
    assert rig.run(prompt(1, 3)) == TierHit(3 * CHUNK, 0)
    assert asked == []
    rig.settle()
    rig.server.storage.delete_l1_keys(rig.server.held()[0])
    assert rig.run(prompt(1, 3)) == TierHit(0, 3 * CHUNK)
    assert asked == [3]
    monkeypatch.setattr(module.MpTierModule, "_knows_all", lambda _: False)  # others store there too
    rig.settle()
    assert rig.run(prompt(1, 3)) == TierHit(3 * CHUNK, 0)
    assert asked == [3, 3]


def test_of_an_l2_that_others_may_write_nothing_is_known_at_the_start(tmp_path: Path) -> None:
    def known(kind: str, **given: object) -> dict[ObjectKey, Path] | None:
        arguments = Namespace(l2_adapter=[json.dumps({"type": kind, **given})])
        (config,) = parse_args_to_l2_adapters_config(arguments).adapters
        return stored_before(L2AdapterDescriptor(0, config))

    key = ObjectKey(b"hash", MODEL, ObjectKey.ComputeKVRank(1, 0, 1, 0))
    (file := tmp_path / _object_key_to_filename(key)).touch()
    place = {"base_path": str(tmp_path)}
    assert known("fs_native", **place) == known("fs", **place) == {key: file}
    assert known("fs_native", **place, shared=True) is None
    assert known("fs", base_path=str(tmp_path / "gone")) is None
    assert known("mock", max_size_gb=1, mock_bandwidth_gb=1) is None


def test_what_the_server_has_not_reported_yet_counts_as_not_there(mp_rig: Make) -> None:
    rig = mp_rig()
    rig.store("r", prompt(1, 2), 0)
    assert rig.locate(prompt(1, 2)) == TierHit(0, 0)
    rig.settle()
    assert rig.locate(prompt(1, 2)) == TierHit(2 * CHUNK, 0)


def test_tenants_with_other_salts_find_nothing_of_each_others(mp_rig: Make) -> None:
    rig = mp_rig()
    rig.run(prompt(1, 2))
    rig.settle()
    assert rig.tiers.locate(prompt(1, 2), "another") == TierHit(0, 0)


def test_two_engines_on_one_server_load_right_kv_and_what_was_located_while_it_evicts(mp_rig: Make) -> None:
    """200 turns in two threads. Without an eviction meanwhile, a lookup finds what was located."""
    rig = mp_rig(12, 20)
    engines, unchanged, done = [rig, MpEngine(rig.server)], [], threading.Event()

    def turns(engine: MpEngine, seed: int) -> None:
        programs = Programs(CHUNK, seed)
        for turn in range(100):
            token_ids, request_id = programs.next_turn(), f"{seed}-{turn}"
            engine.follower.poll()
            before = engine.locate(token_ids)
            hit_tokens = engine.lookup(request_id, token_ids)
            engine.follower.poll()
            after = engine.locate(token_ids)
            if total(before) == total(after):
                assert hit_tokens == total(before)
                unchanged.append(hit_tokens)
            assert engine.load(request_id, token_ids, hit_tokens) == hit_tokens
            engine.store(request_id, token_ids, hit_tokens)

    def evict() -> None:
        while not done.wait(0.005):
            rig.server.evict()

    evictor = threading.Thread(target=evict)
    evictor.start()
    errors = in_threads(*(lambda e=e, s=s: turns(e, s) for s, e in enumerate(engines)))
    done.set()
    evictor.join()
    assert errors == []
    assert len(unchanged) > 150 and sum(hit > 0 for hit in unchanged) > 40
    engines[1].check()
    engines[1].close()


def total(held: TierHit) -> int:
    return held.dram_tokens + held.ssd_tokens


def in_threads(*works: Callable[[], None]) -> list[Exception]:
    """Run all at once; what they raised."""
    errors: list[Exception] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except (AssertionError, OSError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@given(st.data())
def test_a_mirror_that_asks_now_and_then_holds_what_lies_whole_in_each_tier(data: st.DataObject) -> None:
    """Pieces of two ranks come and go; the server's log of changes is cut, and the server restarts."""
    registry = SimpleNamespace(find_attn_desc=lambda *_: SimpleNamespace(num_object_groups=1))
    log, mirror = TierChangeLog(registry, max_changes=5), MpTierMirror()
    pieces: set[tuple[bool, int, int]] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        ssd, chunk, rank = data.draw(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 1)))
        key = ObjectKey(bytes([chunk]), "m", ObjectKey.ComputeKVRank(2, rank, 2, rank))
        what = data.draw(st.sampled_from(["admit", "drop", "ask", "restart"]))
        if what == "admit":
            log.admit(ssd, [key])
            pieces.add((ssd, chunk, rank))
        elif what == "drop":
            log.drop(ssd, [key])
            pieces.discard((ssd, chunk, rank))
        elif what == "restart":
            log, pieces = TierChangeLog(registry, max_changes=5), set()
        mirror.apply_report(reply_to(log, mirror)) if what in ("ask", "restart") else None
    mirror.apply_report(reply_to(log, mirror))
    for ssd in (False, True):
        whole = {bytes([c]) for c in range(4) if {(ssd, c, 0), (ssd, c, 1)} <= pieces}
        assert mirror._stored[ssd] == whole


def reply_to(log: TierChangeLog, mirror: MpTierMirror) -> ChangesReply:
    """The module's answer to a mirror."""
    known = mirror.epoch == log.epoch and log.has_all_after(mirror.number)
    changes = log.since(("m", 2), mirror.number) if known else log.snapshot(("m", 2))
    return msgspec.structs.replace(
        ANSWER, epoch=log.epoch, number=log.number, is_snapshot=not known, changes=changes
    )


def test_a_silent_server_gets_one_warning_and_its_tiers_count_as_empty(
    mp_rig: Make, logged: Callable[..., list[str]]
) -> None:
    rig, clock, downs, warnings = mp_rig(), Clock(), [], logged(tier_mirror)
    answers = True

    def call(payload: bytes, timeout_s: float) -> bytes:
        if not answers:
            raise TimeoutError("no answer")
        return rig.follower._call(payload, timeout_s)

    follower = TierPoller(call, ChangesRequest("m", 1), lambda: downs.append(1), clock)
    tiers = MpTiers(follower, rig.tiers._hasher, rig.bytes_per_token)
    rig.run(prompt(1, 2))
    follower.try_poll()
    assert tiers.locate(prompt(1, 2), "") == TierHit(2 * CHUNK, 0)
    answers = False
    for _ in range(3):
        clock.now_s += MAX_AGE_S
        follower.try_poll()
    assert (follower.is_up, tiers.locate(prompt(1, 2), ""), downs) == (False, TierHit(0, 0), [1])
    assert len(warnings) == 1 and "not answer" in warnings[0]
    answers = True
    follower.try_poll()
    assert follower.is_up and not follower.is_fresh, "it may answer the first request, sent long ago"
    follower.try_poll()
    assert tiers.locate(prompt(1, 2), "") == TierHit(2 * CHUNK, 0)


def answering(response: object) -> MessagingFuture:
    future: MessagingFuture = MessagingFuture()
    future.set_exception(response) if isinstance(response, Exception) else future.set_result(response)
    return future


@pytest.mark.parametrize(
    "bad",
    [
        ServerModuleCallResponse(True, b"\x80", ""),
        ServerModuleCallResponse(True, b"not MessagePack", ""),
        ServerModuleCallResponse(False, b"", "no such method"),
        ValueError("Response operation 'ping' does not match request 'server_module_call'"),
        grpc.RpcError("unavailable"),
        None,
    ],
    ids=["another release", "no MessagePack", "refused", "another reply", "gRPC", "no reply"],
)
def test_a_bad_answer_counts_as_silence_and_the_follower_goes_on(
    mp_rig: Make, logged: Callable[..., list[str]], bad: object
) -> None:
    rig, downs, warnings = mp_rig(), [], logged(tier_mirror)
    answers, given = ["right"], []
    (client,) = rig.scheduler.req_clients.values()

    def ask(request: object) -> MessagingFuture:
        given.append(answers[-1])
        return client.server_module_call(request) if given[-1] == "right" else answering(bad)

    call = patient(caller(SimpleNamespace(server_module_call=ask)))
    follower = TierPoller(call, ChangesRequest("m", 1), lambda: downs.append(1))
    follower.poll()
    follower.start()
    answers.append("bad")
    wait_for(lambda: not follower.is_up)
    heard_s, already = follower._answered_s, len(given)
    wait_for(lambda: len(given) >= already + 3)
    assert follower._thread.is_alive() and follower._answered_s == heard_s
    assert downs == [1] and len(warnings) == 1 and "not answer" in warnings[0]
    answers.append("right")
    wait_for(lambda: follower.is_up)
    follower.close()


# ---- a dead server


Moves = dict[str, MessagingFuture]


def never_answered(rig: MpEngine) -> Moves:
    """Loads and stores as the server does them on a GPU: asked for, and done some time later, or never."""
    moves: Moves = {}

    def submit(request_id: str, *_: object, **__: object) -> MessagingFuture:
        return moves.setdefault(request_id, MessagingFuture())

    rig.adapter.transfer_ctx.submit_retrieve = rig.adapter.transfer_ctx.submit_store = submit
    return moves


def ended(rig: MpEngine, *finished: str) -> tuple[set[str], set[str], set[int]]:
    """The worker's report at a step's end: stored, loaded, and blocks whose load failed."""
    rig.worker.poll()
    with rig.worker.without_giving_up():
        stored, loaded = rig.adapter.get_finished(set(finished))
    return stored, loaded, rig.adapter.get_block_ids_with_load_errors()


def load_and_store(rig: MpEngine) -> Moves:
    moves = never_answered(rig)
    rig.worker._clock = Clock()
    rig.adapter.submit_retrieve_request("load", op(prompt(1, 2), 0, 2 * CHUNK), None)
    rig.adapter.submit_store_request("store", op(prompt(2, 2), 0, 2 * CHUNK), None)
    return moves


def test_moves_of_a_silent_server_keep_their_blocks_until_it_may_not_touch_them(mp_rig: Make) -> None:
    rig = mp_rig()
    load_and_store(rig)
    rig.worker.mark_server_down()
    assert ended(rig, "store") == (set(), set(), set())
    rig.worker._clock.now_s = rig.adapter._mq_timeout - 1
    assert ended(rig) == (set(), set(), set()) and not rig.adapter.is_healthy
    rig.worker._clock.now_s += 2
    assert ended(rig) == ({"store"}, {"load"}, {0, 1})
    assert ended(rig) == (set(), set(), set())


def test_a_load_that_a_silent_server_finishes_has_come(mp_rig: Make) -> None:
    rig = mp_rig()
    moves = load_and_store(rig)
    rig.worker.mark_server_down()
    assert ended(rig, "store") == (set(), set(), set())
    for future in moves.values():
        future.set_result(True)
    assert ended(rig) == ({"store"}, {"load"}, set())


def test_a_slow_load_that_was_reported_between_two_checks_is_not_reported_again(mp_rig: Make) -> None:
    rig = mp_rig()
    moves = load_and_store(rig)
    rig.worker._clock.now_s = 2 * rig.worker._longest_load_s
    for future in moves.values():
        future.set_result(True)
    assert rig.adapter.get_finished({"store"}) == ({"store"}, {"load"})  # the worker looked just before
    assert ended(rig) == (set(), set(), set())


def test_a_load_asked_of_a_server_known_to_be_down_fails_at_once(mp_rig: Make) -> None:
    rig = mp_rig()
    never_answered(rig)
    rig.worker.mark_server_down()
    rig.adapter.submit_retrieve_request("load", op(prompt(1, 2), 0, 2 * CHUNK), None)
    assert ended(rig) == (set(), {"load"}, {0, 1})


def test_moves_of_a_server_whose_connection_is_closed_fail_at_once_and_so_do_those_after_until_a_ping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    rig = MpEngine(MpServer(tmp_path, 16, 64))
    load_and_store(rig)
    rig.server.close()
    wait_for(rig.worker._connection_lost.is_set)
    assert ended(rig, "store") == ({"store"}, {"load"}, {0, 1})
    rig.worker.connection_closed()  # and a server is back before the next step, which does not know us
    rig.adapter.submit_retrieve_request("later", op(prompt(1, 2), 0, 2 * CHUNK), None)
    assert ended(rig) == (set(), {"later"}, {0, 1}) and not rig.adapter.is_healthy
    rig.adapter._mq_timeout = 0.1  # its unregister request gets no answer
    rig.close()


def test_a_preemption_waits_for_the_stores_under_way(mp_rig: Make) -> None:
    rig = mp_rig()
    moves = load_and_store(rig)
    ending = threading.Timer(0.05, moves["store"].set_result, [True])
    ending.start()
    rig.worker.await_stores()
    assert moves["store"].query() and rig.adapter.is_healthy
    moves["load"].set_result(True)
    assert ended(rig, "store") == ({"store"}, {"load"}, set())


def test_a_preemption_waits_once_for_a_silent_server_and_not_at_all_for_one_that_is_gone(
    mp_rig: Make,
) -> None:
    rig = mp_rig()
    load_and_store(rig)
    rig.worker.connection_closed()
    rig.worker.await_stores()
    assert not rig.adapter.is_healthy and rig.worker._clock.now_s == 0.0
    assert ended(rig, "store") == ({"store"}, {"load"}, {0, 1})
    rig.adapter._health_event.set()
    times_s = iter(range(10**6))
    rig.worker._clock = lambda: float(next(times_s))
    for request_id in "ab":
        rig.adapter.submit_store_request(request_id, op(prompt(2, 2), 0, 2 * CHUNK), None)
    asked_s = next(times_s)
    rig.worker.await_stores()
    assert not rig.adapter.is_healthy
    assert next(times_s) - asked_s < 1.5 * rig.adapter._mq_timeout, "both stores together"
    rig.worker.connection_closed()
    assert ended(rig, "a", "b") == ({"a", "b"}, set(), set())


def test_a_worker_that_stood_still_until_the_server_dropped_it_loses_a_store_and_is_used_again(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = mp_rig()
    rig.worker.is_patient = False
    monkeypatch.setattr("connectors.lmcache_mp.worker.STALL_S", 0.05)
    rig.server.drop_workers()
    rig.adapter.submit_store_request("r", op(prompt(1, 2), 0, 2 * CHUNK), None)
    assert not rig.adapter.is_healthy
    assert rig.adapter.get_finished({"r"})[0] == {"r"}
    rig.scheduler.end_session("r")
    rig.worker.is_patient = True
    ping = adapters.HeartbeatThread(
        rig.adapter.req_client, rig.adapter._health_event, 10, rig.adapter.instance_id
    )
    ping.register_recover_callback(rig.adapter._reregister_kv_caches_callback)
    ping._execute()
    assert rig.adapter.is_healthy, "a heartbeat has registered it again"
    rig.run(prompt(1, 2))
    rig.settle()
    assert len(rig.server.held()[0]) == 2


def test_the_server_leaves_out_a_store_that_comes_too_late(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks may belong to another request then."""
    rig = mp_rig()
    monkeypatch.setattr("connectors.lmcache_mp.worker.STALL_S", 0.5)
    for left_s, stored in ((0, 0), (3600, 2)):
        rig.adapter._health_event.set()
        rig.worker.is_patient = left_s > 0  # the late one gets no answer
        end_s = time.monotonic() + left_s
        move, configs = op(prompt(1, 2), 0, 2 * CHUNK), with_deadline({"other": "thing"}, end_s)
        rig.adapter.submit_store_request("r", move, None, request_configs=configs)
        rig.scheduler.end_session("r")
        rig.settle()
        assert len(rig.server.held()[0]) == stored


# ---- load times


def test_a_load_is_reported_by_tier_when_both_sides_have_reported_it() -> None:
    load = KVTransfer(Tier.DRAM, 400, 4000, 0.4, "r")
    lookup = LookupResult(1, "r", 300, 0.9)
    expected = [
        KVTransfer(Tier.DRAM, 100, 1000, 0.1, "r"),
        KVTransfer(Tier.SSD, 300, 3000, 1.2, "r"),
    ]
    for loads, lookups in ([load], []), ([], [lookup]):
        book = LoadLookupJoin()
        assert book.join(loads, lookups) == []
        moved = book.join([load][len(loads) :], [lookup][len(lookups) :])
        assert [replace(t, duration_s=0) for t in moved] == [replace(t, duration_s=0) for t in expected]
        assert [t.duration_s for t in moved] == pytest.approx([t.duration_s for t in expected])
        assert book.join([], []) == []


def test_the_time_until_l2_reads_counts_as_the_disks_too(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question what it has stands in one queue with its writes."""
    rig, wait_s = mp_rig(2, 12), 0.2
    adapter = rig.server._adapter
    load = adapter.submit_load_task
    monkeypatch.setattr(adapter, "submit_load_task", lambda *given: time.sleep(wait_s) or load(*given))
    for program in (1, 2):
        rig.run(prompt(program, 2))
        rig.settle()
    rig.transfers()
    assert rig.run(prompt(1, 2)) == TierHit(0, 2 * CHUNK)
    (read,) = rig.transfers()
    assert read.duration_s > wait_s


def test_capacities_are_what_the_server_holds_before_it_evicts(mp_rig: Make) -> None:
    """LMCache's own loops evict above the watermark, once a second; a tier is never full for longer."""
    rig = mp_rig(8, 4, watermark=0.5)
    chunk_bytes = {Tier.DRAM: PAGE, Tier.SSD: CHUNK * rig.bytes_per_token}  # that the server counts
    capacity = {
        tier: tokens * rig.bytes_per_token // chunk_bytes[tier]
        for tier, tokens in rig.tiers.capacity_tokens().items()
    }
    assert capacity == {Tier.DRAM: (8 + 32) // 2, Tier.SSD: 4 * PAGE // chunk_bytes[Tier.SSD]}
    for program in range(16):
        rig.run(prompt(program, 2))

    def held() -> dict[Tier, int]:
        return dict(zip((Tier.DRAM, Tier.SSD), map(len, rig.server.held()), strict=True))

    assert max(held().values()) > max(capacity.values())
    wait_for(lambda: all(held()[tier] <= capacity[tier] for tier in capacity))
    assert all(held()[tier] > capacity[tier] / 2 for tier in capacity)


def test_an_l1_that_still_grows_counts_as_what_it_will_be(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --l1-use-lazy, LMCache's default where memory can be pinned, it starts with 20 GB."""
    rig = mp_rig()
    grown, (used, total) = rig.tiers.capacity_tokens(), rig.server.storage.get_l1_usage()
    monkeypatch.setattr(rig.server.l1._memory_manager, "get_memory_usage", lambda: (used, total // 4))
    assert rig.server.storage.get_l1_usage() == (used, total // 4)
    rig.follower.poll()
    assert rig.tiers.capacity_tokens() == grown


def test_a_server_that_was_started_again_with_other_tiers_has_their_sizes() -> None:
    sizes = [(800, 3200), (1600, None), (1600, 800)]
    replies = [msgspec.structs.replace(ANSWER, dram_bytes=dram, ssd_bytes=ssd) for dram, ssd in sizes]
    poller = TierPoller(lambda *_: msgspec.msgpack.encode(replies.pop(0)), ChangesRequest("m", 1))
    tiers = MpTiers(poller, TokenHasher(CHUNK, "blake3"), bytes_per_token=8)
    found = []
    for _ in sizes:
        poller.poll()
        found.append(tiers.capacity_tokens())
    assert found == [{Tier.DRAM: 100, Tier.SSD: 400}, {Tier.DRAM: 200}, {Tier.DRAM: 200, Tier.SSD: 100}]


def test_l2_counts_only_where_l1_keeps_room_for_the_longest_prompt() -> None:
    """LMCache evicts nothing for what it reads from L2, so such a load fails."""
    sizes = {"dram_bytes": 800, "ssd_bytes": 3200}
    replies = [msgspec.structs.replace(ANSWER, dram_spare_bytes=spare, **sizes) for spare in (399, 400)]
    poller = TierPoller(lambda *_: msgspec.msgpack.encode(replies.pop(0)), ChangesRequest("m", 1))
    tiers = MpTiers(poller, TokenHasher(CHUNK, "blake3"), bytes_per_token=8, longest_prompt_tokens=50)
    poller.poll()
    assert tiers.capacity_tokens() == {Tier.DRAM: 100}
    poller.poll()
    assert tiers.capacity_tokens() == {Tier.DRAM: 100, Tier.SSD: 400}


def test_engines_on_one_server_count_each_on_an_equal_part_of_its_tiers(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = mp_rig()
    alone = rig.tiers.capacity_tokens()
    other = MpEngine(rig.server)
    for engine in (rig, other):
        engine.follower.poll()
        assert engine.tiers.capacity_tokens() == {tier: tokens // 2 for tier, tokens in alone.items()}
    (client,) = other.scheduler.req_clients.values()
    TierPoller(patient(caller(client)), ChangesRequest(MODEL, 1)).poll()  # as a worker does at its start
    rig.follower.poll()
    assert rig.follower.schedulers == 2
    other.close()
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    rig.follower.poll()
    assert rig.tiers.capacity_tokens() == alone


# ---- settings


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"lmcache.mp.prot": 5555}, "did you mean lmcache.mp.port?"),
        ({"lmcache.max_local_cpu_size": 5.0}, "has no effect on an LMCache server"),
        ({"lmcache.mp.lazy_offload": True}, "both decide what stays"),
        ({"lmcache.mp.server_urls": "tcp://a:1,tcp://b:1"}, "several servers"),
        ({"use_native": True}, "unknown key use_native"),
    ],
)
def test_settings_that_would_be_ignored_or_fail_are_refused(extra: dict, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_defaults(extra)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_defaults_fill_what_the_user_left_open() -> None:
    extra, ours = with_defaults(
        {"lmcache.mp.port": 1, "lmcache.mp.save_decode_cache": False, "continuum.policy": "fcfs"}
    )
    assert extra["lmcache.mp.save_decode_cache"] is False and "save_decode_cache" not in ours
    assert ours.keys() == {"heartbeat_interval", "mq_timeout"}
    assert with_defaults(extra) == (extra, {})


VMM = {"lmcache.mp.use_vmm_api": True}


@pytest.mark.parametrize(
    ("embeds", "sleeps", "extra", "reason"),
    [
        (False, True, VMM, "drop --enable-sleep-mode or lmcache.mp.use_vmm_api"),
        (False, True, {}, ""),
        (False, False, VMM, ""),
        (True, False, {}, "does not tell prompt embeddings apart.*drop --enable-prompt-embeds"),
    ],
)
def test_an_engine_is_refused_whose_memory_moves_or_whose_kv_depends_on_more_than_tokens(
    embeds: bool, sleeps: bool, extra: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleeps, enable_prompt_embeds=embeds),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
    )
    for name in ("translate", "check_layers"):
        monkeypatch.setattr(connector, name, lambda *_: None)
    with pytest.raises(ConfigError, match=reason) if reason else nullcontext():
        ContinuumLMCacheMPConnector.check_settings(config)


WINDOWS = "layers with a window"


@pytest.mark.parametrize(
    ("model", "place", "is_merged", "refused", "warned"),
    [
        ("gpt-oss-120b", "cpu", False, WINDOWS, ""),
        ("gpt-oss-120b", "cpu", True, "", ""),  # vLLM keeps windows like full attention
        ("gpt-oss-120b", "cpu whose server copies", False, "", WINDOWS),
        ("gpt-oss-120b", "gpu", False, "", WINDOWS),
        ("qwen3-next-80b-a3b", "cpu", False, "layers with a state", ""),
        ("qwen3-next-80b-a3b", "cpu whose server copies", False, "layers with a state", ""),
        ("deepseek-v3.2", "gpu", False, "", "latent attention"),
        ("llama-3.3-70b", "cpu", False, "", ""),
        ("llama-3.3-70b", "gpu", False, "", ""),
    ],
)
def test_layers_that_lmcache_refuses_are_refused_before_the_model_is_loaded(
    model: str,
    place: str,
    is_merged: bool,
    refused: str,
    warned: str,
    monkeypatch: pytest.MonkeyPatch,
    logged: Callable[..., list[str]],
) -> None:
    said = logged(startup)
    monkeypatch.setattr(type(startup.current_platform), "is_cpu", lambda _: place != "gpu")
    found = json.loads((Path(__file__).parent / "configs" / f"{model}.json").read_text())
    extra = {startup.MP_TRANSFER_MODE: "lmcache_driven"} if "server" in place else {}
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=is_merged),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: found)),
    )
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        startup.check_layers(config, log=True)
    assert len(said) == bool(warned) and all(warned in line for line in said)


def test_windows_are_those_of_which_vllm_gives_back_blocks_and_other_layers_that_do_are_refused() -> None:
    head: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    window = SlidingWindowSpec(**head, sliding_window=128)
    kept_whole = FullAttentionSpec(**head, sliding_window=128)  # where all layers are kept alike
    local = ChunkedLocalAttentionSpec(**head, attention_chunk_size=8192)

    def found(*specs: Any) -> set[Window]:
        groups = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
        return startup.windows_of(KVCacheConfig(9, [], groups))

    assert found(kept_whole) == set()
    assert found(kept_whole, window, window) == {Window(128, 16)}
    with pytest.raises(ConfigError, match="ChunkedLocalAttentionSpec; leave the KV connector out"):
        found(kept_whole, local)


def test_kv_bytes_are_those_that_vllm_keeps_for_each_layer():
    """DeepSeek V3.2: 656 bytes a token of `fp8_ds_mla`, not 576 values of a byte, and 132 of its indexer."""
    main = {"block_size": 64, "num_kv_heads": 1, "dtype": torch.uint8}
    mla = MLAAttentionSpec(**main, head_size=576, state_content_bytes=656, cache_dtype_str="fp8_ds_mla")
    indexer = MLAAttentionSpec(**main, head_size=132)
    one = KVCacheGroupSpec(["a", "b"], mla)
    assert kv_bytes_per_token(KVCacheConfig(9, [], [one])) == 2 * 656
    both = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"a": mla, "a.indexer": indexer})
    config = KVCacheConfig(9, [], [KVCacheGroupSpec(["a", "a.indexer"], both)])
    assert kv_bytes_per_token(config) == 656 + 132
    sizes = {"a": 64 * 656, "a.indexer": 64 * 132}
    pages = [KVCacheTensor(9 * n, [name], 9 * n, n) for name, n in sizes.items()]
    config = KVCacheConfig(9, pages, [KVCacheGroupSpec(["a", "a.indexer"], mla)])  # a scheduler's
    assert kv_bytes_per_token(config) == 656 + 132


ANSWER = ChangesReply("e", 0, True, [], [], 1, None, 1, 300.0, "blake3", 0.0, "", "", 1, knows_all=False)


@pytest.mark.parametrize(
    "lie",
    [
        {"schedulers": 0},
        {"schedulers": -1},
        {"number": -1},
        {"dram_bytes": -1},
        {"ssd_bytes": -1},
        {"dram_spare_bytes": -1},
        {"read_lease_s": float("nan")},
        {"read_lease_s": -1.0},
        {"clock_s": float("inf")},
        {"damaged_chunks": -1},
        {"failed_stores": -1},
        {"changes": [NumberedChange(1, False, True, b"")]},
        {"changes": [NumberedChange(1, False, True, bytes(2**20))]},
        {"lookups": [LookupResult(1, "r", -1, 0.0)]},
        {"lookups": [LookupResult(1, "r", 1, float("nan"))]},
    ],
    ids=str,
)
def test_an_answer_with_a_value_out_of_its_range_is_not_read(lie: dict[str, Any]) -> None:
    sent = [ANSWER, msgspec.structs.replace(ANSWER, **lie), ANSWER]
    poller = TierPoller(lambda *_: msgspec.msgpack.encode(sent.pop(0)), ChangesRequest("m", 1))
    tiers = MpTiers(poller, TokenHasher(CHUNK, "blake3"), bytes_per_token=1)
    poller.poll()
    known = tiers.capacity_tokens()
    poller.try_poll()
    assert not poller.is_up and tiers.capacity_tokens() == known
    poller.try_poll()
    assert poller.is_up


def test_faults_of_the_disk_add_up_over_servers() -> None:
    """Each process of the server counts its own; a Prometheus counter never falls."""
    counted = [("a", 1), ("a", 3), ("b", 2), ("b", 2)]
    sent = [msgspec.structs.replace(ANSWER, epoch=epoch, damaged_chunks=n) for epoch, n in counted]
    poller = TierPoller(lambda *_: msgspec.msgpack.encode(sent.pop(0)), ChangesRequest("m", 1))
    found = []
    for _ in counted:
        poller.poll()
        found.append(poller.faults["damaged_chunk"])
    assert found == [1, 3, 5, 5]


@pytest.mark.parametrize(
    ("answered", "warnings"),
    [
        ({}, []),
        ({"lmcache": "0.5.5"}, [f"runs lmcache 0.5.5, vLLM {metadata.version('lmcache')}"]),
        ({"continuum": "0.0.1"}, [f"runs continuum-lmcache 0.0.1, vLLM {__version__}"]),
    ],
)
def test_a_server_of_another_release_is_named_at_the_start(
    answered: dict[str, str], warnings: list[str], logged: Callable[..., list[str]]
) -> None:
    same = {"lmcache": metadata.version("lmcache"), "continuum": __version__}
    lines = logged(startup)
    startup.warn_of_versions(msgspec.structs.replace(ANSWER, **(same | answered)))
    assert len(lines) == len(warnings)
    assert all(part in line for part, line in zip(warnings, lines, strict=True))
