"""The fleet: where turns go, and what moves. Virtual time, the core alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from continuum_lmcache.fleet.fleet import (
    GONE_S,
    Fleet,
    KnownProgram,
    ReplicaId,
    ReplicaReport,
    Route,
    RouteReason,
)
from continuum_lmcache.fleet.homes import hashed_replica
from continuum_lmcache.reload.cost_model import PrefillCurve
from continuum_lmcache.types import ProgramId

KEY = b"of this fleet"
A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
SECOND_A_TOKEN = PrefillCurve(0.0, 1.0, 0.0, samples=1)


class Host:
    """A fleet with replicas a, b, ..., which report what ends there."""

    def __init__(self, replicas: int = 2, **settings: Any) -> None:
        self.fleet = Fleet(KEY, **settings)
        self.now_s = 0.0
        self.turns: dict[str, int] = {}
        self.news(0.0, *"abcd"[:replicas])

    def news(self, at_s: float, *names: str, programs: Any = (), **figures: Any) -> None:
        self.now_s = at_s
        for name in names or sorted(self.fleet.replicas):
            self.fleet.on_report(at_s, ReplicaReport(ReplicaId(name), at_s, **figures), programs)

    def sends(self, program: str | None, **how: Any) -> Route:
        route = self.fleet.on_arrival(self.now_s, ProgramId(program) if program else None, **how)
        self.fleet.check()
        assert route is not None
        return route

    def runs(self, program: str, tokens: int = 100, **how: Any) -> Route:
        """A whole turn, and its replica's word on it."""
        route = self.sends(program, **how)
        known = KnownProgram(ProgramId(program), route.program_turns + 1, tokens, route.program_age_s)
        latest = self.fleet.replicas[route.replica].report
        self.fleet.on_report(self.now_s, latest, [known])
        return route


def test_a_new_program_goes_where_the_fewest_requests_are_and_later_turns_home() -> None:
    host = Host()
    first = {program: host.sends(program).replica for program in "pqrs"}
    assert list(first.values()) == ["a", "b", "a", "b"]
    host.news(1.0, requests=2)
    host.news(1.0, "a", requests=9)
    assert host.sends("new").replica == B
    assert {program: host.sends(program).replica for program in "pqrs"} == first
    assert host.fleet.routes[RouteReason.HOME] == 4


def test_of_replicas_with_as_many_requests_the_one_with_the_fewest_programs_starts_one() -> None:
    host = Host()
    for at_s, expected in enumerate("abab"):
        host.news(float(at_s))  # the earlier turns have ended
        assert host.runs(f"p{at_s}").replica == expected


def test_what_was_sent_since_a_report_counts_until_the_next_one() -> None:
    host = Host()
    host.news(1.0, "a", requests=2)
    assert [host.sends(name).replica for name in "pqrs"] == [B, B, A, B]
    host.news(2.0, "b", requests=1)
    assert host.sends("t").replica == B


def test_a_route_tells_the_engine_that_its_program_has_started() -> None:
    host = Host()
    host.runs("p"), host.runs("p")
    host.now_s = 2.0
    route = host.sends("p")
    assert (route.program_turns, route.program_age_s) == (2, 2.0)


def test_programs_of_a_dead_replica_are_divided_by_a_hash_and_stay_there() -> None:
    host = Host(3)
    names = [f"p{i}" for i in range(60)]
    homes = {name: host.runs(name).replica for name in names}
    lost = [name for name in names if homes[name] == A]
    after = {name: host.sends(name, visible=(B, C)) for name in names}
    for name in names:
        assert after[name].replica == (
            hashed_replica(ProgramId(name), [B, C], KEY) if name in lost else homes[name]
        )
        assert after[name].why is (RouteReason.REHOMED if name in lost else RouteReason.HOME)
        assert after[name].program_turns == 1, "it is not new to the next engine"
    assert {after[name].replica for name in lost} == {B, C}
    assert all(host.sends(name).replica == after[name].replica for name in names), "though a is there again"


