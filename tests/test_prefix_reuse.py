"""The part of a turn that the next prompt repeats: learned, forgotten, and not guessed from few returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.programs.divergence import PLAIN, THOUGHT, EndedTurn, TurnKind
from continuum_lmcache.programs.ended_turns import EndedTurns
from continuum_lmcache.programs.prefix_reuse import (
    LEAST_RETURNS,
    MOST_KINDS,
    WINDOW,
    PrefixReusePredictor,
    ending_of,
)
from continuum_lmcache.types import ProgramId

BLOCK = 16
P = ProgramId("p")
THOUGHT_TURN, PLAIN_TURN = TurnKind("", THOUGHT), TurnKind("", PLAIN)


def text(tokens: int, story: int, same: int = 0, other: int = 0) -> tuple[list[int], list[int]]:
    """A context and its whole blocks' chained hashes; the first `same` tokens are `other`'s."""
    found = [other] * same + [story] * (tokens - same)
    blocks = (tuple(found[at : at + BLOCK]) for at in range(0, tokens - BLOCK + 1, BLOCK))
    return found, list(accumulate(blocks, lambda before, block: hash((before, block)), initial=0))[1:]


def returns(
    matching: PrefixReusePredictor,
    prompt: int,
    output: int,
    repeats: int,
    times: int,
    kind: TurnKind = THOUGHT_TURN,
) -> int | None:
    """This many programs repeat `repeats` tokens of their last turn. Returns the last result."""
    reusable, ended = None, EndedTurns(BLOCK)
    for story in range(1, times + 1):
        tokens, hashes = text(prompt + output, story)
        ended.add(P, EndedTurn("p", tokens, hashes, prompt, "", kind))
        parted = ended.compare_return(P, "p", *text(prompt + 2 * output, -story, repeats, story), "")
        assert parted is not None
        reusable = matching.on_return(parted)
        ended.drop(P)
    return reusable


def test_all_is_expected_before_enough_returns_were_seen() -> None:
    matching = PrefixReusePredictor(BLOCK)
    returns(matching, 160, 160, 160, LEAST_RETURNS - 1)
    assert matching.expected_tokens(THOUGHT_TURN, 160, 320) == 320
    returns(matching, 160, 160, 160, 1)
    assert matching.expected_tokens(THOUGHT_TURN, 160, 320) == 160


@pytest.mark.parametrize("repeats", [0, 80, 160, 240, 320])
def test_what_is_expected_is_what_came_back(repeats: int) -> None:
    matching = PrefixReusePredictor(BLOCK)
    returns(matching, 160, 160, repeats, WINDOW)
    assert matching.expected_tokens(THOUGHT_TURN, 160, 320) // BLOCK == repeats // BLOCK
    twice = {0: 0, 80: 160, 160: 320, 240: 480, 320: 640}[repeats]
    assert abs(matching.expected_tokens(THOUGHT_TURN, 320, 640) - twice) <= BLOCK


@given(prompt=st.integers(1, 4000), output=st.integers(1, 4000), share=st.floats(0, 1))
def test_what_is_expected_covers_what_comes_back_by_little(prompt: int, output: int, share: float) -> None:
    repeats = round((prompt + output) * share) // BLOCK * BLOCK
    matching = PrefixReusePredictor(BLOCK)
    reusable = returns(matching, prompt, output, repeats, LEAST_RETURNS)
    whole = (prompt + output) // BLOCK * BLOCK
    expected = matching.expected_tokens(THOUGHT_TURN, prompt, prompt + output)
    assert whole == 0 or (reusable is not None and reusable >= min(repeats, whole))
    assert expected >= min(repeats, whole) - BLOCK
    assert expected <= max(repeats, prompt if repeats >= prompt - BLOCK else 0) + 2 * BLOCK


def test_a_tenth_of_the_returns_does_not_decide_but_more_do() -> None:
    for whole, expected in ((6, 160), (8, 320)):
        matching = PrefixReusePredictor(BLOCK)
        returns(matching, 160, 160, 160, WINDOW - whole)
        returns(matching, 160, 160, 320, whole)
        assert matching.expected_tokens(THOUGHT_TURN, 160, 320) == expected


def test_an_old_template_is_forgotten() -> None:
    matching = PrefixReusePredictor(BLOCK)
    returns(matching, 160, 160, 160, 500)
    returns(matching, 160, 160, 320, 64)
    assert matching.expected_tokens(THOUGHT_TURN, 160, 320) == 320


def test_plain_turns_are_kept_where_thoughts_are_dropped() -> None:
    matching = PrefixReusePredictor(BLOCK)
    returns(matching, 160, 160, 160, WINDOW, THOUGHT_TURN)
    returns(matching, 160, 160, 320, WINDOW, PLAIN_TURN)
    assert matching.expected_tokens(THOUGHT_TURN, 160, 320) == 160
    assert matching.expected_tokens(PLAIN_TURN, 160, 320) == 320
    assert (ending_of(""), ending_of("<think>a</think>b"), ending_of("well, </think>b"), ending_of("b")) == (
        *("unread", "thought", "thought", "plain"),
    )


def test_a_tenant_whose_prompts_never_come_back_shortens_nobody_elses_pins() -> None:
    matching = PrefixReusePredictor(BLOCK)
    returns(matching, 160, 160, 320, WINDOW, TurnKind("honest", PLAIN))
    returns(matching, 160, 160, 0, 10 * WINDOW, TurnKind("hostile", PLAIN))
    assert matching.expected_tokens(TurnKind("honest", PLAIN), 160, 320) == 320
    assert matching.expected_tokens(TurnKind("hostile", PLAIN), 160, 320) < BLOCK
    for salt in range(2 * MOST_KINDS):
        returns(matching, 160, 160, 0, 1, TurnKind(str(salt), PLAIN))
    assert len(matching._shares) == MOST_KINDS


# in the scheduler -----------------------------------------------------------

pytest.importorskip("vllm")
from bench import Bench, prompt, settings  # noqa: E402, F401

from continuum_lmcache.retention.policies import POLICIES  # noqa: E402
from continuum_lmcache.types import Retention  # noqa: E402
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler  # noqa: E402
from experiments.sim.engine import simulate  # noqa: E402
from experiments.sim.serving import Setup  # noqa: E402
from experiments.sim.step_time import MACHINES  # noqa: E402
from experiments.table1 import generate  # noqa: E402
from experiments.workload import poisson_arrivals, scaled  # noqa: E402

ANSWER = 4 * BLOCK  # tokens
ASKED = 4 * BLOCK  # new tokens of each prompt
TURNS = 3
DRAM = {
    "kv_connector": "FakeConnector",
    "kv_connector_module_path": "connectors.fake",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fake.dram_gb": 1.0, "fake.chunk_tokens": BLOCK},
}
Make = Callable[..., Bench]
Seen = list[tuple[int, int]]  # of each turn: blocks pinned behind it, tokens that the next prompt found


@pytest.fixture
def make(model: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:  # noqa: F811
    """A bench that pins every turn until the next one."""
    endless = replace(POLICIES["continuum"], retain=lambda *_: Retention(200.0, "endless", "test"))
    monkeypatch.setitem(POLICIES, "endless", endless)
    made: list[Bench] = []

    def build(transfer: dict[str, Any] | None = None, **values: Any) -> Bench:
        settings(policy="endless", **values)
        made.append(Bench(ContinuumScheduler, model, 200, transfer=transfer))
        return made[-1]

    yield build
    for bench in made:
        bench.scheduler.shutdown()
        bench.lifecycle.check()


def run_program(bench: Bench, story: int, kept_answer: int) -> Seen:
    """A program whose client sends back this many tokens of each answer."""
    pinned: list[int] = []
    found: list[int] = []
    history = prompt(ASKED, 10 * story)
    for turn in range(TURNS):
        before = bench.lifecycle.residency.prompt_tokens["gpu"]
        whole = bench.turn(f"program {story}", history, out=ANSWER)
        pinned.append(bench.lifecycle.pins.pinned_blocks)
        found.append(bench.lifecycle.residency.prompt_tokens["gpu"] - before)
        history = whole[: len(history) + kept_answer] + prompt(ASKED, 10 * story + turn + 1)
        bench.now_s += 1.0
    bench.turn(f"program {story}", history, out=1, is_last_step=True)
    assert not bench.lifecycle.pins.pinned
    return list(zip(pinned, found[1:], strict=False))


def learned(bench: Bench, kept_answer: int) -> tuple[Seen, Seen]:
    """A program's turns before anything was learned, and after."""
    seen = [run_program(bench, story, kept_answer) for story in range(LEAST_RETURNS)]
    return seen[0], seen[-1]


