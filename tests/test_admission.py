"""Admission and its learned figures. Times and tokens are invented; nothing runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from admission_rig import AdmissionRig, a_state
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_lmcache.admission.controller import RATE_TURNS, UNASKED, KVCapacity
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.policy.continuum import (
    ALL_WAIT_ALIKE,
    BUSY_SHARE,
    SLICE_RELOADS,
    SLICE_TURNS,
    TIER_RELOADS,
    gives_up_place,
)
from continuum_lmcache.policy.interface import Places
from continuum_lmcache.programs.context_growth import PRIOR_TURNS, WINDOW, ContextGrowth
from continuum_lmcache.programs.program import STANDING_KEPT_S, Stage
from continuum_lmcache.programs.shared_prefixes import MOST_HEADS, SharedPrefix, SharedPrefixIndex
from continuum_lmcache.steps.step_times import PrefillShare
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import FinishedTurn, ProgramId, Residency

A, B, C = (ProgramId(name) for name in "abc")
LONGEST_S = 60.0


class AsTold(ContextGrowth):
    """Forecasts may add up to what the GPU holds: the limit is the test's own number."""

    def forecasts_that_fit(self, gpu_tokens: int) -> float:
        return float(gpu_tokens)


def admission(active_tokens: int = 100_000, started_tokens: int = 100_000) -> AdmissionRig:
    """One that has seen programs of 9 turns, each 1,000 tokens longer than the last."""
    growth = AsTold()
    for _ in range(500):
        growth.add_turn(1000)
        growth.program_ended(9)
    return AdmissionRig(KVCapacity(active_tokens, started_tokens), LONGEST_S, growth)


def admitted(at: AdmissionRig, now_s: float = 0.0, idle: bool = False) -> list[ProgramId]:
    found = at.admit(now_s, idle)
    at.programs.check()
    return found


def play(at: AdmissionRig, name: ProgramId, turns: int = SLICE_TURNS - 1) -> None:
    """So many turns of no time, at the start."""
    for _ in range(turns):
        at.on_pause(0.0, name, 60_000, expected_s=900.0)
        at.on_arrival(0.0, name, 60_000)


def test_a_program_starts_at_once_while_there_is_room_and_waits_when_there_is_none() -> None:
    at = admission()
    assert not at.on_arrival(0.0, A, 60_000) and admitted(at) == [A]
    assert not at.on_arrival(1.0, B, 60_000) and admitted(at, 1.0) == []
    at.remove_program(A, finished_turns=3)
    assert admitted(at, 100.0) == [B]


def test_a_program_under_way_never_waits() -> None:
    at = admission()
    at.on_arrival(0.0, A, 90_000)
    assert admitted(at, idle=True) == [A]
    at.on_pause(1.0, A, 95_000, expected_s=10.0)
    assert at.on_arrival(2.0, A, 96_000)
    assert at.on_arrival(900.0, B, 90_000, turns=4), "away for longer than expected, and still under way"


def test_a_request_without_a_program_counts_with_its_prompt_alone() -> None:
    """However much programs grow here: it ends with its turn."""
    at = admission()
    grown = at.programs.growth.forecast_tokens(500, 0)
    for i in range(40):
        at.add_request(ProgramId(f"~{i}"), 500)
        at.programs.check()
    whole_tokens = admission().admission.headroom_tokens
    assert grown > 500 and at.admission.headroom_tokens == pytest.approx(whole_tokens - 40 * 500)
    for i in range(40):
        at.remove_program(ProgramId(f"~{i}"))
    at.programs.check()
    assert at.admission.headroom_tokens == pytest.approx(whole_tokens)


def test_requests_without_a_program_that_came_after_the_lines_head_or_do_not_run_hold_nobody_back() -> None:
    at = admission()
    at.add_request(ProgramId("~before"), 50_000)
    at.add_request(ProgramId("~queued"), 90_000, runs=False)
    assert not at.on_arrival(1.0, A, 60_000) and admitted(at, 1.0) == []
    at.add_request(ProgramId("~after"), 40_000, 2.0)
    at.remove_program(ProgramId("~before"))
    assert admitted(at, 2.0) == [A]


