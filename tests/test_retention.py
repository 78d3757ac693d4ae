"""The TTL follows the tiers: shorter where a reload is cheap and certain, longer where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.engine import Engine
from continuum_lmcache.policy.continuum import returns_late
from continuum_lmcache.policy.named import POLICIES
from continuum_lmcache.reload.cost_model import CostModel, PrefillCurve, TransferRate
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.retention.learned import Learned
from continuum_lmcache.tools.durations import LEAST_EXPECTED_S, ToolDurations
from continuum_lmcache.types import NO_CALL, FinishedTurn, ProgramId, Residency, Retention, Tier, ToolKey
from experiments.policies import without

KV_BYTES = 131_072  # Llama-3.1-8B's, a token
CONTEXT = 20_000
COSTS = CostModel(
    prefill=PrefillCurve(0.0, 1e-4, 0.0, samples=9),  # 2 s for the context
    dram=TransferRate(25e9, 0.0, samples=9),  # 0.1 s
    ssd=TransferRate(5e9, 0.0, samples=9),
    kv_bytes_per_token=KV_BYTES,
    chunk_tokens=256,
)
IN_DRAM = FinishedTurn(ProgramId("p"), 3, ("bash",), CONTEXT, 1250, Residency(0, CONTEXT, 0, CONTEXT))
NOWHERE = Residency(0, 0, 0, CONTEXT)


def knowing(capacity_tokens: int) -> Learned:
    """Its tools: 0.05 to 1 s, evenly."""
    made = Learned(COSTS, ToolDurations(), {Tier.DRAM: capacity_tokens})
    for i in range(120):
        made.gaps.observe(("bash",), 0.05 + (i % 20) * 0.05)
    return made


def retained(made: Learned, turn: FinishedTurn, **config: Any) -> Retention:
    """An engine's decision."""
    engine = Engine(ContinuumConfig(**config), made, 2000, 16, 16)
    return engine._retain(turn, engine.state_of(turn.tool, turn.tenant, turn.residency, 100))


def expected_s(made: Learned, tool: ToolKey) -> float:
    """For how long the policy waits for a program in a call of the tool."""
    state = Engine(ContinuumConfig(), made, 2000, 16, 16).state_of(tool, "", NOWHERE, 100)
    return 0.0 if returns_late(tool, state) else state.expected_s


def ttl_s(made: Learned) -> float:
    return retained(made, IN_DRAM).ttl_s


def test_a_tools_mean_gap_is_its_own_once_one_has_ended_and_none_while_none_is_known() -> None:
    """Other tools' gaps would have a server that has seen fast ones give the slow one's memory away late."""
    gaps = ToolDurations()
    assert gaps.most_specific(("make",)).mean_s is None
    for _ in range(200):
        gaps.observe(("ls",), 0.05)
    gaps.observe(("make",), 6.0)
    assert gaps.most_specific(("make",)).mean_s == 6.0


def test_a_dram_that_turns_over_before_the_return_lengthens_the_ttl() -> None:
    kept, turned_over = knowing(30_000), knowing(30_000)
    for _ in range(10):
        kept.survival.on_return(IN_DRAM.residency, IN_DRAM.residency, CONTEXT)
        turned_over.survival.on_return(IN_DRAM.residency, NOWHERE, CONTEXT)
    assert ttl_s(turned_over) > ttl_s(kept)


def test_loads_at_a_tenth_of_the_rate_lengthen_the_ttl_within_fifty() -> None:
    made = knowing(10_000_000)
    before_s = ttl_s(made)
    size_bytes = CONTEXT * KV_BYTES
    slow = KVTransfer(Tier.DRAM, CONTEXT, size_bytes, size_bytes / 2.5e9)
    for _ in range(50):
        made.rates.observe(slow)
    assert ttl_s(made) > before_s


def test_prefill_reload_is_computed_once_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Residency] = []
    stock = CostModel.reload_s
    monkeypatch.setattr(CostModel, "reload_s", lambda *args: asked.append(args[1]) or stock(*args))
    made = knowing(10_000_000)
    engine = Engine(ContinuumConfig(), made, 2000, 16, 16)
    asked.clear()  # which tiers count as room
    keep = engine._retain(IN_DRAM, engine.state_of(IN_DRAM.tool, "", IN_DRAM.residency, 100))
    assert asked == [IN_DRAM.residency]
    assert keep.benefit_s == pytest.approx(keep.reload_s), "T is 0: the reload is all that a pin saves"


def test_the_ceiling_holds_whatever_the_policy_says() -> None:
    made = Learned(COSTS, ToolDurations(), {})
    assert retained(made, IN_DRAM, policy="static-ttl", static_ttl_s=50, max_ttl_s=7).ttl_s == 7


