"""The contract of every TierStore: one suite over all of them (tier_store.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from contract.stores import STORES, StoreUnderTest

from continuum_lmcache.reload.tier_store import KVTransfer, TierHit
from continuum_lmcache.types import Tier

STEPS = 300
Make = Callable[[int, int], StoreUnderTest]


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Stores of the kind under test; each is checked and closed in the end."""
    request.getfixturevalue("model")
    made: list[StoreUnderTest] = []

    def factory(dram_chunks: int, ssd_chunks: int) -> StoreUnderTest:
        made.append(STORES[request.param](dram_chunks, ssd_chunks))
        return made[-1]

    yield factory
    for store in made:
        store.check()
        store.close()


class Programs:
    """A few agent programs with a common system prompt, in a random order; some end, some start again."""

    def __init__(self, chunk_tokens: int, seed: int, live: int = 4, max_chunks: int = 6) -> None:
        self.draw = random.Random(seed)
        self.chunk_tokens, self.max_tokens = chunk_tokens, max_chunks * chunk_tokens
        self.system = self._tokens(chunk_tokens + 3)
        self.prompts = [self._beginning() for _ in range(live)]

    def next_turn(self) -> list[int]:
        """Some program's prompt: its last one and a little more, or a new program's first one."""
        which = self.draw.randrange(len(self.prompts))
        prompt = self.prompts[which] + self._tokens(self.draw.randint(1, 2 * self.chunk_tokens))
        if len(prompt) > self.max_tokens:
            prompt = self._beginning()
        self.prompts[which] = prompt
        return prompt

    def any_prompt(self) -> list[int]:
        return self.draw.choice(self.prompts)

    def _beginning(self) -> list[int]:
        """Two of three programs have the system prompt."""
        system = self.system if self.draw.random() < 0.67 else []
        return system + self._tokens(self.draw.randint(1, self.chunk_tokens))

    def _tokens(self, number: int) -> list[int]:
        return [self.draw.randrange(30_000) for _ in range(number)]


def test_locate_predicts_what_a_load_then_brings(make: Make) -> None:
    """With eviction in both tiers, and turns of several programs in mixed order."""
    store = make(12, 20)
    programs = Programs(store.chunk_tokens, seed=1)
    seen = set()
    for _ in range(STEPS):
        action = programs.draw.random()
        prompt = programs.next_turn() if action < 0.7 else programs.any_prompt()
        if action > 0.95:
            store.forget(prompt)
        store.settle()
        located = store.locate(prompt)
        assert store.run(prompt) == located
        store.check()
        seen.add((located.dram_tokens > 0, located.ssd_tokens > 0))
    cases = {(False, False), (True, False), (False, store.has_disk), (True, store.has_disk)}
    assert seen == cases, "a case was never reached"


def test_asking_changes_nothing(make: Make) -> None:
    """Two runs of the same turns, one with ten queries of everything in between, evict the same chunks."""

    def history(asks: int) -> list[TierHit]:
        store = make(6, 10)
        programs = Programs(store.chunk_tokens, seed=2)
        brought = []
        for _ in range(60):
            prompt = programs.next_turn()
            store.settle()
            for _ in range(asks):
                for other in programs.prompts:
                    store.locate(other)
            brought.append(store.run(prompt))
        return brought

    assert history(asks=10) == history(asks=0)


def test_a_longer_prompt_never_has_a_shorter_holding(make: Make) -> None:
    store = make(7, 9)
    programs = Programs(store.chunk_tokens, seed=3)
    for _ in range(40):
        store.run(programs.next_turn())
        store.settle()
        prompt = programs.any_prompt()
        totals = []
        for end in range(0, len(prompt) + 1, 5):
            held = store.locate(prompt[:end])
            assert held.dram_tokens % store.chunk_tokens == 0 and held.ssd_tokens % store.chunk_tokens == 0
            totals.append(held.dram_tokens + held.ssd_tokens)
            assert totals[-1] <= end
        assert totals == sorted(totals)