def test_nobody_stands_in_the_line_for_longer_than_the_bound_at_the_arrival() -> None:
    at = admission()
    at.on_arrival(0.0, A, 90_000)
    assert admitted(at) == [A]
    at.on_arrival(1.0, B, 60_000)
    bound_s = at.admission.longest_wait_s
    assert admitted(at, 0.9 * bound_s) == []
    assert admitted(at, 1.0 + bound_s) == [B]


def test_a_program_that_has_had_its_slice_gives_way_to_one_that_has_waited_and_then_waits_itself() -> None:
    at = admission()
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [A]
    at.on_arrival(0.0, B, 60_000)
    now_s = 1.0
    while at.on_pause(now_s, A, 60_000, expected_s=900.0) or at.stage(A) is Stage.AWAY:
        assert admitted(at, now_s) == [], "B has not waited for long"
        assert at.on_arrival(now_s, A, 60_000)
        now_s += 1.0
    assert now_s == LONGEST_S - 1.0, "a turn's time is left"
    assert at.stage(A) is Stage.YIELDED and admitted(at, now_s) == [B]
    first_tokens = at.programs.growth.first_tokens
    assert not at.on_arrival(LONGEST_S + 3, A, 62_000) and admitted(at, LONGEST_S + 3) == []
    assert at.programs.growth.first_tokens == first_tokens, "a later prompt is no first one"
    at.remove_program(B, finished_turns=3)
    assert admitted(at, LONGEST_S + 4) == [A] and at.programs.records[A].turns == now_s


@pytest.mark.parametrize(
    ("reload_s", "turns", "tier_tokens", "yields"),
    [
        (0.0, SLICE_TURNS, 0, True),
        (0.0, SLICE_TURNS - 1, 0, False),
        (90.0 / SLICE_RELOADS, SLICE_TURNS, 0, True),
        (110.0 / SLICE_RELOADS, SLICE_TURNS, 0, False),
        (90.0 / TIER_RELOADS, SLICE_TURNS, 100_001, True),
        (110.0 / TIER_RELOADS, SLICE_TURNS, 100_001, False),
    ],
)
def test_a_slice_has_a_few_turns_and_is_longer_the_more_it_costs_to_bring_a_program_back(
    reload_s: float, turns: int, tier_tokens: int, yields: bool
) -> None:
    """And longest with a tier, from which each change of programs takes what others come back to."""
    at = admission(started_tokens=tier_tokens)
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [A]
    play(at, A, turns - 1)
    at.on_arrival(1.0, B, 60_000)
    at.on_pause(100.0, A, 60_000, expected_s=900.0, reload_s=reload_s)
    assert (at.stage(A) is Stage.YIELDED) is yields


CHEAP = {"reload_s": 6.0, "gap_s": 6.7}  # of 60,000 of 100,000 tokens: the cache is filled again in 10 s


@pytest.mark.parametrize(
    ("more", "waits_s", "tier_tokens", "yields"),
    [
        (CHEAP, 1.0, 0, True),
        (CHEAP | {"gap_s": 6.6}, 1.0, 0, False),
        (CHEAP | {"reload_s": 6.1}, 1.0, 0, False),
        (CHEAP, 19.9, 0, True),
        (CHEAP, 20.1, 0, False),
        (CHEAP, 1.0, 100_001, False),
        ({"reload_s": 0.1, "gap_s": 1.0}, 1.0, 0, True),
        ({"reload_s": 0.1, "gap_s": 0.9}, 1.0, 0, False),
    ],
    ids=[
        *("cheap", "short gap", "slow reload", "in time", "too many wait", "a tier"),
        *("a second", "less than a second"),
    ],
)
def test_a_program_gives_way_at_once_where_its_gap_is_long_and_others_would_not_wait_for_too_long(
    more: dict[str, float], waits_s: float, tier_tokens: int, yields: bool
) -> None:
    """With one turn that waits and one that ends each `waits_s`, the mean wait is as long. Then the line
    lets everybody in, too."""
    at = admission(started_tokens=tier_tokens)
    at.admission.config = replace(at.admission.config, first_token_limit_s=30.0)
    for end in range(RATE_TURNS + 1):
        name, now_s = ProgramId(f"{end}"), 100 + end * waits_s
        at.on_arrival(now_s - waits_s / 2, name, 60_000)
        assert admitted(at, now_s - waits_s / 2) == [name]
        if end == RATE_TURNS:
            at.on_arrival(now_s, B, 60_000)
        at.on_pause(now_s, name, 60_000, 900.0, **more)
        if end < RATE_TURNS:
            assert at.stage(name) is Stage.AWAY, "nobody waits"
            at.on_arrival(now_s, name, 60_000)
            at.remove_program(name, finished_turns=9)
    assert (at.stage(name) is Stage.YIELDED) is yields
    at.on_arrival(now_s, C, 60_000)
    assert (C in [*admitted(at, now_s), *admitted(at, now_s)]) is yields


