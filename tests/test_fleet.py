"""The fleet: where turns go, and what moves. Virtual time, the core alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.fleet.fleet import (
    COOLDOWN_S,
    GONE_S,
    IDLE_S,
    LOOKS,
    MOVE_S,
    PROGRAMS_A_REPLICA,
    REPORT_AGE_S,
    Fleet,
    KnownProgram,
    ReplicaId,
    ReplicaReport,
    Route,
    RouteReason,
)
from continuum_lmcache.types import ProgramId

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")


class Host:
    """A fleet with replicas a, b, ..., which report what ends there."""

    def __init__(self, replicas: int = 2) -> None:
        self.fleet = Fleet()
        self.now_s = 0.0
        self.turns: dict[str, int] = {}
        self.news(0.0, *"abcd"[:replicas])

    def news(self, at_s: float, *names: str, programs: Any = (), **figures: Any) -> None:
        self.now_s = at_s
        for name in names or sorted(self.fleet.replicas):
            self.fleet.on_report(at_s, ReplicaReport(ReplicaId(name), **figures), programs)

    def sends(self, program: str | None, **how: Any) -> Route:
        route = self.fleet.on_arrival(self.now_s, ProgramId(program) if program else None, **how)
        self.fleet.check()
        assert route is not None
        return route

    def runs(self, program: str, **how: Any) -> Route:
        """A whole turn, and its replica's word on it."""
        route = self.sends(program, **how)
        known = KnownProgram(ProgramId(program), route.program_turns + 1, route.program_age_s)
        state = self.fleet.replicas[route.replica]
        self.fleet.on_report(self.now_s, replace(state.report, requests=state.requests), [known])
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


def test_programs_of_a_replica_that_cannot_be_reached_are_divided_among_the_others_and_stay_there() -> None:
    host = Host(3)
    names = [f"p{i}" for i in range(60)]
    homes = {name: host.runs(name).replica for name in names}
    lost = [name for name in names if homes[name] == A]
    after = {name: host.sends(name, gone=(A,)) for name in names}
    for name in names:
        assert after[name].why is (RouteReason.REHOMED if name in lost else RouteReason.HOME)
        assert after[name].replica != A and (name in lost or after[name].replica == homes[name])
        assert after[name].program_turns == 1, "it is not new to the next engine"
    assert [sum(after[name].replica == there for name in lost) for there in (B, C)] == [10, 10]
    assert all(host.sends(name).replica == after[name].replica for name in names), "though a is there again"


def test_a_replica_without_a_report_for_long_is_dropped_and_its_next_report_adds_it() -> None:
    host = Host()
    home = host.runs("p").replica
    host.news(GONE_S + 1, "b" if home == A else "a")
    assert set(host.fleet.replicas) == {A, B} - {home}
    host.news(GONE_S + 2, home)
    assert host.sends("p").replica == home


def test_nothing_new_goes_where_the_report_is_old_and_to_all_in_turn_if_all_are() -> None:
    host = Host()
    host.news(1.0, "a", requests=9)
    host.news(2.0 + REPORT_AGE_S, "a", requests=9)
    assert {host.sends(f"p{i}").replica for i in range(9)} == {A}
    host.now_s += 2 * REPORT_AGE_S
    assert [host.sends(f"q{i}").replica for i in range(4)] == [B] * 4, "it has 18 fewer requests"
    host.news(host.now_s, "b", requests=99)
    assert host.sends("r").replica == B, "its report is fresh"


def test_replicas_that_cannot_be_reached_get_nothing_though_they_are_least_busy() -> None:
    host = Host(3)
    host.news(1.0, "b", requests=5)
    host.news(1.0, "c", requests=7)
    assert host.sends("p", gone=(A,)).replica == B
    assert host.sends("q", gone=(A, B)).replica == C
    assert host.fleet.on_arrival(1.0, ProgramId("r"), gone=(A, B, C)) is None
    assert host.sends("r").replica == A, "the next router may see it"


def test_a_thousand_replicas_fill_evenly_though_a_turn_looks_at_a_few() -> None:
    host = Host(0)
    names = [f"r{i}" for i in range(1000)]
    host.news(0.0, *names)
    for number in range(3000):
        host.fleet.on_arrival(0.0, ProgramId(f"p{number}"))
    assert {state.requests for state in host.fleet.replicas.values()} <= {2, 3, 4}
    for name in names[: 1000 - LOOKS]:
        host.news(1.0, name, requests=9)
    host.now_s = 1.0 + REPORT_AGE_S
    assert host.sends("new").replica in names[: 1000 - LOOKS], "the others' reports are old"


