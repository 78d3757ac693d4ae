"""Homes: a program's later turns go to the replica of its first one."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.fleet.homes import Homes, hashed_replica
from continuum_lmcache.types import ProgramId

KEY = b"of this server"


def names(count: int) -> list[ProgramId]:
    return [ProgramId(f"run-{i}") for i in range(count)]


def test_a_program_stays_where_it_settled_until_it_is_over() -> None:
    homes = Homes[int](10, KEY)
    assert homes.of(ProgramId("a")) is None
    homes.record(ProgramId("a"), 2)
    assert homes.of(ProgramId("a")) == 2
    homes.forget(ProgramId("a"))
    assert homes.of(ProgramId("a")) is None


def test_of_too_many_programs_those_unheard_of_for_longest_are_forgotten() -> None:
    homes = Homes[int](2, KEY)
    for number, name in enumerate("abc"):
        homes.record(ProgramId(name), number)
        homes.of(ProgramId("a"))  # is heard of all the time
    assert [homes.of(ProgramId(name)) for name in "abc"] == [0, None, 2]


def test_the_hash_spreads_programs_evenly() -> None:
    counts = Counter(hashed_replica(name, range(4), KEY) for name in names(4000))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_one_replica_more_moves_only_the_programs_that_it_takes() -> None:
    moved = [
        name
        for name in names(2000)
        if hashed_replica(name, range(4), KEY) != hashed_replica(name, range(5), KEY)
    ]
    assert all(hashed_replica(name, range(5), KEY) == 4 for name in moved)
    assert 300 < len(moved) < 500


def test_without_the_key_the_replica_cannot_be_predicted() -> None:
    agree = [
        hashed_replica(name, range(4), KEY) == hashed_replica(name, range(4), b"another")
        for name in names(2000)
    ]
    assert 0.2 < sum(agree) / len(agree) < 0.3


@given(st.text(), st.integers(1, 64))
def test_any_name_has_a_replica_that_is_there(name: str, replicas: int) -> None:
    assert 0 <= hashed_replica(ProgramId(name), range(replicas), KEY) < replicas


@given(st.lists(st.tuples(st.sampled_from("solf"), st.integers(0, 9), st.integers(0, 3))), st.integers(1, 5))
def test_the_table_holds_the_last_recorded_home(steps: list[tuple[str, int, int]], most: int) -> None:
    homes = Homes[int](most, KEY)
    known: dict[ProgramId, int] = {}
    for what, number, replica in steps:
        name = ProgramId(str(number))
        if what == "s":
            homes.record(name, replica)
            known[name] = replica
        elif what == "l":
            homes.forget(name)
            known.pop(name, None)
        else:
            assert homes.of(name) in (None, known.get(name))
    if len(known) <= most and all(what != "s" for what, *_ in steps[:-1]):
        assert {name: homes.of(name) for name in known} == known