def test_one_call_of_a_slow_tool_opens_the_line_to_nobody() -> None:
    """Whether waits are shared is decided by the latest turns of all programs."""
    at = admission()
    at.admission.config = replace(at.admission.config, first_token_limit_s=30.0, longest_wait_s=1e6)
    at.on_arrival(0.0, A, 90_000)
    assert admitted(at) == [A]
    for turn in range(RATE_TURNS):
        at.on_arrival(float(turn), ProgramId(f"new-{turn}"), 60_000)
        at.on_pause(float(turn), A, 90_000, 900.0, reload_s=0.1, gap_s=0.05)
        at.on_arrival(float(turn), A, 90_000)
    at.on_pause(50.0, A, 90_000, 900.0, reload_s=0.1, gap_s=10.0)
    assert at.stage(A) is Stage.AWAY and admitted(at, 50.0) == []


def test_all_turns_that_end_count_in_the_rate_of_turns() -> None:
    """Requests without a name too: they wait in the same queue."""

    def shares(ends_beside: int) -> bool:
        at = admission()
        at.admission.config = replace(at.admission.config, first_token_limit_s=30.0)
        for turn in range(RATE_TURNS):
            at.on_arrival(30.0 * turn, A, 60_000)
            at.admit(30.0 * turn, idle=True)
            for end in range(ends_beside):
                at.admission.on_turn_end(30.0 * turn + end)
            if turn == RATE_TURNS - 1:
                at.on_arrival(30.0 * turn, B, 60_000)
            at.on_pause(30.0 * turn + 29, A, 60_000, 900.0, **CHEAP)
        return at.admission.last.reason == ALL_WAIT_ALIKE

    assert shares(9) and not shares(0)


@pytest.mark.parametrize(
    ("late_share", "waits_s", "kept_s"),
    [(0.1, 0.0, 20.0), (0.11, 0.0, 100.0), (0.11, 330.0, 70.0), (0.11, 399.0, 20.0)],
    ids=["in time", "too many late", "little time left", "no time left"],
)
def test_while_more_than_a_tenth_of_turns_is_late_a_place_outlasts_a_quarter_of_the_longest_wait(
    late_share: float, waits_s: float, kept_s: float
) -> None:
    """But no longer than until another turn would have waited for the longest."""
    at = admission()
    at.admission.config = replace(at.admission.config, longest_wait_s=400.0)
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [A]
    at.on_arrival(0.0, B, 60_000)
    at.on_pause(waits_s, A, 60_000, expected_s=20.0, late_share=late_share)
    assert at.expire_absent(waits_s + 0.99 * kept_s) == [] and at.stage(A) is Stage.AWAY
    assert at.expire_absent(waits_s + kept_s) == [A]


@pytest.mark.parametrize(("slow", "kept_s"), [(4, 20.0), (5, 150.0)])
def test_a_place_outlasts_a_long_gap_only_if_most_of_those_who_are_away_for_so_long_return(
    slow: int, kept_s: float
) -> None:
    """Else those that have ended would keep the places."""
    gaps, tool = ToolDurations(), ("bash",)
    for gap_s in [1.0] * 90 + [60.0] * slow:
        gaps.observe(tool, gap_s)
    for _ in range(5):
        gaps.add_lost(tool)
    turn = FinishedTurn(A, 1, tool, 60_000, 1, Residency(0, 0, 0, 60_000))
    state = a_state(gaps=gaps, lost_share=gaps.longer_share(tool, math.inf), expected_s=20.0)
    places = Places(
        *(ContinuumConfig(longest_wait_s=600.0), 1, False),
        *(1, 0.0, 0.5, 1.0, 1.0, 900.0, UNASKED),
    )
    assert gives_up_place(turn, state, places).expected_s == kept_s


