"""Losses of returning programs: each planted cause is found, at its token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.programs import divergence
from continuum_lmcache.programs.divergence import (
    EMPTY_THOUGHT_TOKENS,
    EXCERPT_TOKENS,
    EndedTurn,
    LossCause,
    LossEvidence,
    PromptEdit,
    TurnKind,
    cause_of,
    find_edit,
    same_blocks,
)
from continuum_lmcache.programs.ended_turns import KEPT_TURNS, MOST_TOKENS, EndedTurns
from continuum_lmcache.reload.cost_model import PrefillCurve
from continuum_lmcache.types import ProgramId

BLOCK = 16
CURVE = PrefillCurve(fixed_s=0.5, per_token_s=0.001, per_pair_s=1e-6, samples=1)
HEAD, ASK, TOOL = (list(range(start, start + 160)) for start in (1000, 2000, 3000))
THOUGHT, ANSWER = list(range(4000, 4300)), list(range(5000, 5040))
P = ProgramId("p")
PLAIN_TURN = TurnKind("", divergence.PLAIN)


def hashes(tokens: list[int], salt: str = "") -> list[int]:
    """Chained, as vLLM's are."""
    return [hash((salt, *tokens[: end + BLOCK])) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def departure(tokens: list[int], prompt_tokens: int, **more: Any) -> EndedTurn:
    salt = more.pop("salt", "")
    fields = {"name": "p", "tools": "", "kind": PLAIN_TURN, **more}
    return EndedTurn(tokens=tokens, hashes=hashes(tokens, salt), prompt_tokens=prompt_tokens, **fields)


def returned(
    left: EndedTurn, now: list[int], tools: str = "", salt: str = "", found: int | None = None
) -> Any:
    """The losses of one return; everything in common is found in the cache, unless `found` is given."""
    departures = EndedTurns(BLOCK)
    departures.add(P, left)
    parted = departures.compare_return(P, "p", now, hashes(now, salt), tools)
    assert parted is not None
    return departures.count_losses(parted, parted.equal_tokens if found is None else found, False, CURVE)


# the cause ------------------------------------------------------------------

LAST = HEAD + ASK + ANSWER
AGAIN = LAST + TOOL


def test_a_prompt_that_repeats_its_last_turn_loses_nothing() -> None:
    assert returned(departure(LAST, len(HEAD + ASK)), AGAIN) == []
    assert returned(departure(LAST, len(HEAD + ASK)), LAST[:-1] + TOOL) == [], "nor does it by a block"
    assert returned(departure(LAST, len(HEAD + ASK)), HEAD) == [], "nor one that was taken back"


@pytest.mark.parametrize("at", [0, 7, 16, 100, 159])
@pytest.mark.parametrize("sizes", [(3, 3), (3, 5), (5, 3), (0, 4), (60, 60)])
def test_a_nonce_is_found_at_its_token_and_costs_all_that_is_behind(at: int, sizes: tuple[int, int]) -> None:
    taken, put = sizes
    last = LAST[:at] + list(range(8000, 8000 + taken)) + LAST[at:]
    now = LAST[:at] + list(range(9000, 9000 + put)) + AGAIN[at:]
    (loss,) = returned(departure(last, len(last) - len(ANSWER)), now)
    assert (loss.cause, loss.at_token, loss.tokens) == (LossCause.NONCE, at, len(LAST) - at)
    assert (
        loss.last_turn_excerpt == tuple(last[at : at + EXCERPT_TOKENS])
        and loss.prompt_excerpt[:put] == tuple(now[at : at + put])[:16]
    )
    assert loss.seconds == pytest.approx(CURVE.seconds(len(LAST) - at, at) - CURVE.fixed_s)


def test_a_thought_that_the_template_leaves_out_is_found_in_the_last_answer_and_in_older_ones() -> None:
    last = departure(HEAD + THOUGHT + ANSWER, len(HEAD), kind=TurnKind("", divergence.THOUGHT))
    (loss,) = returned(last, HEAD + ANSWER + TOOL)
    assert (loss.cause, loss.at_token, loss.tokens) == (LossCause.THOUGHTS, len(HEAD), len(ANSWER))
    (loss,) = returned(replace(last, kind=PLAIN_TURN), HEAD + ANSWER + TOOL)
    assert loss.cause is LossCause.THOUGHTS, "it is seen in the tokens too"
    older = departure(HEAD + THOUGHT + ANSWER + ASK + ANSWER, len(HEAD + THOUGHT + ANSWER + ASK))
    for empty in (0, 4, EMPTY_THOUGHT_TOKENS):
        (loss,) = returned(older, HEAD + list(range(empty)) + ANSWER + ASK + ANSWER + TOOL)
        assert (loss.cause, loss.at_token) == (LossCause.THOUGHTS, len(HEAD))


def test_an_answer_that_comes_back_changed_is_distinguished_from_one_without_its_thought() -> None:
    (loss,) = returned(departure(HEAD + THOUGHT, len(HEAD)), HEAD + THOUGHT[:50] + TOOL)
    assert (loss.cause, loss.at_token) == (LossCause.ANSWER, len(HEAD) + 50)


def test_other_tools_are_distinguished_from_a_nonce_by_what_was_offered() -> None:
    now = HEAD[:40] + list(range(9000, 9003)) + HEAD[43:] + ASK + ANSWER + TOOL
    left = departure(LAST, len(HEAD + ASK), tools="a")
    assert returned(left, now, tools="b")[0].cause is LossCause.TOOLS
    assert returned(left, now, tools="a")[0].cause is LossCause.NONCE
    assert returned(left, now, tools="")[0].cause is LossCause.NONCE, (
        "a request without tools is no other list"
    )


def test_a_history_that_was_made_shorter_is_distinguished_from_another_prompt() -> None:
    last = departure(HEAD + ASK + THOUGHT * 3 + ANSWER, len(HEAD + ASK + THOUGHT * 3))
    summary = list(range(7000, 7100))
    (loss,) = returned(last, HEAD + summary + TOOL)
    assert (loss.cause, loss.at_token, loss.tokens) == (LossCause.COMPACTION, len(HEAD), len(summary + TOOL))
    assert returned(last, HEAD[:3] + summary + TOOL)[0].cause is LossCause.OTHER
    assert returned(last, HEAD + list(range(6000, 7500)))[0].cause is LossCause.OTHER


def test_the_same_tokens_under_another_salt_are_recognised_by_their_hashes() -> None:
    (loss,) = returned(departure(LAST, len(HEAD + ASK), salt="a"), AGAIN, salt="b")
    assert (loss.cause, loss.at_token, loss.tokens) == (LossCause.SALT, 0, len(LAST))


@pytest.mark.parametrize(
    ("tier_tokens", "cause"), [(0, LossCause.EVICTED), (48, LossCause.EVICTED), (320, LossCause.TIER_MISS)]
)
def test_what_neither_the_gpu_nor_a_tier_has_any_more_is_charged_to_who_had_it(
    tier_tokens: int, cause: LossCause
) -> None:
    (loss,) = returned(departure(LAST, len(HEAD + ASK), tier_tokens=tier_tokens), AGAIN, found=32)
    whole = len(LAST) // BLOCK * BLOCK
    assert (loss.cause, loss.at_token, loss.tokens) == (cause, 32, whole - 32)


def test_what_is_computed_because_that_is_cheaper_is_no_tier_miss() -> None:
    departures = EndedTurns(BLOCK)
    departures.add(P, departure(LAST, len(HEAD + ASK), tier_tokens=320))
    parted = departures.compare_return(P, "p", AGAIN, hashes(AGAIN), "")
    assert [loss.cause for loss in departures.count_losses(parted, 0, True, CURVE)] == [LossCause.EVICTED]


def test_one_return_may_lose_by_its_prompt_and_by_the_cache() -> None:
    now = HEAD[:150] + list(range(9000, 9003)) + HEAD[153:] + ASK + ANSWER + TOOL
    losses = returned(departure(LAST, len(HEAD + ASK)), now, found=0)
    assert [(loss.cause, loss.at_token) for loss in losses] == [
        (LossCause.NONCE, 150),
        (LossCause.EVICTED, 0),
    ]


@given(
    st.builds(
        LossEvidence,
        *[st.integers(0, 10_000)] * 4,
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.none() | st.builds(PromptEdit, st.integers(0, 9999), st.integers(0, 99)),
    )
)
def test_whatever_was_seen_there_is_one_cause_that_a_prompt_can_have(seen: LossEvidence) -> None:
    assert cause_of(seen) not in (LossCause.EVICTED, LossCause.TIER_MISS)


# the search -----------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=200), st.lists(st.integers(0, 3), max_size=200))
def test_halving_finds_as_many_blocks_as_looking_at_each(left: list[int], now: list[int]) -> None:
    a, b = hashes(left), hashes(now)
    alike = next(
        (n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
    )
    assert same_blocks(a, b) == alike


TOKENS = st.integers(1, 3)


@given(
    st.lists(TOKENS, max_size=60), st.lists(TOKENS, max_size=60), st.lists(TOKENS, min_size=8, max_size=60)
)
def test_an_edit_ends_where_both_are_equal_again(
    removed: list[int], inserted: list[int], rest: list[int]
) -> None:
    last, prompt = HEAD + removed + rest, HEAD + inserted + rest
    edit = find_edit(last, prompt, len(HEAD))
    assert edit is not None
    old, new = len(HEAD) + edit.removed_tokens, len(HEAD) + edit.inserted_tokens
    assert last[old : old + 8] == prompt[new : new + 8] and len(last[old : old + 8]) == 8


def test_an_edit_is_found_behind_bytes_that_match_between_two_tokens() -> None:
    """A token's id with zeros in its bytes can match at the wrong places first."""
    same_again = [1] * 20
    last, prompt = [256] * 9 + same_again, same_again
    edit = find_edit(last, prompt, 0)
    assert edit is not None and (edit.removed_tokens, edit.inserted_tokens) == (9, 0)


def least_s(work: Callable[[], object]) -> float:
    """The CPU time of the quickest of some runs."""
    spent_s = []
    for _ in range(10):
        start_s = time.thread_time()
        work()
        spent_s.append(time.thread_time() - start_s)
    return min(spent_s)


def pass_s(tokens: list[int]) -> float:
    """The CPU time of a look at each token, 3 ms for 100,000: a machine's own measure."""
    return least_s(lambda: sum(1 for _ in tokens))


@pytest.mark.parametrize("now", [[1] * 7 + [2], list(range(50)), [0] * 20_000], ids=["near", "far", "same"])
def test_text_that_repeats_itself_costs_no_more_than_a_few_looks_at_it(now: list[int]) -> None:
    left, other = [9, *[1] * 100_000], [3, *now * (100_000 // len(now))]
    assert least_s(lambda: find_edit(left, other, 0)) < 5 * pass_s(left)


# many programs --------------------------------------------------------------


def test_a_title_in_between_hides_nothing_of_the_turn_before() -> None:
    departures = EndedTurns(BLOCK)
    departures.add(P, departure(LAST, len(HEAD + ASK)))
    title = HEAD[:5] + list(range(6000, 6100))
    assert departures.compare_return(P, "p", title, hashes(title), "").cause is LossCause.OTHER  # type: ignore[union-attr]
    departures.add(P, departure(title, len(title) - 4))
    parted = departures.compare_return(P, "p", AGAIN, hashes(AGAIN), "")
    assert parted is not None and parted.cause is None


def test_turns_are_kept_within_bounds_and_dropped_with_their_programs() -> None:
    departures = EndedTurns(BLOCK)
    tokens = [1] * 50_000
    for i in range(100):
        departures.add(ProgramId(f"p{i}"), EndedTurn(f"n{i}", tokens, [], 0, "", PLAIN_TURN))
        assert departures._tokens <= MOST_TOKENS
    assert len(departures._turns) == MOST_TOKENS // len(tokens) == len(departures._latest)
    for _ in range(5):
        departures.add(ProgramId("p99"), EndedTurn("n99", tokens, [], 0, "", PLAIN_TURN))
    assert len(departures._turns[ProgramId("p99")]) == KEPT_TURNS
    for i in range(100):
        departures.drop(ProgramId(f"p{i}"))
    assert departures._tokens == 0 and not departures._turns and not departures._latest


def test_a_program_whose_turns_were_all_repeated_leaves_no_name_behind() -> None:
    departures = EndedTurns(BLOCK)
    departures.add(P, departure(AGAIN[:-20], len(AGAIN) - 24))
    departures.compare_return(P, "p", AGAIN, hashes(AGAIN), "")
    departures.drop(P)
    assert departures._tokens == 0 and not departures._turns and not departures._latest


def test_a_return_under_another_salt_leaves_the_first_programs_turn_and_its_count() -> None:
    departures = EndedTurns(BLOCK)
    departures.add(P, departure(AGAIN[:-20], len(AGAIN) - 24))
    held = departures._tokens
    departures.compare_return(ProgramId("p under another salt"), "p", AGAIN, hashes(AGAIN), "")
    assert departures._tokens == held == sum(len(turn.tokens) for turn in departures._turns[P])


def test_another_tenants_program_of_the_same_name_is_not_taken_for_this_one() -> None:
    departures = EndedTurns(BLOCK)
    departures.add(ProgramId("p@a"), departure(LAST, len(HEAD + ASK), salt="a"))
    assert departures.compare_return(ProgramId("p@b"), "p", TOOL, hashes(TOOL, "b"), "") is None
    departures.add(ProgramId("p@b"), departure(AGAIN, len(AGAIN) - 4, salt="b"))
    parted = departures.compare_return(ProgramId("p@a"), "p", AGAIN, hashes(AGAIN, "a"), "")
    assert parted is not None and parted.cause is None, "each goes on from its own"


# in the scheduler -----------------------------------------------------------

pytest.importorskip("vllm")
from bench import Bench, prompt, settings  # noqa: E402, F401

from continuum_lmcache.programs.identity import TOOLS_FIELD  # noqa: E402
from continuum_lmcache.vllm_plugin.hooks.metrics_delta import totals_of  # noqa: E402
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler  # noqa: E402

DRAM = {
    "kv_connector": "FakeConnector",
    "kv_connector_module_path": "connectors.fake",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fake.dram_gb": 5e-6, "fake.chunk_tokens": BLOCK},  # about 40 blocks
}
Make = Callable[..., Bench]


@pytest.fixture
def make(model: Path, settings: Any, tmp_path: Path) -> Iterator[Make]:  # noqa: F811
    made: list[Bench] = []

    def build(blocks: int = 400, transfer: dict[str, Any] | None = None, **values: Any) -> Bench:
        settings(static_ttl_s=0, run_output_dir=tmp_path, **values)
        made.append(Bench(ContinuumScheduler, model, blocks, transfer=transfer))
        return made[-1]

    yield build
    for bench in made:
        bench.scheduler.shutdown()


def losses(bench: Bench, tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Each program's losses in the recording."""
    bench.scheduler.shutdown()
    logs = json.loads((tmp_path / "scheduler_timestamps").read_text())
    return {job: [e for e in log if "lost_time" in e] for job, log in logs.items() if not job.startswith("_")}


def test_each_planted_cause_is_found_at_its_token(make: Make, tmp_path: Path) -> None:
    bench = make(transfer=DRAM)
    nonce = HEAD[:40] + [8000, 8001, 8002] + HEAD[43:]
    runs = {  # what a program sends, one prompt after the other
        "nothing": [(HEAD + ASK, {}), (AGAIN, {})],
        "nonce": [(nonce + ASK, {}), (HEAD + ASK + TOOL, {})],
        "tools": [(HEAD + ASK, {TOOLS_FIELD: "a"}), (HEAD[:25] + TOOL + HEAD[25:] + ASK, {TOOLS_FIELD: "b"})],
        "thoughts": [(HEAD + THOUGHT + ANSWER + ASK, {}), (HEAD + ANSWER + ASK + TOOL, {})],
        "compaction": [(HEAD + ASK + THOUGHT * 2, {}), (HEAD + TOOL, {})],
        "salt": [(HEAD + ASK, {"salt": "a"}), (HEAD + ASK + TOOL, {"salt": "b"})],
    }
    for job, requests in runs.items():
        for tokens, fields in requests:
            bench.turn(job, tokens, **fields)
            bench.now_s += 1
    found = {job.partition("@")[0]: log for job, log in losses(bench, tmp_path).items() if log}
    assert {job: [e["cause"] for e in log] for job, log in found.items()} == {
        job: [job] for job in runs if job != "nothing"
    }
    at = {job: log[0]["at_token"] for job, log in found.items()}
    assert at == {"nonce": 40, "tools": 25, "thoughts": len(HEAD), "compaction": len(HEAD), "salt": 0}
    assert all(log[0]["prefill_s"] > 0 and log[0]["lost_tokens"] > 32 for log in found.values())
    assert all("left_text" not in log[0] and len(log[0]["now_side"]) == 16 for log in found.values())
    totals = totals_of(bench.lifecycle, bench.now_s)
    assert {cause for cause, n in totals["lost_returns"].items() if n} == set(found)
    assert totals["lost_at_token"] == at
    assert {cause for cause, s in totals["lost_seconds"].items() if s} == set(found)


@pytest.mark.parametrize(("transfer", "cause"), [(None, "evicted"), (DRAM, "tier-miss")])
def test_losses_of_the_caches_are_distinguished_by_cause(
    make: Make, tmp_path: Path, transfer: Any, cause: str
) -> None:
    bench = make(blocks=40, transfer=transfer)
    whole = bench.turn("p", HEAD + ASK, out=17)
    for story in range(1, 8):
        bench.turn(None, prompt(30 * BLOCK, story))
    bench.turn("p", whole + TOOL)
    (lost,) = losses(bench, tmp_path)["p"]
    assert (lost["cause"], lost["at_token"], lost["lost_tokens"]) == (cause, 0, 336)


def test_a_pin_or_a_tier_that_keeps_it_leaves_no_loss(make: Make, tmp_path: Path) -> None:
    big = {**DRAM, "kv_connector_extra_config": {"fake.dram_gb": 1.0, "fake.chunk_tokens": BLOCK}}
    bench = make(blocks=40, transfer=big, without=["load_or_recompute"])
    whole = bench.turn("p", HEAD + ASK, out=17)
    for story in range(1, 8):
        bench.turn(None, prompt(30 * BLOCK, story))
    bench.turn("p", whole + TOOL)
    assert losses(bench, tmp_path)["p"] == []


def test_texts_are_recorded_only_where_they_are_asked_for(make: Make, tmp_path: Path) -> None:
    bench = make(divergence_texts=True)
    bench.turn("p", HEAD + ASK)
    bench.turn("p", HEAD[:40] + [77] * 5 + HEAD[45:] + ASK + TOOL)
    (lost,) = losses(bench, tmp_path)["p"]
    tokenizer = bench.lifecycle.losses._tokenizer
    assert lost["now_text"] == str(tokenizer.decode([77] * 5 + HEAD[45:56]))[:80] != lost["left_text"]


def test_a_return_is_looked_at_in_a_small_part_of_the_time_of_a_look_at_its_context() -> None:
    tokens = [i * 31 % 50_000 for i in range(100_000)]
    chain = [i.to_bytes(32, "big") for i in range(len(tokens) // BLOCK)]
    left = EndedTurn("p", tokens, chain, 99_000, "", PLAIN_TURN)
    now, departures = tokens + TOOL, EndedTurns(BLOCK)

    def returns() -> None:
        for _ in range(100):
            departures.add(P, left)
            departures.count_losses(departures.compare_return(P, "p", now, chain, ""), 99_984, False, CURVE)

    assert least_s(returns) / 100 < pass_s(tokens) / 30
