"""The fleet: where turns go, when new programs start, what moves. Virtual time, the core alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.fleet.fleet import Fleet, FleetConfig, Held, KnownProgram, Refused, Route, RouteReason
from continuum_lmcache.fleet.homes import hashed_replica
from continuum_lmcache.fleet.moves import Limits, Move, MoveCase, ReplicaOption, Stay, decide
from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.reload.cost_model import UNMEASURED, PrefillCurve
from continuum_lmcache.types import ProgramId, TurnId

KEY = b"of this fleet"
GPU_TOKENS = 10_000
A, B = ReplicaId("a"), ReplicaId("b")


class Host:
    """A fleet with replicas a, b, ..., whose turns are numbered."""

    def __init__(self, replicas: int = 2, **settings: Any) -> None:
        self.fleet = Fleet(FleetConfig(**settings), KEY)
        self.now_s = 0.0
        self.numbers = 0
        for name in "abcd"[:replicas]:
            self.fleet.on_replica_join(0.0, report(name))

    def news(self, at_s: float, *names: str, **figures: Any) -> None:
        self.now_s = at_s
        for name in names or sorted(self.fleet.placement.replicas):
            self.fleet.on_report(at_s, report(name, at_s, **figures))

    def sends(self, program: str | None, tokens: int = 100, **says: Any) -> Route | Held | Refused:
        self.numbers += 1
        name = ProgramId(program) if program else None
        return self.fleet.on_arrival(self.now_s, TurnId(f"t{self.numbers}"), name, tokens, **says)

    def runs(self, program: str, tokens: int = 100) -> Route:
        """A whole turn."""
        route = self.sends(program, tokens)
        assert isinstance(route, Route)
        self.fleet.on_pause(self.now_s, route.turn, tokens)
        return route


def report(name: str, at_s: float = 0.0, **figures: Any) -> ReplicaReport:
    return ReplicaReport(ReplicaId(name), at_s, GPU_TOKENS, **figures)


def test_first_turns_go_where_the_fewest_requests_are_and_later_ones_home() -> None:
    host = Host()
    first = [host.runs("p"), host.sends("q"), host.sends("r"), host.sends("s")]
    assert [r.replica for r in first if isinstance(r, Route)] == ["a", "b", "a", "b"], "of equals the emptier"
    for program, route in zip("pqrs", first, strict=True):
        assert isinstance(route, Route)
        again = host.sends(program)
        assert isinstance(again, Route)
        assert (again.replica, again.why) == (route.replica, RouteReason.HOME)


def test_requests_that_came_another_way_are_counted_as_reported() -> None:
    host = Host()
    host.news(1.0, "a", requests=5)
    assert [r.replica for r in (host.sends(n) for n in "pqrst") if isinstance(r, Route)] == ["b"] * 5


def test_a_route_tells_the_engine_that_its_program_is_under_way() -> None:
    host = Host()
    host.runs("p"), host.runs("p")
    host.now_s = 30.0
    route = host.sends("p")
    assert isinstance(route, Route)
    assert (route.program_turns, route.program_age_s) == (2, 30.0)


def test_a_program_that_fits_nowhere_waits_in_one_line_and_starts_where_room_is_made() -> None:
    host = Host(2)
    big = [host.sends(f"big{i}", 8_000) for i in range(2)]
    assert {r.replica for r in big if isinstance(r, Route)} == {A, B}
    assert isinstance(host.sends("p", 8_000), Held) and isinstance(host.sends("q", 8_000), Held)
    assert host.fleet.admit(1.0) == ()
    assert isinstance(big[1], Route)
    host.fleet.on_last_turn_end(2.0, big[1].turn)
    host.news(2.0)
    (started,) = host.fleet.admit(2.0)
    assert (started.turn, started.replica) == ("t3", big[1].replica)


def test_over_a_stock_engine_a_program_in_a_tool_call_counts_for_minutes_and_not_for_ever() -> None:
    host = Host(1, max_wait_s=10_000.0)
    for at_s in (0.0, 1.0, 2.0):
        host.now_s = at_s
        host.runs("p", 9_000)
    host.news(290.0, requests=1)
    held = host.sends("q", 2_000)
    assert isinstance(held, Held)
    host.news(310.0, requests=1)
    assert [r.turn for r in host.fleet.admit(310.0)] == [held.turn]


def test_who_asks_again_for_a_turn_in_the_line_gets_its_route_once_there_is_room() -> None:
    host = Host(1)
    first = host.sends("big", 8_000)
    assert isinstance(first, Route) and isinstance(host.sends("p", 8_000), Held)
    assert isinstance(host.fleet.on_arrival(1.0, TurnId("t2"), ProgramId("p"), 8_000), Held)
    host.fleet.on_abort(2.0, first.turn)
    host.news(2.0)
    route = host.fleet.on_arrival(2.0, TurnId("t2"), ProgramId("p"), 8_000)
    assert isinstance(route, Route) and route == host.fleet.on_arrival(
        3.0, TurnId("t2"), ProgramId("p"), 8_000
    )


def test_the_engines_own_headroom_is_taken_and_what_was_sent_since_comes_off_it() -> None:
    host = Host(1)
    host.news(1.0, requests=3, headroom_tokens=500.0)
    assert isinstance(host.sends("p", 200), Route)
    assert isinstance(host.sends("q", 200), Held)
    host.news(1.5, requests=4, headroom_tokens=500.0)
    assert [r.turn for r in host.fleet.admit(1.5)] == ["t2"]


def test_nothing_starts_where_the_replica_holds_programs_itself() -> None:
    host = Host()
    host.news(1.0, "a", requests=1, headroom_tokens=9000.0, pending_programs=1)
    host.news(1.0, "b", requests=7, headroom_tokens=9000.0)
    assert [r.replica for r in (host.sends("p"), host.sends("q")) if isinstance(r, Route)] == [B, B]


def test_an_idle_replica_takes_one_program_without_room() -> None:
    host = Host()
    host.news(1.0, "a", headroom_tokens=-1.0)
    host.news(1.0, "b", headroom_tokens=-1.0, requests=2)
    found = [host.sends(name, 9_000) for name in "pq"]
    assert isinstance(found[0], Route) and (found[0].replica, found[0].why) == (A, RouteReason.LET_IN)
    assert isinstance(found[1], Held)


def test_the_first_in_line_starts_after_max_wait_s_though_it_fits_nowhere() -> None:
    host = Host(1, max_wait_s=20.0)
    host.sends("big", 9_000)
    host.sends("p", 9_000)
    for at_s, started in ((19.9, 0), (20.0, 1)):
        host.news(at_s, requests=1)
        assert len(host.fleet.admit(at_s)) == started


def test_a_full_line_refuses_new_programs_and_says_when_to_come_again() -> None:
    host = Host(1, max_line=2)
    host.sends("big", 9_000)
    assert isinstance(host.sends("p", 9_000), Held) and isinstance(host.sends("q", 9_000), Held)
    refused = host.sends("r", 9_000)
    assert isinstance(refused, Refused) and 1.0 <= refused.retry_after_s <= 120.0
    assert isinstance(host.sends("p", 9_000), Held), "one more turn of a program in the line is no new one"
    assert isinstance(host.sends("big", 9_000), Route)
    assert ProgramId("r") not in host.fleet.programs


def test_the_figure_of_a_refusal_follows_the_lines_speed() -> None:
    host = Host(1, max_line=4, max_wait_s=1000.0)
    for at_s in range(20):  # a program each ten seconds
        host.news(10.0 * at_s)
        route = host.sends(f"p{at_s}", 9_000)
        assert isinstance(route, Route)
        if at_s < 19:
            host.fleet.on_last_turn_end(host.now_s + 1, route.turn)
    for name in "wxyz":
        host.sends(name, 9_000)
    refused = host.sends("late", 9_000)
    assert isinstance(refused, Refused) and 30.0 < refused.retry_after_s < 50.0


def test_programs_of_a_dead_replica_go_before_new_ones_oldest_first_as_many_as_fit() -> None:
    host = Host(2, max_rehome_s=5.0)
    for at_s, name in enumerate("pqrs"):
        host.now_s = float(at_s)
        host.runs(name, 2_000)
    lost = [name for name in "pqrs" if host.fleet.home(ProgramId(name)) == A]
    host.sends("new", 4_000)
    host.fleet.on_replica_death(5.0, A)
    host.now_s = 5.0
    host.news(5.0, "b", requests=1, headroom_tokens=-1.0)
    late, early = host.sends(lost[1], 4_000), host.sends(lost[0], 4_000)
    assert isinstance(late, Held) and isinstance(early, Held)
    host.news(6.0, "b", requests=1, headroom_tokens=9_000.0)
    assert [(r.turn, r.why) for r in host.fleet.admit(6.0)] == [(early.turn, RouteReason.REHOMED)]
    host.news(10.0, "b", requests=1, headroom_tokens=-1.0)
    assert [r.turn for r in host.fleet.admit(10.0)] == [late.turn], "nobody under way waits longer"


def test_a_program_that_lost_its_replica_waits_no_longer_though_older_ones_come_before_it() -> None:
    host = Host(2, max_rehome_s=5.0, max_wait_s=10_000.0)
    host.news(0.0, "b", requests=9)
    for at_s, name in enumerate("pqr"):
        host.now_s = float(at_s)
        assert host.runs(name).replica == A
    host.fleet.on_replica_death(3.0, A)
    asked: dict[str, float] = {}
    waits: dict[str, float] = {}
    for at_s in range(4, 20):
        host.news(float(at_s), "b", requests=9, headroom_tokens=-1.0)
        if at_s in (4, 8, 12):  # the youngest first
            name = "rqp"[at_s // 4 - 1]
            asked[name] = host.now_s
            host.sends(name)
        for started in (name for name in asked if host.fleet.home(ProgramId(name)) == B):
            waits.setdefault(started, host.now_s - asked[started])
        host.fleet.admit(host.now_s)
    assert waits.keys() == set("pqr") and max(waits.values()) <= 6.0, "and the second until the next look"


def test_a_turn_that_died_with_its_replica_is_asked_for_anew_and_its_program_is_not_new() -> None:
    host = Host()
    route = host.sends("p", 3_000)
    assert isinstance(route, Route)
    host.fleet.on_replica_death(1.0, route.replica)
    host.now_s = 1.0
    again = host.sends("p", 3_000)
    assert isinstance(again, Route) and again.why is RouteReason.REHOMED and again.replica != route.replica


def test_a_replica_that_drains_gets_no_turn_and_its_turns_may_end() -> None:
    host = Host()
    route = host.sends("p")
    assert isinstance(route, Route)
    host.fleet.on_replica_drain(route.replica)
    host.fleet.on_pause(1.0, route.turn, 100)
    assert host.runs("p").replica != route.replica
    host.fleet.check()


def test_a_replica_that_joins_takes_no_program_that_has_a_home() -> None:
    host = Host()
    homes = {f"p{i}": host.runs(f"p{i}").replica for i in range(20)}
    host.fleet.on_replica_join(1.0, report("c", 1.0))
    assert {name: host.runs(name).replica for name in homes} == homes
    assert host.runs("new").replica in "abc"


def test_old_reports_stop_moves_then_first_turns_and_never_later_turns() -> None:
    host = Host(2, first_turn_age_s=30.0)
    host.runs("p")
    assert host.fleet.home(ProgramId("p")) == A
    host.now_s = 31.0
    host.fleet.on_report(31.0, report("b", 31.0, requests=9))
    assert [host.runs(name).replica for name in ("q", "r")] == [B, B]
    assert host.runs("p").replica == A


def test_without_any_news_first_turns_go_by_the_hash() -> None:
    host = Host(2)
    host.now_s = 100.0
    for name in (f"p{i}" for i in range(20)):
        route = host.sends(name)
        assert isinstance(route, Route)
        assert (route.replica, route.why) == (
            hashed_replica(ProgramId(name), [A, B], KEY),
            RouteReason.HASHED,
        )


def test_homes_are_the_same_after_a_restart() -> None:
    host = Host(2)
    homes = {f"p{i}": host.runs(f"p{i}").replica for i in range(50)}
    fresh = Host(2)
    for replica in (A, B):
        there = [KnownProgram(ProgramId(p), 1, 100, 5.0) for p, home in homes.items() if home == replica]
        fresh.fleet.restore(0.0, replica, there)
    assert {name: fresh.runs(name).replica for name in homes} == homes


def test_of_two_replicas_that_remember_a_program_the_one_with_more_turns_is_its_home() -> None:
    host = Host(2)
    for replica, turns in ((A, 3), (B, 7), (A, 2)):
        host.fleet.restore(0.0, replica, [KnownProgram(ProgramId("p"), turns, 100, 5.0)])
    route = host.sends("p")
    assert isinstance(route, Route) and (route.replica, route.program_turns) == (B, 7)
    host.fleet.check()


def test_a_program_in_the_line_goes_to_the_replica_that_turns_out_to_know_it() -> None:
    host = Host(2)
    for name in ("big-0", "big-1"):
        host.sends(name, 9_000)
    assert isinstance(host.sends("p", 9_000), Held)
    host.fleet.restore(1.0, B, [KnownProgram(ProgramId("p"), 7, 100, 5.0)])
    route = host.fleet.on_arrival(1.0, TurnId("t3"), ProgramId("p"), 9_000)
    assert isinstance(route, Route)
    assert (route.replica, route.why, route.program_turns) == (B, RouteReason.HOME, 7)
    assert not host.fleet.waiting and not host.fleet.placement.line
    host.fleet.check()


def test_a_program_that_says_it_is_under_way_passes_the_line() -> None:
    host = Host(1)
    host.sends("big", 9_000)
    route = host.sends("p", 9_000, claimed_turns=7, claimed_age_s=60.0)
    assert isinstance(route, Route)
    assert (route.why, route.program_turns, route.program_age_s) == (RouteReason.HASHED, 7, 60.0)


def test_a_request_of_no_program_never_waits_and_leaves_nothing() -> None:
    host = Host(1)
    host.sends("big", 9_000)
    route = host.sends(None, 9_000)
    assert isinstance(route, Route) and route.why is RouteReason.ALONE
    host.fleet.on_pause(1.0, route.turn, 9_000)
    assert len(host.fleet.programs) == 1
    host.fleet.check()


def test_without_replicas_a_program_waits_and_a_request_of_none_is_refused() -> None:
    host = Host(0)
    assert isinstance(host.sends("p"), Held) and isinstance(host.sends(None), Refused)
    host.fleet.on_replica_join(1.0, report("a", 1.0))
    assert [r.turn for r in host.fleet.admit(1.0)] == ["t1"]


def test_the_programs_unheard_of_for_longest_are_forgotten() -> None:
    host = Host(2, max_programs=3)
    for name in "pqr":
        host.runs(name)
    host.runs("p"), host.runs("s")
    assert set(host.fleet.programs) == {"p", "r", "s"} and host.fleet.forgotten == 1
    host.news(4000.0)
    assert not host.fleet.programs
    host.fleet.check()


# moves ----------------------------------------------------------------------

HOME = ReplicaOption(A, wait_s=20.0, reload_s=0.0)
AWAY = ReplicaOption(B, wait_s=1.0, reload_s=3.0)
CASE = MoveCase(HOME, [AWAY], math.inf)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (CASE, Move(B)),
        (
            replace(CASE, candidates=[replace(AWAY, reload_s=9.0)]),
            Stay("cost"),
        ),  # 19 s saved, 2 x 9 s and 2 s
        (replace(CASE, candidates=[replace(AWAY, has_room=False)]), Stay("room")),
        (replace(CASE, candidates=[replace(AWAY, is_fresh=False)]), Stay("room")),
        (replace(CASE, home=replace(HOME, is_fresh=False)), Stay("stale")),
        (replace(CASE, since_move_s=29.9), Stay("cooldown")),
        (
            replace(CASE, candidates=[AWAY, replace(AWAY, replica=ReplicaId("c"), reload_s=0.5)]),
            Move(ReplicaId("c")),
        ),
    ],
)
def test_a_move_must_save_more_than_its_kv_costs(case: MoveCase, said: Move | Stay) -> None:
    assert decide("cost", case, Limits()) == said


def test_without_a_mover_every_program_stays() -> None:
    assert decide("never", CASE, Limits()) == Stay("never")


def waits_at_home(**settings: Any) -> Host:
    """Program p's home is a, where a later turn waits for 20 s, and b has room."""
    host = Host(2, **settings)
    host.runs("p")
    host.news(1.0, "a", requests=4, oldest_returning_wait_s=20.0)
    host.news(1.0, "b")
    return host


