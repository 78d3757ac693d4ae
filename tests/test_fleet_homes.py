"""The hash of a program's name by which processes agree."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.fleet.homes import digest
from continuum_lmcache.types import ProgramId

KEY = b"of this server"


def test_the_hash_spreads_programs_evenly_and_cannot_be_predicted_without_the_key() -> None:
    names = [ProgramId(f"run-{i}") for i in range(4000)]
    ours, others = ([int.from_bytes(digest(n, key)) % 4 for n in names] for key in (KEY, b"another"))
    counts = Counter(ours)
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 1.15 * min(counts.values())
    agree = sum(a == b for a, b in zip(ours, others, strict=True)) / len(names)
    assert 0.2 < agree < 0.3


@given(st.text())
def test_any_name_has_a_hash_and_always_the_same(name: str) -> None:
    assert len(digest(ProgramId(name), KEY)) == 16 and digest(ProgramId(name), KEY) == digest(
        ProgramId(name), KEY
    )
