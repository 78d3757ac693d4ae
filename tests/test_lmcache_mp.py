"""The connector's parts against the real MP server in this process (lmcache_mp_rig.py), and by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from contract.test_tier_store import Programs
from hypothesis import given
from hypothesis import strategies as st
from lmcache.v1.distributed.api import ObjectKey
from lmcache_mp_rig import Clock, MpEngine, MpRig, op
from lmcache_mp_server import CHUNK
from lmcache_rig import prompt

from connectors import lmcache_mp_tiers
from connectors.lmcache_mp_loads import LoadBook, TimedLoad
from connectors.lmcache_mp_module import TierLog
from connectors.lmcache_mp_settings import settled
from connectors.lmcache_mp_tiers import MAX_AGE_S, Follower, MpMirror, MpTiers
from connectors.lmcache_mp_wire import Ask, Lookup, Told
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.tiers import Holding, Transfer
from continuum_lmcache.types import Tier

Make = Callable[..., MpRig]


# ---- residency


def test_what_the_server_has_not_told_yet_counts_as_not_there(mp_rig: Make) -> None:
    rig = mp_rig()
    rig.store("r", prompt(1, 2), 0)
    assert rig.locate(prompt(1, 2)) == Holding(0, 0)
    rig.settle()
    assert rig.locate(prompt(1, 2)) == Holding(2 * CHUNK, 0)


def test_tenants_with_other_salts_find_nothing_of_each_others(mp_rig: Make) -> None:
    rig = mp_rig()
    rig.run(prompt(1, 2))
    rig.settle()
    assert rig.tiers.locate(prompt(1, 2), "another") == Holding(0, 0)


def test_two_engines_on_one_server_load_right_kv_and_what_was_located_while_it_evicts(mp_rig: Make) -> None:
    """500 turns in two threads. If nothing of the prompt went meanwhile, a lookup finds what was located."""
    rig = mp_rig(12, 20)
    engines, unchanged, done = [rig, MpEngine(rig.server)], [], threading.Event()

    def turns(engine: MpEngine, seed: int) -> None:
        programs = Programs(CHUNK, seed)
        for turn in range(250):
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
    assert len(unchanged) > 400 and sum(hit > 0 for hit in unchanged) > 100
    engines[1].check()
    engines[1].close()


def total(held: Holding) -> int:
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
    """Chunks of two ranks' pieces come and go, and so do the server's memory of changes and the server."""
    registry = SimpleNamespace(find_attn_desc=lambda *_: SimpleNamespace(num_object_groups=1))
    log, mirror = TierLog(registry, max_changes=5), MpMirror()
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
            log, pieces = TierLog(registry, max_changes=5), set()
        mirror.absorb(told(log, mirror)) if what in ("ask", "restart") else None
    mirror.absorb(told(log, mirror))
    for ssd in (False, True):
        whole = {bytes([c]) for c in range(4) if {(ssd, c, 0), (ssd, c, 1)} <= pieces}
        assert mirror._held[ssd] == whole


def told(log: TierLog, mirror: MpMirror) -> Told:
    """The module's answer to a mirror."""
    known = mirror.epoch == log.epoch and log.reaches(mirror.number)
    changes = log.since(("m", 2), mirror.number) if known else log.snapshot(("m", 2))
    return Told(log.epoch, log.number, not known, changes, [], 1, None, 0.2, 300.0, "blake3")