def test_a_program_moves_between_turns_only_and_stays_where_it_went() -> None:
    host = waits_at_home()
    route = host.sends("p")
    assert isinstance(route, Route)
    assert (route.replica, route.moved_from, route.why) == (B, A, RouteReason.MOVED)
    host.news(2.0, "b", oldest_returning_wait_s=99.0)
    host.news(2.0, "a")
    beside = host.sends("p")
    assert isinstance(beside, Route) and beside.replica == B, "a live turn keeps it there"
    for turn in (route.turn, beside.turn):
        host.fleet.on_pause(2.0, turn, 200)
    cooled = host.sends("p")
    assert isinstance(cooled, Route) and cooled.replica == B, "and so does the cooldown"
    assert host.fleet.stays["cooldown"] == 1 and host.fleet.thrash == 0


def too_many_at_home(**figures: Any) -> Host:
    """p is between turns and nine others' turns run, all on a: contexts four times its memory. b joins."""
    host = Host(1, margin_s=0.5)
    host.news(0.0, **figures)
    for program in "pqrstuvwxy":
        route = host.sends(program, 4_000, claimed_turns=3)
        assert isinstance(route, Route)
        host.fleet.on_pause(0.0, route.turn, 4_000)
    for program in "qrstuvwxy":
        host.sends(program, 4_000)
    host.fleet.on_replica_join(0.0, report("b", **figures))
    return host