def test_a_replica_without_a_report_for_long_is_dropped_and_its_next_report_adds_it() -> None:
    host = Host()
    home = host.runs("p").replica
    host.news(GONE_S + 1, "b" if home == A else "a")
    assert set(host.fleet.replicas) == {A, B} - {home}
    host.news(GONE_S + 2, home)
    assert host.sends("p").replica == home


def test_without_a_fresh_report_new_programs_go_by_the_hash() -> None:
    host = Host()
    host.now_s = 20.0
    for name in (ProgramId(f"p{i}") for i in range(20)):
        route = host.sends(name)
        assert (route.replica, route.why) == (hashed_replica(name, [A, B], KEY), RouteReason.HASHED)


def test_a_fleet_that_lost_its_state_has_it_again_from_the_replicas_reports() -> None:
    host = Host(2)
    homes = {f"p{i}": host.runs(f"p{i}").replica for i in range(50)}
    fresh = Host(0)
    for replica in (A, B):
        there = [KnownProgram(ProgramId(p), 7, 100, 5.0) for p, home in homes.items() if home == replica]
        fresh.news(1.0, replica, programs=there)
    routes = {name: fresh.sends(name) for name in homes}
    assert {name: route.replica for name, route in routes.items()} == homes
    assert {(r.program_turns, r.program_age_s) for r in routes.values()} == {(7, 5.0)}


@pytest.mark.parametrize(("a", "b", "home"), [((7, 0), (3, 0), A), ((3, 0), (7, 0), B), ((3, 1), (7, 0), A)])
def test_of_two_replicas_that_know_a_program_the_one_with_a_turn_or_more_turns_is_its_home(
    a: tuple[int, int], b: tuple[int, int], home: str
) -> None:
    host = Host(2)
    for name, (turns, live) in (("a", a), ("b", b), ("a", a)):
        host.news(1.0, name, programs=[KnownProgram(ProgramId("p"), turns, 100, 5.0, live)])
    assert host.sends("p").replica == home


def test_a_program_that_only_its_router_knows_goes_on_at_the_replica_that_it_names() -> None:
    host = Host()
    host.news(1.0, "a", requests=9)
    route = host.sends("p", home="a")
    assert (route.replica, route.why, route.program_turns) == (A, RouteReason.HOME, 1)
    assert host.sends("p", home="b").replica == A, "the fleet knows better than one router"
    assert host.sends("q", home="gone").replica == B


def test_a_request_of_no_program_goes_where_the_fewest_requests_are_and_leaves_nothing() -> None:
    host = Host()
    host.news(1.0, "a", requests=1)
    route = host.sends(None)
    assert (route.replica, route.why) == (B, RouteReason.ALONE) and not host.fleet.programs


def test_without_replicas_there_is_no_route() -> None:
    host = Host(0)
    assert host.fleet.on_arrival(0.0, ProgramId("p")) is None and not host.fleet.programs
    host.news(1.0, "a")
    assert host.fleet.on_arrival(1.0, ProgramId("p"), visible=("b",)) is None


def test_a_program_ends_by_its_homes_word_and_idle_ones_and_the_oldest_of_too_many_are_forgotten() -> None:
    host = Host()
    host.fleet.most_programs = 3
    for at_s, name in enumerate("pqrps"):
        host.news(float(at_s))
        host.runs(name)
    assert set(host.fleet.programs) == {"p", "r", "s"}
    host.news(5.0, "a", programs=[KnownProgram(ProgramId("p"), 0, 0, 0.0, is_over=True)])
    host.news(5.0, "b", programs=[KnownProgram(ProgramId("p"), 0, 0, 0.0, is_over=True)])
    assert set(host.fleet.programs) == {"r", "s"}
    host.news(3604.0)
    assert not host.fleet.programs
    host.fleet.check()


# moves ----------------------------------------------------------------------