def test_another_beginning_finds_nothing(make: Make) -> None:
    """The same tokens after a different first token are different KV."""
    store = make(8, 8)
    prompt = list(range(100, 100 + 3 * store.chunk_tokens))
    store.run(prompt)
    store.settle()
    assert store.locate([99, *prompt[1:]]) == TierHit(0, 0)
    assert store.locate(prompt[store.chunk_tokens :]) == TierHit(0, 0)
    assert store.locate(prompt[: store.chunk_tokens - 1]) == TierHit(0, 0)


def test_what_is_forgotten_is_nowhere_and_comes_back_when_stored_again(make: Make) -> None:
    store = make(8, 8)
    prompt = list(range(2 * store.chunk_tokens + 1))
    store.run(prompt)
    store.settle()
    assert store.locate(prompt) == TierHit(2 * store.chunk_tokens, 0)
    store.forget(prompt)
    assert store.locate(prompt) == TierHit(0, 0)
    assert store.run(prompt) == TierHit(0, 0)
    store.settle()
    assert store.locate(prompt) == TierHit(2 * store.chunk_tokens, 0)


def test_what_was_forgotten_leaves_its_room_to_others(make: Make) -> None:
    store = make(3, 6)
    size = 3 * store.chunk_tokens
    for start in range(20):
        gone = list(range(10_000 * (start + 1), 10_000 * (start + 1) + size))
        store.run(gone)
        store.settle()
        store.forget(gone)
    older, newer = list(range(size + 1)), list(range(7, 7 + size + 1))
    for prompt in (older, newer):
        store.run(prompt)
        store.settle()
    assert store.locate(newer) == TierHit(size, 0)
    assert store.locate(older) == TierHit(0, size if store.has_disk else 0)


def test_a_head_that_others_share_is_kept(make: Make) -> None:
    store = make(8, 8)
    prompt = list(range(4 * store.chunk_tokens))
    store.run(prompt)
    store.settle()
    store.forget(prompt, kept_tokens=store.chunk_tokens + 1)
    assert store.locate(prompt) == TierHit(2 * store.chunk_tokens, 0), "a chunk that is shared in part stays"


def two_prompts_for_one(store: StoreUnderTest) -> tuple[list[int], list[int]]:
    """Two prompts of three chunks; the second has evicted the first from a DRAM with room for one."""
    tokens = 3 * store.chunk_tokens + 1
    first, second = list(range(tokens)), list(range(7, 7 + tokens))
    for prompt in (first, second):
        store.run(prompt)
        store.settle()
    return first, second


def test_what_dram_lost_comes_from_the_disk_and_is_in_dram_then(make: Make) -> None:
    store = make(3, 12)
    if not store.has_disk:
        pytest.skip("it has no disk")
    first, _ = two_prompts_for_one(store)
    assert store.locate(first) == TierHit(0, 3 * store.chunk_tokens)
    assert store.run(first) == TierHit(0, 3 * store.chunk_tokens)
    store.settle()
    assert store.locate(first) == TierHit(3 * store.chunk_tokens, 0)


def test_transfers_add_up_to_what_was_loaded_and_are_reported_once(make: Make) -> None:
    store = make(6, 12)
    programs = Programs(store.chunk_tokens, seed=4)
    brought = dict.fromkeys((Tier.DRAM, Tier.SSD), 0)
    moved: list[KVTransfer] = []
    for _ in range(50):
        held = store.run(programs.next_turn())
        store.settle()
        brought[Tier.DRAM] += held.dram_tokens
        brought[Tier.SSD] += held.ssd_tokens
        moved += store.transfers()
    assert store.transfers() == []
    assert all(t.size_bytes == t.tokens * store.bytes_per_token and t.duration_s >= 0 for t in moved)
    for tier, tokens in brought.items():
        assert sum(t.tokens for t in moved if t.tier is tier) == tokens