@pytest.mark.parametrize(("disk_s", "is_room"), [(1.5, True), (2.5, False)])
def test_a_tier_counts_as_room_if_it_is_faster_than_computing(disk_s: float, is_room: bool) -> None:
    tokens = 20_000  # computed in 2 s
    disk = TransferRate(tokens * KV_BYTES / disk_s, 0.0, samples=9)
    tiers = {Tier.DRAM: tokens // 2, Tier.SSD: tokens}
    made = Learned(replace(COSTS, ssd=disk), ToolDurations(), tiers)
    assert made.cheap_tier_tokens() == (tokens if is_room else tokens // 2), "the largest of these"


SIZE_BYTES = CONTEXT * KV_BYTES


def loads(made: Learned, took_s: float, count: int = 50) -> int:
    """What counts as room after loads of CONTEXT from the disk that took so long."""
    for _ in range(count):
        made.rates.observe(KVTransfer(Tier.SSD, CONTEXT, SIZE_BYTES, took_s))
    return made.cheap_tier_tokens()


def test_what_counts_as_room_follows_the_rates_of_loads_and_does_not_flutter() -> None:
    """Computing takes 2 s. The disk holds 50 times as much as DRAM."""
    tiers = {Tier.DRAM: 100_000, Tier.SSD: 5_000_000}
    made = Learned(COSTS, ToolDurations(), tiers)
    assert made.cheap_tier_tokens() == 5_000_000
    assert loads(made, took_s=13.0) == 100_000, "the profile said 0.6 s"
    assert loads(made, took_s=2.2) == 100_000
    assert loads(made, took_s=1.8) == 5_000_000
    assert loads(made, took_s=2.2) == 5_000_000
    assert loads(made, took_s=2.8) == 100_000


def test_the_more_programs_do_not_come_back_the_sooner_one_is_not_expected_any_more() -> None:
    made, bash = knowing(10_000_000), ("bash",)
    for i in range(100):
        made.gaps.observe(bash, 20.0 + i % 20)
    waits_s = [expected_s(made, bash)]
    for number in range(150):
        made.gaps.add_lost(bash)
        if number in (30, 149):
            waits_s.append(expected_s(made, bash))
    assert waits_s[0] > waits_s[1] > waits_s[2]
    for _ in range(150):  # all were late
        made.gaps.withdraw_lost(bash)
    assert expected_s(made, bash) == waits_s[0]


def test_a_program_whose_tool_mostly_never_returns_is_not_expected() -> None:
    made = knowing(10_000_000)
    for _ in range(200):
        made.gaps.add_lost(("ask_human",))
    assert expected_s(made, ("ask_human",)) == 0.0


def test_room_is_held_for_a_slow_tool_but_not_for_people_who_reply_as_late() -> None:
    made = knowing(10_000_000)
    for _ in range(6):
        made.gaps.observe(("make",), 60.0)
        made.gaps.observe(NO_CALL, 60.0)
    assert expected_s(made, ("make",)) >= LEAST_EXPECTED_S
    assert expected_s(made, NO_CALL) == 0.0
    late, answer = (replace(IN_DRAM, tool=tool, residency=NOWHERE) for tool in (("make",), NO_CALL))
    assert retained(made, late).ttl_s > 0.0
    assert retained(made, answer).ttl_s == 0.0
    for _ in range(20):
        made.gaps.observe(NO_CALL, 1.0)
    assert expected_s(made, NO_CALL) >= LEAST_EXPECTED_S
    assert retained(made, answer).ttl_s > 0.0


def test_of_parallel_calls_the_longest_known_gap_decides_and_a_programs_name_before() -> None:
    made = knowing(10_000_000)
    calls = (("read",), ("tox", "bash"))
    assert made.gaps.slowest(()) == () and made.gaps.slowest((NO_CALL,)) == NO_CALL
    assert made.gaps.slowest(calls) == ("tox", "bash")
    made.gaps.observe(("read",), 60.0)
    assert made.gaps.slowest(calls) == ("read",)
    for gap_s in (1.0, 130.0):
        made.gaps.observe(("tox", "bash"), gap_s)
    assert made.gaps.slowest(calls) == ("tox", "bash"), "by its mean"


@pytest.mark.parametrize("tenants", [("mine", "another's"), ("another's", "mine")])
def test_another_tenants_gaps_do_not_say_which_parallel_call_is_the_slowest(tenants: tuple[str, str]) -> None:
    made, calls = knowing(10_000_000), (("pytest",), ("ls",))
    for tenant in tenants:
        for _ in range(300):
            made.gaps.observe(("pytest",), 60.0 if tenant == "mine" else 0.1, tenant)
            made.gaps.observe(("ls",), 0.1 if tenant == "mine" else 60.0, tenant)
    assert made.gaps.of("mine").slowest(calls) == ("pytest",)
    assert made.gaps.of("another's").slowest(calls) == ("ls",)
    assert made.gaps.of("a third's").slowest((("read",), ("tox", "bash"))) == ("tox", "bash"), "by its name"


@pytest.mark.parametrize("evicts", [True, False])
def test_a_turn_is_not_pinned_after_what_mostly_ends_programs(
    evicts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not evicts:
        monkeypatch.setitem(POLICIES, "continuum", without("continuum", "evict_ended_programs"))
    made = Learned(COSTS, ToolDurations(), {})
    for i in range(120):
        made.gaps.observe(("bash",), 0.05 + (i % 20) * 0.05)
    answer = replace(IN_DRAM, tool=NO_CALL, residency=NOWHERE)
    assert retained(made, answer).ttl_s > 0.0, "nothing is known of answers"
    for _ in range(6):
        made.gaps.add_lost(NO_CALL)
    keep = retained(made, answer)
    assert (keep.ttl_s > 0.0) is not evicts
    assert keep.reason == ("returns-late" if evicts else "cdf")
    for _ in range(6):  # people answer after all
        made.gaps.observe(NO_CALL, 0.5)
    assert retained(made, answer).ttl_s > 0.0
