"""The hash by which processes agree on a program's replica."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.fleet.homes import hashed_replica
from continuum_lmcache.types import ProgramId

KEY = b"of this server"


def names(count: int) -> list[ProgramId]:
    return [ProgramId(f"run-{i}") for i in range(count)]


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