def test_a_program_leaves_a_stock_engine_that_has_no_room_for_the_contexts_it_serves() -> None:
    """The recomputation there costs no less than elsewhere."""
    host = too_many_at_home()
    route = host.sends("p", 4_000)
    assert isinstance(route, Route) and (route.replica, route.moved_from) == (B, A), host.fleet.stays
    host.fleet.check()


def test_an_engine_that_tells_its_headroom_is_taken_to_hold_what_it_let_in() -> None:
    host = too_many_at_home(headroom_tokens=20_000.0)
    route = host.sends("p", 4_000)
    assert isinstance(route, Route) and route.replica == A


def test_nothing_moves_by_a_report_that_is_old() -> None:
    host = waits_at_home()
    host.now_s = 2.6
    route = host.sends("p")
    assert isinstance(route, Route) and route.replica == A
    assert host.fleet.stays == {"no-wait": 1}, "a wait that is no news is none"


@pytest.mark.parametrize(("tokens", "moves"), [(100, True), (900, False)])
def test_a_move_counts_the_whole_context_as_computed_although_a_tier_is_shared(
    tokens: int, moves: bool
) -> None:
    """The tier may have dropped it by then: 18 s of prefill are too much for 20 s of waiting, 2 s are not."""
    curve = PrefillCurve(0.0, 0.02, 0.0, samples=9)
    shares = {"costs": replace(UNMEASURED, prefill=curve), "tier_tokens": 1_000_000}
    host = Host(2)
    host.runs("p", tokens)
    host.news(1.0, "a", requests=4, oldest_returning_wait_s=20.0, **shares)
    host.news(1.0, "b", **shares)
    route = host.sends("p", tokens)
    assert isinstance(route, Route) and (route.replica == B) == moves


@pytest.mark.parametrize(
    "wrong",
    [{"moover": "cost"}, {"mover": "best"}, {"max_wait_s": -1}, {"max_line": "x"}, {"max_line": 0}],
)
def test_a_setting_that_is_wrong_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"\bfleet\.{next(iter(wrong))}\b"):
        FleetConfig.load(wrong)
    assert FleetConfig.load({"mover": "never", "max_line": "7"}).max_line == 7