@pytest.mark.parametrize("turn", ["home", "first", "report"])
def test_what_a_turn_or_a_report_costs_does_not_grow_with_the_replicas(turn: str) -> None:
    """Counted in the lines of Python that run."""

    def lines(replicas: int) -> int:
        host = Host(0)
        names = [f"r{i}" for i in range(replicas)]
        host.news(0.0, *names)
        homes = [host.fleet.on_arrival(0.0, ProgramId(f"p{i}")) for i in range(replicas)]
        assert all(homes)
        host.news(1.0, *names)
        count = 0

        def trace(_frame: Any, event: str, _argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for number in range(50):
                if turn == "report":
                    host.fleet.on_report(1.1, ReplicaReport(ReplicaId(names[-1 - number % 9])))
                else:
                    host.fleet.on_arrival(1.1, ProgramId("p1" if turn == "home" else f"new{number}"))
        finally:
            sys.settrace(before)
        return count // 50

    small, large = lines(64), lines(2048)
    assert 0 < large < 1.25 * small


def test_the_tables_tell_when_they_do_not_balance() -> None:
    for spoil, word in (
        (lambda fleet: fleet.homes.update({B: 1}), "counted"),
        (lambda fleet: fleet.replicas.pop(A), "circle"),
    ):
        host = Host()
        host.runs("p")
        spoil(host.fleet)
        with pytest.raises(InvariantError, match=word):
            host.fleet.check()


def test_a_fleet_that_lost_its_state_has_it_again_from_the_replicas_reports() -> None:
    host = Host(2)
    homes = {f"p{i}": host.runs(f"p{i}").replica for i in range(50)}
    fresh = Host(0)
    for replica in (A, B):
        there = [KnownProgram(ProgramId(p), 7, 5.0) for p, home in homes.items() if home == replica]
        fresh.news(1.0, replica, programs=there)
    routes = {name: fresh.sends(name) for name in homes}
    assert {name: route.replica for name, route in routes.items()} == homes
    assert {(r.program_turns, r.program_age_s) for r in routes.values()} == {(7, 5.0)}


def test_of_two_replicas_that_know_a_program_the_one_where_its_latest_turn_began_is_its_home() -> None:
    for order in ("ab", "ba"):
        host = Host()
        for name in order:
            idle_s = 9.0 if name == "a" else 2.0
            host.news(10.0, name, programs=[KnownProgram(ProgramId("p"), 7, 30.0, idle_s)])
        assert host.sends("p").replica == B


def test_a_program_that_was_sent_without_the_fleet_goes_on_where_it_was_sent() -> None:
    host = Host()
    home = host.runs("p").replica
    other = B if home == A else A
    host.news(9.0, other, programs=[KnownProgram(ProgramId("p"), 2, 5.0, idle_s=1.0)])
    assert host.sends("p").replica == other
    late = KnownProgram(ProgramId("p"), 1, 9.0, idle_s=9.0)
    host.news(9.5, home, programs=[late])
    assert host.sends("p").replica == other, "its old home knows it too, from before"


def test_a_request_of_no_program_goes_where_the_fewest_requests_are_and_leaves_nothing() -> None:
    host = Host()
    host.news(1.0, "a", requests=1)
    route = host.sends(None)
    assert (route.replica, route.why) == (B, RouteReason.ALONE) and not host.fleet.programs


def test_without_replicas_there_is_no_route() -> None:
    host = Host(0)
    assert host.fleet.on_arrival(0.0, ProgramId("p")) is None and not host.fleet.programs
    host.news(1.0, "a")
    assert host.fleet.on_arrival(1.0, ProgramId("p"), gone=("a",)) is None


def test_a_program_ends_by_its_homes_word_and_idle_ones_are_forgotten() -> None:
    host = Host()
    for at_s, name in enumerate("pqrs"):
        host.news(float(at_s))
        host.runs(name)
    over = KnownProgram(ProgramId("p"), is_over=True)
    away = B if host.fleet.programs[ProgramId("p")].home == A else A
    host.news(5.0, away, programs=[over])
    assert set(host.fleet.programs) == {"p", "q", "r", "s"}
    host.news(5.0, "b" if away == A else "a", programs=[over])
    assert set(host.fleet.programs) == {"q", "r", "s"}
    host.news(IDLE_S + 2)
    assert set(host.fleet.programs) == {"s"}
    host.news(IDLE_S + 4)
    assert not host.fleet.programs
    host.fleet.check()


def test_as_many_programs_are_known_as_the_replicas_may_serve_and_then_the_idlest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("continuum_lmcache.fleet.fleet.MOST_PROGRAMS", 3)
    monkeypatch.setattr("continuum_lmcache.fleet.fleet.PROGRAMS_A_REPLICA", 2)
    host = Host(2)
    for at_s, name in enumerate("pqrps"):
        host.news(float(at_s))
        host.runs(name)
    assert set(host.fleet.programs) == {"p", "q", "r", "s"}
    host.sends("t")
    assert set(host.fleet.programs) == {"p", "r", "s", "t"}
    host.news(5.0, *"abcd")
    for name in "uvwx":
        host.sends(name)
    assert len(host.fleet.programs) == 8, "four replicas may serve so many"
    assert PROGRAMS_A_REPLICA * 1000 == 10_000_000


# moves ----------------------------------------------------------------------


def waits_at_home(wait_s: float | None = MOVE_S + 1) -> Host:
    """Program p between two turns; its home a is busy."""
    host = Host()
    assert host.runs("p").replica == A
    host.news(1.0, "b", wait_s=0.0)
    host.news(1.0, "a", requests=4, wait_s=wait_s)
    return host


def test_a_move_must_save_a_wait_that_the_kv_is_worth() -> None:
    for here_s, there_s, why in (
        (MOVE_S + 0.1, 0.0, RouteReason.MOVED),
        (MOVE_S, 0.0, RouteReason.HOME),
        (MOVE_S + 0.9, 1.0, RouteReason.HOME),
        (MOVE_S + 1.1, 1.0, RouteReason.MOVED),
    ):
        host = waits_at_home(here_s)
        host.news(1.1, "b", wait_s=there_s)
        assert host.sends("p").why is why, (here_s, there_s)


def test_nothing_moves_where_engines_admit_programs_themselves_and_report_no_wait() -> None:
    assert waits_at_home(None).sends("p").why is RouteReason.HOME
    host = waits_at_home()
    host.news(1.1, "b")
    assert host.sends("p").why is RouteReason.HOME, "nor to such a replica"


def test_nothing_moves_by_an_old_report() -> None:
    for late in "ab":
        host = waits_at_home()
        other = "b" if late == "a" else "a"
        latest = host.fleet.replicas[ReplicaId(other)].report
        host.now_s = 2.0 + REPORT_AGE_S
        host.fleet.on_report(host.now_s, latest)
        assert host.sends("p").why is RouteReason.HOME, late


def test_a_program_moves_between_turns_where_that_pays_and_not_again_while_it_cools() -> None:
    host = waits_at_home()
    route = host.sends("p")
    assert (route.replica, route.why, route.program_turns) == (B, RouteReason.MOVED, 1)
    known = KnownProgram(ProgramId("p"), 2, 2.0)
    for at_s, why in ((0.9 + COOLDOWN_S, RouteReason.HOME), (2.0 + COOLDOWN_S, RouteReason.MOVED)):
        host.news(at_s, "a", wait_s=0.0)
        host.news(at_s, "b", requests=1, wait_s=99.0, programs=[known])
        assert host.sends("p").why is why


def test_a_program_stays_while_a_turn_of_it_is_in_flight_or_may_be() -> None:
    host = waits_at_home()
    busy = ReplicaReport(A, 4, 2 * MOVE_S)
    host.fleet.on_report(1.5, busy, [KnownProgram(ProgramId("p"), 1, 1.5, is_live=True)])
    host.now_s = 2.0
    assert host.sends("p").why is RouteReason.HOME, "home says so"
    host.fleet.on_report(2.5, busy, [KnownProgram(ProgramId("p"), 2, 2.5, idle_s=1.0)])
    assert host.sends("p").why is RouteReason.HOME, "home does not know the latest turn yet"
    host.fleet.on_report(3.5, busy, [KnownProgram(ProgramId("p"), 3, 3.5, idle_s=0.5)])
    host.now_s = 3.6
    assert host.sends("p").why is RouteReason.MOVED


def test_a_turn_that_home_alone_can_answer_does_not_move() -> None:
    assert waits_at_home().sends("p", may_move=False).why is RouteReason.HOME


def test_several_programs_do_not_all_move_to_the_same_idle_replica() -> None:
    host = Host(2)
    names = [f"p{i}" for i in range(8)]
    host.news(0.0, "b", requests=99)
    assert {host.runs(name).replica for name in names} == {A}
    host.news(1.0, "b", wait_s=0.0)
    host.news(1.0, "a", requests=4, wait_s=2 * MOVE_S)
    moved = [host.sends(name).why is RouteReason.MOVED for name in names]
    assert moved == [True] * 4 + [False, True] * 2, "then it has as many requests as home"
