"""What a returning program lost of its last turn: evicted or changed, from which token, and how much."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import Bench, fake_tiers, prompt
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.outputs import KVConnectorOutput

from continuum_lmcache.engine import MOST_STRANGERS
from continuum_lmcache.programs import table
from continuum_lmcache.programs.divergence import LossCause, kept_hashes, losses_of, no_hashes, same_blocks
from continuum_lmcache.programs.program import NOWHERE
from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.types import FinishedTurn, Place, ProgramId, TurnId
from continuum_lmcache.vllm_plugin.metrics_delta import totals_of

BLOCK = 16
HEAD, ASK, ANSWER, TOOL = (list(range(start, start + 160)) for start in (1000, 2000, 3000, 4000))
LAST = HEAD + ASK + ANSWER
AGAIN = LAST + TOOL
Loss = tuple[str, int, int, str]
Make = Callable[..., Bench]


def hashes(tokens: list[int]) -> list[int]:
    """Chained, as vLLM's are."""
    return [hash(tuple(tokens[: end + BLOCK])) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def lost(last: list[int], prompt: list[int], found: int | None = None) -> list[Loss]:
    """The losses of one return. `found`: tokens in the cache; None: all that both have in common."""
    kept = kept_hashes(no_hashes(), hashes(last))
    found = same_blocks(kept, hashes(prompt)) * BLOCK if found is None else found
    hashed = SimpleNamespace(num_prompt_tokens=len(prompt), block_hashes=hashes(prompt))
    losses = losses_of(kept, hashed, BLOCK, len(last), found)
    return [(loss.cause.value, loss.at_token, loss.tokens, loss.third) for loss in losses]


def test_a_prompt_that_repeats_its_last_turn_loses_nothing() -> None:
    assert lost(LAST, AGAIN) == []
    assert lost(LAST, LAST[:-1] + TOOL) == [], "nor does it by a block"
    assert lost(LAST, HEAD) == [], "nor one that was taken back"
    assert lost([], AGAIN, found=0) == [], "nor one whose last turn is not known"


@pytest.mark.parametrize(("at", "third"), [(7, "first"), (159, "first"), (160, "middle"), (350, "last")])
def test_a_changed_prompt_is_found_at_the_block_where_it_changes(at: int, third: str) -> None:
    now = LAST[:at] + list(range(9000, 9003)) + AGAIN[at:]
    block_at = at // BLOCK * BLOCK
    assert lost(LAST, now) == [("changed", block_at, len(LAST) - block_at, third)]


def test_a_history_that_was_made_shorter_loses_no_more_than_the_prompt_has() -> None:
    summary = list(range(7000, 7100))
    assert lost(LAST, HEAD + summary) == [("changed", len(HEAD), len(summary), "middle")]


def test_what_neither_the_gpu_nor_a_tier_gave_back_was_evicted() -> None:
    assert lost(LAST, AGAIN, found=32) == [("evicted", 32, len(LAST) - 32, "first")]
    assert lost(LAST, AGAIN, found=len(LAST) - 2 * BLOCK) == [], "two blocks are none"


def test_one_return_may_lose_by_its_prompt_and_by_the_cache() -> None:
    now = LAST[:320] + [9000] + AGAIN[321:]
    assert lost(LAST, now, found=0) == [("evicted", 0, 320, "first"), ("changed", 320, 160, "last")]


def test_a_prompt_that_continues_an_older_turn_did_not_change() -> None:
    title = HEAD[:16] + list(range(6000, 6200))
    assert lost(LAST, title)[0][0] == "changed", "the title's own prompt did"
    assert lost(title, AGAIN, found=len(LAST)) == []


CONTEXTS = st.lists(st.integers(0, 3), max_size=200)


@given(CONTEXTS, CONTEXTS)
def test_bisection_finds_as_many_blocks_as_a_look_at_each(last: list[int], now: list[int]) -> None:
    pairs = zip(hashes(last), hashes(now), strict=False)
    same = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    kept = kept_hashes(no_hashes(), hashes(last))
    assert same_blocks(kept, hashes(now)) == (min(len(last), len(now)) // BLOCK if same is None else same)
    assert kept_hashes(kept, hashes(now)) == array("q", map(hash, hashes(now)))


def test_a_return_looks_at_few_of_its_blocks() -> None:
    looked_at = 0

    class Counted(list[bytes]):
        def __getitem__(self, block: Any) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(block)

    blocks = [block.to_bytes(32, "big") for block in range(6250)]  # 100,000 tokens
    kept = kept_hashes(no_hashes(), blocks)
    hashed = SimpleNamespace(num_prompt_tokens=100_000, block_hashes=Counted(blocks))
    list(losses_of(kept, hashed, BLOCK, 100_000, 0))
    assert looked_at <= 14


def turn(programs: ProgramTable, name: str, blocks: Sequence[int]) -> None:
    """One turn of a program."""
    program = programs.add(0.0, ProgramId(name), "", 0.0, one_turn=False)
    programs.add_turn(0.0, TurnId(f"{name}'s turn"), program)
    finished, prompt = FinishedTurn(program.id, 1, (), 0, 0, NOWHERE), SimpleNamespace(block_hashes=blocks)
    programs.finish_turn(0.0, program, finished, prompt, Place(True, "", 9.0))
    programs.check()


def test_the_hashes_of_the_longest_idle_programs_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_HASHES", 100)
    programs = ProgramTable(1000)
    for number in range(11):
        turn(programs, f"p{number}", range(10))
    assert [len(entry.hashes) for entry in programs.records.values()] == [0] * 6 + [10] * 5
    programs.drop(programs.records[ProgramId("p10")])
    turn(programs, "p9", range(20))
    programs.check()


# in the scheduler -----------------------------------------------------------


class LoadingBench(Bench):
    """Each load ends with the step in which it began."""

    def moved(self, output: Any) -> KVConnectorOutput | None:
        loads = output.kv_connector_metadata.loads if output.kv_connector_metadata is not None else ()
        return KVConnectorOutput(finished_recving={job.request_id for job in loads}) if loads else None


@pytest.fixture
def make(make: Make, tmp_path: Path) -> Make:
    return partial(make, kind=LoadingBench, static_ttl_s=0, run_output_dir=tmp_path, record_ids=True)


def recorded(bench: Bench, tmp_path: Path) -> dict[str, list[tuple[str, int, int]]]:
    """Each program's losses in the recording: cause, first lost token, tokens."""
    bench.scheduler.shutdown()
    logs = json.loads((tmp_path / "scheduler_timestamps").read_text())
    names = ("cause", "at_token", "lost_tokens")
    found = {job: [tuple(e[n] for n in names) for e in log if "lost_time" in e] for job, log in logs.items()}
    return {job: losses for job, losses in found.items() if losses}  # type: ignore[misc]


def test_each_planted_change_is_recorded_and_counted(make: Make, tmp_path: Path) -> None:
    bench = make(400, transfer=fake_tiers(1.0))
    runs = {  # what a program sends, one prompt after the other
        "nothing": (HEAD + ASK, HEAD + ASK + [bench.sampled] + TOOL),
        "header": [[n, n, n] + HEAD + ASK for n in range(2 + MOST_STRANGERS)],  # the last is the program's
        "compaction": (HEAD + ASK + ANSWER, HEAD + ASK[:32] + TOOL),
    }
    for job, prompts in runs.items():
        for tokens in prompts:
            bench.turn(job, tokens)
            bench.now_s += 1
    totals = totals_of(bench.parts)
    assert totals["lost_tokens"] == {"changed-first-third": 323, "changed-middle-third": 160}
    assert recorded(bench, tmp_path) == {
        "header": [("changed", 0, 323)],
        "compaction": [("changed", 192, 160)],
    }


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (None, {"p": [("evicted", 0, 336)]}),
        (fake_tiers(5e-6), {"p": [("evicted", 0, 336)]}),
        (fake_tiers(1.0), {}),
    ],
    ids=["no tier", "a tier of 40 blocks", "a tier that keeps it"],
)
def test_what_the_caches_lost_is_recorded(make: Make, tmp_path: Path, transfer: Any, expected: Any) -> None:
    bench = make(blocks=40, transfer=transfer, without=["load_or_recompute"])
    whole = bench.turn("p", HEAD + ASK, out=17)
    for story in range(1, 8):
        bench.turn(None, prompt(30 * BLOCK, story))
    bench.turn("p", whole + TOOL)
    assert recorded(bench, tmp_path) == expected


def test_the_causes_are_those_that_the_docs_name() -> None:
    page = (Path(__file__).parents[1] / "docs" / "divergence.md").read_text()
    assert all(f"| `{cause.value}` |" in page for cause in LossCause)