def test_of_stripped_answers_only_what_comes_back_is_kept_and_nothing_more_is_computed(make: Make) -> None:
    bench = make(transfer=DRAM)
    cold, warm = learned(bench, kept_answer=ANSWER // 2)
    assert [found for _, found in warm] == [found for _, found in cold] == [96, 192]
    assert [pinned for pinned, _ in cold] == [7, 13]  # all but the last token, which has no KV yet
    assert [pinned for pinned, _ in warm] == [6, 12]


def test_a_client_that_sends_its_answers_back_loses_nothing(make: Make) -> None:
    bench = make(transfer=DRAM)
    cold, warm = learned(bench, kept_answer=ANSWER)
    assert cold == warm == [(7, 112), (15, 240)]
    context = bench.turn("one more", prompt(ASKED, 777), out=ANSWER)
    assert bench.scheduler.connector.locate(context).dram_tokens == ASKED + ANSWER - BLOCK


def test_the_switch_keeps_whole_turns(make: Make) -> None:
    cold, warm = learned(make(learn_matches=False), kept_answer=ANSWER // 2)
    assert cold == warm


def test_a_turn_whose_stripped_part_is_gone_has_not_lost_its_kv(make: Make) -> None:
    """Else its waits count as those of evicted turns, and T of eq. 2 grows without a reason."""
    evicted = {}
    for learns in (True, False):
        bench = make(learn_matches=learns)
        run_program(bench, 1, kept_answer=0)
        evicted[learns] = bench.lifecycle.advisor.history.queue_delay_samples
    assert evicted == {True: 0, False: TURNS}


def test_a_model_that_drops_nothing_is_run_as_without_the_switch() -> None:
    programs = poisson_arrivals(scaled(generate("swe", 25, 1), 4000), 2.0, 1)
    small = replace(MACHINES["a100"], kv_tokens=8_192)
    setup = Setup("continuum", machine=small, shared_tokens=64, merge_steps=8)
    with_it, without = (
        simulate(programs, replace(setup, continuum={"learn_matches": learns})) for learns in (True, False)
    )
    assert with_it == without and with_it.pins["taken"] > 10
