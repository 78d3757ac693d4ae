"""A table of bounded size."""

from __future__ import annotations

from collections import OrderedDict
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