def test_who_has_yielded_and_does_not_return_counts_as_ended() -> None:
    at = admission()
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [A]
    play(at, A)
    at.on_arrival(1.0, B, 60_000)
    at.on_pause(100.0, A, 60_000, expected_s=10.0)
    assert at.stage(A) is Stage.YIELDED
    assert at.expire_absent(111.0) == [A] and at.stage(A) is Stage.OVERDUE
    at.programs.check()


class Round:
    """Programs of one size, without end. Turns take `turn_s`, tools nothing; `fits` programs have a place.

    The last `few` programs are another tenant's, who comes later.
    """

    def __init__(self, programs: int, fits: int, turn_s: float, reload_s: float, few: int = 0) -> None:
        growth = AsTold()
        growth.add_turn(0)  # so a program needs what it has
        self.at = AdmissionRig(KVCapacity(fits * 1000 + 500), LONGEST_S, growth)
        self.turn_s, self.reload_s = turn_s, reload_s
        self.ends = dict[ProgramId, float]()  # of the turns that run
        self.since = dict[ProgramId, float]()  # of those that wait
        self.few = [ProgramId(f"few{n}") for n in range(few)]
        for n in range(programs):
            self.arrive(0.0, ProgramId(f"p{n}"))

    def arrive(self, now_s: float, name: ProgramId) -> None:
        self.since[name] = now_s
        if self.at.on_arrival(now_s, name, 1000, tenant="few" if name in self.few else ""):
            self.start(now_s, name)

    def start(self, now_s: float, name: ProgramId) -> float:
        self.ends[name] = now_s + self.turn_s
        return now_s - self.since.pop(name)

    def step(self, now_s: float) -> dict[ProgramId, float]:
        """The waits of turns that start now."""
        for name in [name for name, end_s in self.ends.items() if end_s <= now_s]:
            del self.ends[name]
            self.at.on_pause(now_s, name, 1000, expected_s=900.0, reload_s=self.reload_s)
            self.arrive(now_s, name)
        for name in self.few if now_s == 1.0 else ():
            self.arrive(now_s, name)
        started = self.at.admit(now_s, idle=not self.ends)
        return {name: self.start(now_s, name) for name in started}