class Heard:
    """A log of the test's own: other tests of the process may have silenced vLLM's."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str, *args: object) -> None:
        self.warnings.append(text % args)

    def info(self, text: str, *args: object) -> None:
        pass


def test_a_silent_server_gets_one_warning_and_its_tiers_count_as_empty(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, clock, downs = mp_rig(), Clock(), []
    log = Heard()
    monkeypatch.setattr(lmcache_mp_tiers, "logger", log)
    answers = True

    def call(payload: bytes, timeout_s: float) -> bytes:
        if not answers:
            raise TimeoutError("no answer")
        return rig.follower._call(payload, timeout_s)

    follower = Follower(call, Ask("m", 1), lambda: downs.append(1), clock)
    tiers = MpTiers(follower, rig.follower.poll(), rig.tiers._hasher, rig.bytes_per_token)
    rig.run(prompt(1, 2))
    follower.try_poll()
    assert tiers.locate(prompt(1, 2), "") == Holding(2 * CHUNK, 0)
    answers = False
    for _ in range(3):
        clock.now_s += MAX_AGE_S
        follower.try_poll()
    assert (follower.is_up, tiers.locate(prompt(1, 2), ""), downs) == (False, Holding(0, 0), [1])
    assert len(log.warnings) == 1 and "not answer" in log.warnings[0]
    answers = True
    follower.try_poll()
    assert (follower.is_up, tiers.locate(prompt(1, 2), "")) == (True, Holding(2 * CHUNK, 0))


# ---- a dead server


def test_a_store_that_nobody_answers_costs_the_store_and_not_the_worker(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = mp_rig()
    monkeypatch.setattr("connectors.lmcache_mp_worker.STALL_S", 0.05)
    monkeypatch.setattr(rig.adapter.transfer_ctx, "_instance_id", -1)  # the server knows no such worker
    rig.adapter.submit_store_request("r", op(prompt(1, 2), 0, 2 * CHUNK), None)
    assert not rig.adapter.is_healthy
    assert rig.adapter.get_finished({"r"})[0] == {"r"}
    rig.scheduler.end_session("r")


# ---- what loads took


def test_a_load_is_told_by_tier_when_both_sides_have_spoken() -> None:
    load, lookup = TimedLoad("r", 400, 4000, 0.4), Lookup(1, "r", 100, 300, 0.9)
    expected = [
        Transfer(Tier.DRAM, "load", 100, 1000, 0.1, "r", in_step=False),
        Transfer(Tier.SSD, "load", 300, 3000, 1.2, "r", in_step=False),
    ]
    for loads, lookups in ([load], []), ([], [lookup]):
        book = LoadBook()
        assert book.join(loads, lookups) == []
        moved = book.join([load][len(loads) :], [lookup][len(lookups) :])
        assert [replace(t, duration_s=0) for t in moved] == [replace(t, duration_s=0) for t in expected]
        assert [t.duration_s for t in moved] == pytest.approx([t.duration_s for t in expected])
        assert book.join([], []) == []


def test_reading_l2_is_timed_and_counted_as_the_disks(mp_rig: Make) -> None:
    rig = mp_rig(2, 12)
    rig.run(prompt(1, 2))
    rig.settle()
    rig.run(prompt(2, 2))
    rig.settle()
    rig.transfers()
    assert rig.run(prompt(1, 2)) == Holding(0, 2 * CHUNK)
    (load,) = [t for t in rig.transfers() if t.direction == "load"]
    assert load.tier is Tier.SSD and load.tokens == 2 * CHUNK and load.duration_s > 0


def test_capacities_are_the_servers(mp_rig: Make) -> None:
    rig = mp_rig(8, 16)
    held = rig.tiers.capacity_tokens()
    assert held[Tier.DRAM] == (8 + 32) * 4096 // rig.bytes_per_token
    assert held[Tier.SSD] == 2 * 16 * 4096 // rig.bytes_per_token


# ---- settings


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"lmcache.mp.prot": 5555}, "did you mean lmcache.mp.port?"),
        ({"lmcache.max_local_cpu_size": 5.0}, "belongs to in-process LMCache"),
        ({"lmcache.mp.lazy_offload": True}, "both decide what stays"),
        ({"lmcache.mp.server_urls": "tcp://a:1,tcp://b:1"}, "several servers"),
        ({"use_native": True}, "unknown key use_native"),
    ],
)
def test_settings_that_would_be_ignored_or_fail_are_refused(extra: dict, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        settled(extra)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_defaults_fill_what_the_user_left_open() -> None:
    extra, ours = settled(
        {"lmcache.mp.port": 1, "lmcache.mp.save_decode_cache": False, "continuum.policy": "fcfs"}
    )
    assert extra["lmcache.mp.save_decode_cache"] is False and "save_decode_cache" not in ours
    assert ours.keys() == {"heartbeat_interval", "mq_timeout"}
    assert settled(extra) == (extra, {})
