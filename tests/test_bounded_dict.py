"""The tables that forget: how many entries they keep, and which."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.bounded_dict import BoundedDict, FrequentDict


def test_the_entries_that_were_set_last_are_kept() -> None:
    table: BoundedDict[str, int] = BoundedDict(2)
    for name, number in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        table[name] = number
    assert list(table.items()) == [("a", 3), ("c", 4)]


def test_an_entry_that_is_used_is_kept_by_moving_it_to_the_end() -> None:
    table: BoundedDict[str, int] = BoundedDict(2)
    table["a"], table["b"] = 1, 2
    table.move_to_end("a")
    table["c"] = 3
    assert list(table) == ["a", "c"]


def test_an_entry_that_is_counted_often_outlives_any_number_that_are_counted_once() -> None:
    table: FrequentDict[str, list[int]] = FrequentDict(4, list)
    for _ in range(300):
        table.count("often").append(1)
    for number in range(500):
        table.count(f"once-{number}").append(1)
    assert len(table) == 4 and len(table["often"]) == 300
    assert table["once-499"] == [1], "a new entry begins empty, with the count of the one that it replaced"


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 8))
def test_what_has_more_than_one_part_in_most_of_all_counts_is_there(keys: list[int], most: int) -> None:
    table: FrequentDict[int, list[int]] = FrequentDict(most, list)
    for key in keys:
        table.count(key)
    frequent = {key for key, times in Counter(keys).items() if times > len(keys) / most}
    assert frequent <= table.keys() and len(table) <= most