@settings(max_examples=settings.default.max_examples // 5)  # each is half an hour of turns
@given(
    programs=st.integers(1, 12),
    few=st.integers(0, 4),
    fits=st.integers(1, 8),
    turn_s=st.floats(1.0, 4.0),
    reload_s=st.sampled_from([0.0, 0.1, 2.0, 20.0]),
)
def test_no_wait_is_longer_than_the_bound_that_the_gauge_shows_and_the_turns_under_way(
    programs: int, few: int, fits: int, turn_s: float, reload_s: float
) -> None:
    run = Round(programs, fits, turn_s, reload_s, few)
    bound_s = longest_s = 0.0
    for tick in range(2000):
        longest_s = max([longest_s, *run.step(float(tick)).values()])
        bound_s = max(bound_s, run.at.admission.longest_wait_s)
    longest_s = max([longest_s, *(2000 - since_s for since_s in run.since.values())])
    bound_s += (1 + (1 + bool(few)) * max(programs, few) // fits) * (turn_s + 1)
    assert longest_s <= bound_s < 2000, "a wait could be longer"


def waits_of_few_s(programs: int) -> list[float]:
    """In the hour of a tenant with two programs, beside another with so many."""
    run, found = Round(programs, fits=4, turn_s=5.0, reload_s=2.0, few=2), list[float]()
    for tick in range(3600):
        found += [wait_s for name, wait_s in run.step(float(tick)).items() if name in run.few]
    return [*found, *(3600 - since_s for name, since_s in run.since.items() if name in run.few)]


def test_a_tenants_wait_does_not_grow_with_the_programs_of_another() -> None:
    beside_ten, beside_hundred = waits_of_few_s(10), waits_of_few_s(100)
    assert max(beside_hundred) <= max(beside_ten) < LONGEST_S + SLICE_RELOADS * 2.0 * 4
    assert len(beside_hundred) > 100


def test_a_tenants_own_programs_are_served_in_their_order_and_those_that_left_cost_it_no_turn() -> None:
    at = admission()
    at.on_arrival(0.0, ProgramId("busy"), 90_000, exempt=True)
    for n in range(6):
        at.on_arrival(1.0 + n, ProgramId(f"p{n}"), 60_000)
    at.on_arrival(9.0, A, 60_000, tenant="few")
    for n in (0, 3):
        at.remove_program(ProgramId(f"p{n}"))
    served, place = [], ProgramId("busy")
    for _ in range(5):
        at.remove_program(place, finished_turns=1)
        (place,) = admitted(at, 10.0)
        served.append(place)
    assert served == ["p1", A, "p2", "p4", "p5"]


def test_the_gauge_looks_at_no_program_that_was_idle_for_longer_than_those_with_a_place() -> None:
    """Records of overdue programs stay for an hour, up to 100,000 of them."""
    at = admission()
    at.on_arrival(0.0, A, 10, exempt=True)
    at.on_pause(0.0, A, 10, expected_s=10.0, reload_s=50.0)
    at.on_arrival(0.0, C, 90_000)
    at.programs.records[B] = None  # type: ignore[assignment]
    at.programs.records.move_to_end(B, last=False)
    assert at.admission.longest_wait_s == 2 * SLICE_RELOADS * 50.0 > LONGEST_S


def test_the_gauge_shows_no_wait_where_a_usual_program_starts_at_once() -> None:
    at = admission()
    assert at.admission.longest_wait_s == 0.0
    at.on_arrival(0.0, A, 20_000)
    assert admitted(at, 0.0) == [A]
    assert at.admission.longest_wait_s == 0.0
    at.on_arrival(0.0, B, 90_000)
    assert admitted(at, 0.0) == []
    assert at.admission.longest_wait_s > 0.0
    at.remove_program(B)
    at.on_arrival(0.0, C, 90_000, exempt=True)
    assert not at.admission.is_waited_for
    assert at.admission.longest_wait_s > 0.0, "nobody waits, and the memory is full"


@pytest.mark.parametrize(("away_s", "first"), [(STANDING_KEPT_S, B), (STANDING_KEPT_S + 1, C)])
def test_a_program_that_left_the_line_keeps_its_place_there_for_a_while(
    away_s: float, first: ProgramId
) -> None:
    at = admission()
    at.on_arrival(0.0, A, 90_000, exempt=True)
    at.on_arrival(0.0, B, 90_000)
    assert admitted(at, 0.0) == []
    at.remove_program(B)
    at.on_arrival(1.0, C, 90_000)
    at.on_arrival(away_s, B, 90_000)
    at.remove_program(A, finished_turns=1)
    assert admitted(at, away_s)[0] == first


def test_a_program_whose_turn_is_aborted_keeps_its_place() -> None:
    at = admission()
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [A]
    at.on_arrival(1.0, B, 60_000)
    at.remove_program(A)
    assert at.on_arrival(2.0, A, 60_000), "it had a place, and came back in time"


def test_programs_in_a_tool_call_count_against_the_tiers_and_not_against_the_gpu() -> None:
    at = admission(active_tokens=100_000, started_tokens=300_000)
    at.on_arrival(0.0, A, 70_000)
    assert admitted(at) == [A]
    at.on_pause(0.1, A, 70_000, expected_s=1e6)
    at.on_arrival(1.0, B, 70_000)
    assert admitted(at, 1.0) == [B]


def test_a_program_that_does_not_come_back_in_time_is_counted_no_longer() -> None:
    at = admission()
    at.on_arrival(0.0, A, 90_000, exempt=True)
    at.on_pause(1.0, A, 90_000, expected_s=10.0)
    at.on_arrival(2.0, B, 90_000)
    assert admitted(at, 10.9) == []
    assert admitted(at, 200.0) == [B]
    assert at.stage(A) is Stage.OVERDUE


def left_after(turns: int, at: AdmissionRig) -> float:
    """How many turns a new program is expected to have, once many have not come back after so many turns."""
    for number in range(WINDOW):
        program, now_s = ProgramId(f"gone-{number}"), 100.0 * number
        at.on_arrival(now_s, program, 1000, exempt=True)
        for turn in range(turns):
            if turn:
                at.on_arrival(now_s + turn, program, 1000, turns=turn)
            at.on_pause(now_s + turn, program, 1000, expected_s=10.0)
        at.expire_absent(now_s + 50.0)
    return at.programs.growth.turns_left(0)


def test_programs_that_do_not_come_back_show_how_long_programs_are() -> None:
    assert left_after(3, admission()) == pytest.approx(3.0, rel=0.1)


def test_a_program_that_comes_back_late_had_not_ended() -> None:
    at = admission()
    usual = at.programs.growth.turns_left(0)
    at.on_arrival(0.0, A, 1000, exempt=True)
    at.on_pause(1.0, A, 1000, expected_s=10.0)
    assert at.expire_absent(20.0) == [A] and at.programs.growth.turns_left(0) < usual
    assert not at.on_arrival(30.0, A, 1000) and at.programs.growth.turns_left(0) == usual
    at.remove_program(A, finished_turns=1)
    once = at.programs.growth.turns_left(0)
    at.remove_program(A)
    assert at.programs.growth.turns_left(0) == once < usual
    at.programs.check()


def test_where_clients_tell_their_ends_who_is_late_has_not_ended() -> None:
    at = admission()
    at.on_arrival(0.0, A, 1000, exempt=True)
    at.on_pause(1.0, A, 1000, expected_s=10.0)
    at.on_arrival(1.0, B, 1000, exempt=True)
    at.remove_program(B, finished_turns=9)  # told
    told = at.programs.growth.turns_left(0)
    assert at.expire_absent(20.0) == [] and at.stage(A) is Stage.OVERDUE
    assert at.programs.growth.turns_left(0) == told
    at.remove_program(A, finished_turns=1)  # idle for an hour
    assert at.programs.growth.turns_left(0) < told


def test_a_program_that_was_away_for_longer_than_expected_waits_in_the_line_again() -> None:
    at = admission()
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [A]
    at.on_pause(1.0, A, 61_000, expected_s=0.0)
    at.on_arrival(2.0, B, 60_000)
    assert admitted(at, 2.0) == [B], "A is absent, and holds no room"
    assert not at.on_arrival(3.0, A, 62_000) and admitted(at, 3.0) == []
    at.remove_program(B, finished_turns=3)
    assert admitted(at, 4.0) == [A] and at.programs.records[A].turns == 1


def test_a_conversation_that_is_back_before_it_is_missed_goes_on_at_once() -> None:
    at = admission()
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [A]
    at.on_pause(1.0, A, 61_000, expected_s=0.0)
    assert at.on_arrival(1.0, A, 62_000, turns=1)


def test_who_leaves_before_starting_frees_the_way() -> None:
    at = admission()
    at.on_arrival(0.0, A, 90_000, exempt=True)
    at.on_arrival(1.0, B, 90_000)
    at.on_arrival(1.0, C, 10_000)
    at.remove_program(B)
    assert admitted(at, 2.0) == [] and at.stage(C) is Stage.IN_LINE
    at.remove_program(A)
    assert admitted(at, 90.0) == [C]


def sharing(at: AdmissionRig, blocks: int = 10) -> list[str]:
    """Hashes of a prompt whose first blocks of 4,000 tokens another prompt has too."""
    at.admission.shared_prefixes = SharedPrefixIndex(block_tokens=4000)
    at.admission.shared_prefixes.record_hit([f"head {i}" for i in range(blocks)], 4000 * blocks)
    return [*(f"head {i}" for i in range(blocks)), "own"]


def test_a_head_that_many_programs_share_takes_room_once() -> None:
    at = admission(active_tokens=100_000)
    hashes = sharing(at)
    for i in range(4):
        at.on_arrival(0.0, ProgramId(f"p{i}"), 44_000, hashes=hashes)
    assert len(admitted(at)) == 4, "40,000 in common and 4,000 of each one's own"
    assert at.programs.context_tokens == 40_000 + 4 * 4_000
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [], "one that shares nothing needs all that it sends"


def test_a_shared_head_takes_room_until_the_last_program_that_uses_it_has_left() -> None:
    at = admission(active_tokens=100_000)
    hashes = sharing(at)
    for program in (A, B):
        at.on_arrival(0.0, program, 44_000, hashes=hashes)
    assert admitted(at) == [A, B]
    at.on_arrival(1.0, C, 70_000)
    at.remove_program(A)
    assert at.programs.context_tokens == 44_000 + 70_000 and admitted(at, 40.0) == []
    at.remove_program(B)
    assert at.programs.context_tokens == 70_000 and admitted(at, 80.0) == [C]


def test_a_program_in_line_is_judged_by_its_own_tokens_once_its_head_is_known() -> None:
    at = admission(active_tokens=110_000, started_tokens=110_000)
    hashes = [f"head {i}" for i in range(11)]
    at.admission.shared_prefixes = SharedPrefixIndex(block_tokens=4000)
    for program in (A, B, C):
        at.on_arrival(0.0, program, 44_000, hashes=hashes)
    assert admitted(at) == [A, B], "nobody knows yet that they have 40,000 in common"
    at.on_prefix_hit(B, hashes, 40_000)
    assert admitted(at, 1.0) == [C]
    at.on_pause(2.0, A, 44_000, expected_s=10.0)
    assert at.on_arrival(3.0, A, 44_000, hashes=hashes)
    assert at.programs.context_tokens == 40_000 + 3 * 4_000, "the first one too, from its next turn on"


def test_a_program_keeps_the_hashes_of_its_prompt_only_while_it_waits_in_line() -> None:
    """They are 32 bytes a block of a context, and a program's record lives for an hour."""
    at = admission()
    for program in (A, B):
        at.on_arrival(0.0, program, 60_000, hashes=["a", "b"])
    assert admitted(at) == [A]
    assert not at.programs.records[A].prompt_hashes and at.programs.records[B].prompt_hashes == ["a", "b"]
    at.remove_program(B)
    assert not at.programs.records[B].prompt_hashes


def test_while_prompts_leave_time_one_program_at_a_time_starts_although_there_is_no_room() -> None:
    at = admission()
    at.on_arrival(0.0, A, 90_000, exempt=True)
    for program in (B, C):
        at.on_arrival(0.0, program, 90_000)
    assert at.admit(0.0, idle=False, prompt_share=BUSY_SHARE) == []
    assert at.admit(1.0, idle=False, prompt_share=0.2) == [B]
    assert at.admit(2.0, idle=False, prompt_share=0.2) == [C]


def test_the_share_of_time_for_prompts_follows_half_a_minute_of_steps() -> None:
    prompts = PrefillShare()
    for number in range(200):
        prompts.on_step(1.0, prefills=bool(number % 2))
    assert prompts.share == pytest.approx(0.5, abs=0.02)
    for _ in range(30):
        prompts.on_step(1.0, prefills=False)
    assert prompts.share == pytest.approx(0.5 / math.e, abs=0.02)


def test_an_engine_whose_first_steps_compute_prompts_has_no_time_to_spare() -> None:
    prompts = PrefillShare()
    assert prompts.share == 0.0
    for number in range(8):
        prompts.on_step(0.01, prefills=number % 4 != 3)
        assert prompts.share > BUSY_SHARE
    assert prompts.share == pytest.approx(0.75, abs=0.01)


# learned figures --------------------------------------------------------------


def test_growth_starts_from_a_prior_and_ends_at_what_was_seen() -> None:
    growth = ContextGrowth()
    assert growth.turns_left(0) == PRIOR_TURNS
    growth.add_first_prompt(20_000)
    assert growth.turn_tokens == 5_000
    for _ in range(300):
        growth.add_turn(500)
        growth.program_ended(4)
    assert growth.turn_tokens == 500
    assert growth.turns_left(0) == pytest.approx(4, rel=0.05)
    assert growth.turns_left(30) == 1.0, "it is here although nothing lasted so long: one more turn"
    assert growth.forecast_tokens(10_000, 0) == pytest.approx(10_000 + 2 * 500, rel=0.1)


def programs(growth: ContextGrowth, firsts: range, final_tokens: int, turns: int = 10) -> ContextGrowth:
    """One that has seen such programs, each growing in equal steps."""
    for first in firsts:
        growth.add_first_prompt(first)
        for _ in range(turns):
            growth.add_turn((final_tokens - first) // turns)
        growth.program_ended(turns)
    return growth


def test_a_tiny_first_prompt_is_forecast_to_grow_as_much_as_any() -> None:
    growth = programs(ContextGrowth(), range(90, 122), 13_000)
    assert growth.forecast_tokens(4, 0) == pytest.approx(growth.forecast_tokens(1004, 0) - 1000)
    assert 5_000 < growth.forecast_tokens(91, 0) < 8_000, "half-way to 13,000"


def test_the_forecasts_of_many_programs_may_fill_the_cache_and_those_of_few_leave_room() -> None:
    from_nothing = programs(ContextGrowth(), range(90, 122), 13_000)
    unchanging = programs(ContextGrowth(), range(1000, 1032), 1032)
    assert ContextGrowth().forecasts_that_fit(1000) == 1000.0
    assert 1.25 < from_nothing.forecasts_that_fit(868_000) / 868_000 < 1.30, "131 of them fit"
    assert 1.03 < from_nothing.forecasts_that_fit(200_000) / 200_000 < 1.09, "30 of them fit"
    assert from_nothing.forecasts_that_fit(100) / 100 == pytest.approx(0.75, rel=0.1), "not even one does"
    assert 0.95 < unchanging.forecasts_that_fit(1_000_000) / 1_000_000 < 1.02, "they hold what they will"


def test_first_prompts_unlike_each_other_cost_no_room() -> None:
    growth = ContextGrowth()
    for first in (10, 100, 1_000, 10_000, 100_000) * 8:  # conversations: most have one turn
        growth.add_first_prompt(first)
        growth.program_ended(1)
    assert 0.9 < growth.forecasts_that_fit(126_000) / 126_000 < 1.05


def test_a_head_is_shared_once_another_program_found_it() -> None:
    shared = SharedPrefixIndex(block_tokens=10)
    assert shared.head("abcde").tokens == 0
    shared.record_hit("abxyz", 20)
    assert shared.head("abcde") == shared.head("qbcde") == SharedPrefix("b", 20)
    shared.record_hit("qrs", 9)
    assert shared.head("qrs").tokens == 0
    shared.record_hit("qxy", 10)
    assert shared.head("qrs").tokens == 10


def test_the_heads_that_were_not_found_for_longest_are_forgotten() -> None:
    shared = SharedPrefixIndex(block_tokens=1)
    for name in range(MOST_HEADS + 1):
        shared.record_hit([name, name], 1 + name % 2)
    assert shared.head([0]).tokens == 0 and shared.head([0, 1]).tokens == 2


def test_programs_larger_than_the_cache_hold_up_the_line_no_longer_than_one_of_them() -> None:
    admission = AdmissionRig(KVCapacity(1000), 120.0)
    admission.add_request(ProgramId("busy"), 900)
    for n in range(6):
        admission.on_arrival(float(n), ProgramId(f"giant{n}"), 100_000)
    admission.on_arrival(6.0, ProgramId("small"), 10)
    started = [admission.admit(float(second), False) for second in range(7, 126)]
    assert [program for found in started for program in found] == [f"giant{n}" for n in range(6)]
    admission.remove_program(ProgramId("busy"))
    for n in range(6):
        admission.remove_program(ProgramId(f"giant{n}"))
    assert admission.admit(126.0, False) == ["small"]


def test_turns_that_came_back_fill_no_table() -> None:
    admission = AdmissionRig(KVCapacity(1_000_000), 120.0)
    programs = [ProgramId(f"p{n}") for n in range(20)]
    for program in programs:
        admission.on_arrival(0.0, program, 100, turns=1)
    for second in range(200):
        for program in programs:
            admission.on_pause(float(second), program, 200, expected_s=4000.0)
            admission.on_arrival(second + 0.5, program, 250, turns=2)
    assert len(admission.programs._away) <= 65
    for program in programs:
        admission.on_pause(200.0, program, 200, expected_s=4000.0)
    for _ in range(4):  # of a step each
        admission.expire_absent(4200.0)
    assert admission.programs.in_stage[Stage.OVERDUE] == 20, "none was forgotten"


def test_programs_that_run_must_fit_the_gpu_however_much_a_tier_holds() -> None:
    at = admission(active_tokens=100_000, started_tokens=1_000_000)
    at.on_arrival(0.0, A, 60_000)
    assert admitted(at) == [A]
    at.on_arrival(1.0, B, 60_000)
    assert admitted(at, 1.0) == [], "both would be on the GPU"
    at.on_pause(2.0, A, 60_000, expected_s=900.0)
    assert admitted(at, 2.0) == [B], "the tier has room for the one in a tool call"
