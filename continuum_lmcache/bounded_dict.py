"""Tables of bounded size: one keeps what was used last, one what is used most."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """At most `most` entries: those that were set, or moved to the end, last. A set entry is at the end."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)  # else it would keep its place
        super().__setitem__(key, value)
        if len(self) > self.most:
            self.popitem(last=False)


class FrequentDict(dict[K, V]):
    """At most `most` entries, those that were counted most often.

    A new entry takes the place of the least counted one, and its count. So whatever else comes, what has more
    than 1/most of all counts is there (Space-Saving: A. Metwally, D. Agrawal, A. El Abbadi, ICDT 2005).
    """

    def __init__(self, most: int, make: Callable[[], V]) -> None:
        super().__init__()
        self.most, self._make = most, make
        self._counts: dict[K, int] = {}

    def count(self, key: K, times: int = 1) -> V:
        """The key's entry, a new one if it has none. It was used `times` times more."""
        if key not in self:
            least = min(self._counts, key=self._counts.__getitem__) if len(self) >= self.most else None
            if least is not None:
                del self[least]
            self[key], self._counts[key] = self._make(), 0 if least is None else self._counts.pop(least)
        self._counts[key] += times
        return self[key]