def waits_at_home(**settings: Any) -> Host:
    """Program p between two turns, with a context of 3 tokens of a second each; its home a is busy."""
    host = Host(**settings)
    assert host.runs("p", tokens=3).replica == A
    host.news(1.0, "b", prefill=SECOND_A_TOKEN)
    host.news(1.0, "a", requests=4, wait_s=20.0, prefill=SECOND_A_TOKEN)
    return host


@pytest.mark.parametrize(
    ("away", "why"),
    [
        ({}, RouteReason.MOVED),  # 20 s saved, 2 x 3 s and 2 s
        ({"wait_s": 11.9}, RouteReason.MOVED),
        ({"wait_s": 12.0}, RouteReason.HOME),
        ({"prefill": PrefillCurve(0.0, 3.0, 0.0, samples=1)}, RouteReason.HOME),
    ],
)
def test_a_move_must_save_more_than_its_kv_costs(away: dict[str, Any], why: RouteReason) -> None:
    host = waits_at_home()
    host.news(1.1, "b", **{"prefill": SECOND_A_TOKEN} | away)
    assert host.sends("p").why is why


def test_nothing_moves_by_an_old_report_and_of_two_replicas_the_better_one_gets_the_program() -> None:
    for late, now_s, target in (("", 1.0, C), ("a", 4.5, A), ("bc", 4.5, A), ("c", 4.5, B)):
        host = waits_at_home(replicas=3)
        host.news(1.0, "b", wait_s=1.0, prefill=SECOND_A_TOKEN)
        host.news(1.0, "c", prefill=SECOND_A_TOKEN)
        for name in sorted({*"abc"} - {*late}):
            latest = host.fleet.replicas[ReplicaId(name)].report
            host.fleet.on_report(now_s, replace(latest, at_s=now_s))
        host.now_s = now_s
        assert host.sends("p").replica == target, late


def test_a_program_moves_between_turns_where_that_pays_and_not_again_while_it_cools() -> None:
    host = waits_at_home(cooldown_s=30.0)
    route = host.sends("p")
    assert (route.replica, route.why, route.program_turns) == (B, RouteReason.MOVED, 1)
    for at_s, why in ((30.9, RouteReason.HOME), (32.0, RouteReason.MOVED)):
        host.news(at_s, "a", prefill=SECOND_A_TOKEN)
        host.news(at_s, "b", wait_s=99.0, prefill=SECOND_A_TOKEN)
        assert host.sends("p").why is why


def test_a_program_stays_while_a_turn_of_it_is_in_flight_or_may_be() -> None:
    host = waits_at_home()
    busy = ReplicaReport(A, 1.5, 4, 20.0, SECOND_A_TOKEN)
    host.fleet.on_report(1.5, busy, [KnownProgram(ProgramId("p"), 1, 3, 1.5, live=1)])
    host.now_s = 2.0
    assert host.sends("p").why is RouteReason.HOME, "home says so"
    assert host.sends("p").why is RouteReason.HOME, "home has not spoken since"
    host.fleet.on_report(2.5, replace(busy, at_s=2.5), [KnownProgram(ProgramId("p"), 3, 3, 2.5)])
    host.now_s = 2.6
    assert host.sends("p").why is RouteReason.MOVED


def test_a_turn_that_home_alone_can_answer_does_not_move_and_no_setting_makes_all_stay() -> None:
    assert waits_at_home().sends("p", may_move=False).why is RouteReason.HOME
    assert waits_at_home(mover="never").sends("p").why is RouteReason.HOME


def test_several_programs_do_not_all_move_to_the_same_idle_replica() -> None:
    host = Host(2)
    names = [f"p{i}" for i in range(8)]
    host.news(0.0, "b", requests=99)
    assert {host.runs(name, tokens=3).replica for name in names} == {A}
    host.news(1.0, "b", prefill=SECOND_A_TOKEN)
    host.news(1.0, "a", wait_s=20.0, prefill=SECOND_A_TOKEN)
    moved = [host.sends(name).why is RouteReason.MOVED for name in names]
    assert sum(moved) == 4, "each brings 3 s of work, and must save 8 s"
