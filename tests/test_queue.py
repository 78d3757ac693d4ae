"""The waiting queue against the simplest equivalent: a sorted list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from continuum_lmcache.vllm_plugin.waiting_queue import ProgramQueue

HELD = 5  # requests of this rank are held back


def request(name: str, rank: int) -> Any:
    return SimpleNamespace(request_id=name, rank=rank)


class Queues(RuleBasedStateMachine):
    """Requests are added, removed and re-keyed; the queue stays in order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ProgramQueue(lambda r: (r.rank >= HELD, r.rank))
        self.model: list[tuple[int, int, Any]] = []  # rank when keyed, number, request
        self.count = 0

    @rule(rank=st.integers(0, 5))
    def add(self, rank: int) -> None:
        self.count += 1
        new = request(str(self.count), rank)
        self.queue.add_request(new)
        self.model.append((rank, self.count, new))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), rank=st.integers(0, 5))
    def rank_changes_and_is_rekeyed(self, data: st.DataObject, rank: int) -> None:
        entry = data.draw(st.sampled_from(self.model))
        self.count += 1
        entry[2].rank = rank
        self.queue.rekey(entry[2])
        self.model.remove(entry)
        self.model.append((rank, self.count, entry[2]))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rank_changes_behind_the_queues_back(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.model))[2].rank += 3

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        first = min(self.model, key=lambda e: e[:2])
        self.model.remove(first)
        assert self.queue.pop_request() is first[2]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.model))
        self.model.remove(entry)
        self.queue.remove_request(entry[2])

    @invariant()
    def both_agree(self) -> None:
        ordered = [entry[2] for entry in sorted(self.model, key=lambda e: e[:2])]
        assert list(self.queue) == ordered
        assert len(self.queue) == len(ordered) and bool(self.queue) == any(e[0] < HELD for e in self.model)
        assert all(r in self.queue for r in ordered)


Queues.TestCase.settings = settings(max_examples=settings.default.max_examples // 4, stateful_step_count=60)
TestQueues = Queues.TestCase


def test_an_empty_queue_says_so() -> None:
    queue = ProgramQueue(lambda r: (r.rank,))
    for ask in (queue.peek_request, queue.pop_request, queue.head_key):
        with pytest.raises(IndexError, match="empty queue"):
            ask()
    with pytest.raises(ValueError, match="r1 is not in the queue"):
        queue.remove_request(request("r1", 0))


def test_keying_anew_ten_thousand_times_leaves_no_heap_of_stale_entries() -> None:
    queue = ProgramQueue(lambda r: (r.rank,))
    only = request("r1", 0)
    for _ in range(10_000):
        queue.add_request(only)
    assert len(queue) == 1 and len(queue._heap) <= 65
