"""How the live rounds judge: experiments/trust/live_rounds.py. The rounds themselves run by hand."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.trust.live_rounds import (
    AT_ONCE,
    DECK,
    MODEL,
    OUTPUT_TOKENS,
    TENANTS,
    Answer,
    Change,
    Conversation,
    Rounds,
    is_right,
)

ANSWER = Answer(1, "again", "a", (300, 301), (302, 303), (-0.5, -0.7), frozenset({(0, 1), (0, 2)}))
SAME = [(-0.5, -0.5), (-0.7, -0.7)]
BEFORE, AFTER = (0, {"a": 1, "b": 0}), (0, {"a": 2, "b": 0})


def test_a_token_that_a_fresh_server_would_not_choose_is_wrong_and_a_tie_is_not() -> None:
    assert is_right(ANSWER, SAME)
    assert is_right(ANSWER, [SAME[0], (-0.7, -0.6995)])
    assert not is_right(ANSWER, [SAME[0], (-0.7, -0.6)])


def test_a_token_with_another_probability_is_wrong_though_it_is_the_same_one() -> None:
    assert not is_right(ANSWER, [(-0.4, -0.4), SAME[1]])


def test_an_answer_that_is_cut_is_judged_by_the_tokens_it_has() -> None:
    assert is_right(replace(ANSWER, output=(302,), logprobs=(-0.5,)), SAME[:1])


def test_answers_are_read_back_as_they_were_written() -> None:
    assert Answer.of_row(json.loads(json.dumps(ANSWER.row()))) == ANSWER


def rounds() -> Any:
    return Rounds(SimpleNamespace(done=Counter[str]()), random.Random(0))  # type: ignore[arg-type]


def choice(tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    return {"token_ids": [302] * tokens, "logprobs": {"token_logprobs": [-0.5] * tokens}}


@pytest.mark.parametrize(
    ("change", "given", "judged", "failed"),
    [
        (Change("again", refused=frozenset("a")), choice(), 1, 0),
        (Change("again", refused=frozenset("a")), "unknown", 0, 0),
        (Change("again", refused=frozenset("b")), "unknown", 0, 1),
        (Change("in place", mixed=frozenset("a")), choice(), 0, 0),
        (Change("weights, paused by abort", cuts=True), choice(3), 1, 0),
        (Change("weights, paused by abort", cuts=True), choice(0), 0, 0),
        (Change("damage"), choice(3), 1, 1),
        (Change("lmcache"), "ReadTimeout", 0, 1),
        (Change("engine", fails=True), "RemoteProtocolError", 0, 0),
    ],
)
def test_what_a_change_explains_is_no_failure_and_all_else_is(
    change: Change, given: Any, judged: int, failed: int
) -> None:
    played = rounds()
    played.take(1, change, [BEFORE, AFTER], "a", Conversation("p", [300, 301]), given)
    assert (len(played.answers), len(played.failed)) == (judged, failed)


def test_an_answer_beside_a_change_may_be_of_the_state_before_or_after_it() -> None:
    played = rounds()
    for name in ("a", "b", MODEL):
        played.take(1, Change("again"), [BEFORE, AFTER], name, Conversation("p", [300]), choice())
    assert [each.states for each in played.answers] == [{(0, 1), (0, 2)}, {(0, 0)}, {(0, 0)}]


def test_a_play_of_usual_length_has_each_kind_of_change() -> None:
    """The plays before had none of the engine's kills: one of 21 was drawn."""
    played, fewest_rounds = rounds(), -(-150 // (2 * AT_ONCE * len(TENANTS)))
    assert {played.next_kind() for _ in range(fewest_rounds)} == set(DECK)
    assert "engine" in DECK


def test_a_token_without_an_adapter_is_the_models_own_where_the_last_slot_is_empty() -> None:
    """vLLM's kernels for a CPU give it the last slot's adapter: why the rounds have more slots than loads."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    adapters = (1, 2)
    wrapper = PunicaWrapperCPU(max_num_batched_tokens=8, max_batches=8, device="cpu")
    of_tokens = LoRAMapping(index_mapping=(0, 1), prompt_mapping=(0, 1), is_prefill=True)
    wrapper.update_metadata(of_tokens, [*adapters, None], max_loras=3, vocab_size=10)
    down, up, added = torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 8, 4), torch.zeros(2, 8)
    down[: len(adapters)], up[: len(adapters)] = 1.0, 1.0
    wrapper.add_lora_linear(added, torch.ones(2, 8), (down,), (up,), 1.0, (8,))
    assert added[0].tolist() == [0.0] * 8
    assert added[1].tolist() == [32.0] * 8
