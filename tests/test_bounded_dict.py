"""The one table that forgets: how many entries it keeps, and which."""

from __future__ import annotations

from continuum_lmcache.bounded_dict import BoundedDict


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
