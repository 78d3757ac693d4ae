"""The scheduler on vLLM's own code, step by step, in virtual time. Blocks hold 16 tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mistral_common
import pytest
from bench import BLOCK, Bench, prompt
from layer_kinds import WINDOW
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.programs.identity import HINT_FIELD, TOOLS_FIELD
from continuum_lmcache.telemetry.events import PinReleased, TurnFinished
from continuum_lmcache.types import PinEnd, ProgramId
from continuum_lmcache.vllm_plugin import tool_calls
from continuum_lmcache.vllm_plugin.hooks.prometheus import detach
from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler
from continuum_lmcache.vllm_plugin.tool_calls import ToolCallReader

MISTRAL = {  # mistral_common's own files, and what their tokenizer looks for
    "tekken": ("tekken_240911.json", "tekken.json"),
    "sentencepiece": ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v3"),
}
Make = Callable[..., Bench]


@pytest.fixture(params=[ContinuumScheduler, ContinuumAsyncScheduler], ids=["sync", "async"])
def make(request: Any, make: Make) -> Make:
    """A bench for each of the two classes."""
    return partial(make, cls=request.param)


def outcomes(bench: Bench) -> dict[str, int]:
    return {outcome.value: n for outcome, n in bench.engine.pins.outcomes.items() if n}


# what is recorded -----------------------------------------------------------


def test_the_first_token_is_timed_from_the_turns_arrival(make: Make) -> None:
    """A prompt of 128 tokens in steps of 64 and 0.1 s; five tokens follow the first, and change nothing."""
    bench = make(budget_tokens=64)
    bench.turn("p", prompt(128), out=6)
    bench.send("q", prompt(16, story=1), out=2)
    bench.now_s += 3.0  # it waits
    bench.run_until_idle()
    behind_s = 0.1 * bench._ahead  # the next step is scheduled before a step's output is read
    assert [turn.first_token_s for turn in bench.events_of(TurnFinished)] == pytest.approx(
        [0.2 + behind_s, 3.1 + behind_s]
    )


# how long a pin lives -------------------------------------------------------


def test_a_finished_turn_stays_on_the_gpu_until_its_ttl_and_then_leaves_an_idle_engine(make: Make) -> None:
    bench = make(static_ttl_s=8)
    bench.turn("p", prompt(64))
    assert bench.used_blocks == 4  # 64 prompt tokens; the sampled one has no KV yet
    bench.advance(7.5)
    assert bench.used_blocks == 4
    bench.advance(1.0)
    assert bench.used_blocks == 0
    assert outcomes(bench) == {"expired": 1}


@pytest.mark.parametrize(("static_ttl_s", "found_blocks"), [(8, 5), (0, 0)])
def test_the_next_turn_hits_what_was_pinned_though_more_than_the_cache_has_passed(
    make: Make, static_ttl_s: float, found_blocks: int
) -> None:
    bench = make(blocks=20, static_ttl_s=static_ttl_s)
    first = bench.turn("p", prompt(64), out=17)
    for story in range(1, 6):
        bench.turn(None, prompt(13 * BLOCK, story))  # 5 x 13 blocks through a cache of 19
    bench.turn("p", first + prompt(10, 9), is_last_step=True)
    assert bench.parts.residency.prompt_tokens["gpu"] == found_blocks * BLOCK
    assert outcomes(bench) == ({"reused": 1} if found_blocks else {})


def test_reset_prefix_cache_drops_all_pins_and_a_second_one_does_not_swallow_the_report(make: Make) -> None:
    bench = make()
    bench.turn("p", prompt(64, 1))
    bench.turn("q", prompt(64, 2))
    assert bench.scheduler.reset_prefix_cache() and bench.scheduler.reset_prefix_cache()
    assert outcomes(bench) == {"reset": 2} and bench.used_blocks == 0
    assert bench.scheduler.has_requests(), "an idle engine's gauges still show the pin"
    assert bench.step() == 0 and not bench.scheduler.has_requests()


# queue order ----------------------------------------------------------------


def a_and_b_behind_a_prompt(make: Make) -> Bench:
    """Programs a and b came in this order and are in a tool call; a long prompt runs."""
    bench = make(blocks=20, budget_tokens=64, static_ttl_s=0)
    bench.turn("a", prompt(32, 1))
    bench.turn("b", prompt(32, 2))
    bench.send(None, prompt(160, 3), out=3)
    bench.step()
    return bench


def test_a_program_keeps_its_place_across_turns(make: Make) -> None:
    """Programs a, b arrive in this order; b's next turn comes first, a's runs first all the same."""
    bench = a_and_b_behind_a_prompt(make)
    b = bench.send("b", prompt(48, 2), is_last_step=True)
    stranger = bench.send("c", prompt(48, 4), is_last_step=True)
    a = bench.send("a", prompt(48, 1), is_last_step=True)
    bench.run_until_idle()
    assert bench.order[-3:] == [a, b, stranger]


def test_a_pinned_program_goes_before_an_older_one_without_a_pin(make: Make) -> None:
    bench = make(blocks=40, budget_tokens=64, max_pinned_share=0.12)
    bench.turn("old", prompt(96, 1))  # 6 blocks: over the budget of 4
    bench.turn("young", prompt(48, 2))
    bench.send(None, prompt(160, 3), out=2)
    bench.step()
    old = bench.send("old", prompt(100, 1), is_last_step=True)
    young = bench.send("young", prompt(60, 2), is_last_step=True)
    bench.run_until_idle()
    assert bench.order[-2:] == [young, old]
    assert bench.engine.pins.refused == {"budget": 1, "tenant": 0}


def test_a_turn_that_loses_its_pin_while_it_waits_loses_its_place_too(make: Make) -> None:
    bench = make(blocks=20, max_pinned_share=0.22, static_ttl_s=1000)
    bench.turn("old", prompt(6 * BLOCK, 1))  # over the budget of 4 blocks
    bench.turn("young", prompt(3 * BLOCK, 2))
    bench.send("grows", prompt(10 * BLOCK, 3), out=110, is_last_step=True)
    bench.step()
    young = bench.send("young", prompt(10 * BLOCK, 2), is_last_step=True)
    old = bench.send("old", prompt(7 * BLOCK, 1), is_last_step=True)
    bench.run_until_idle()
    assert outcomes(bench) == {"reclaimed": 1}, "what grows took it"
    assert bench.order[-2:] == [old, young]


def test_a_programs_last_step_is_preempted_last_though_it_is_the_newest(make: Make) -> None:
    bench = make(blocks=12)
    old = bench.send("old", prompt(5 * BLOCK - 4, 1), out=30)
    bench.step()
    last = bench.send("young", prompt(5 * BLOCK - 4, 2), out=30, is_last_step=True)
    bench.run_until_idle()
    assert set(bench.preempted) == {old}
    assert len(bench.done[last]) == 5 * BLOCK - 4 + 30


def test_an_older_program_that_started_later_is_not_the_victim(make: Make) -> None:
    bench = make(blocks=12, static_ttl_s=0)
    bench.turn("old", prompt(2 * BLOCK, 1))
    bench.now_s += 1
    young = bench.send("young", prompt(5 * BLOCK - 4, 2), out=60)
    bench.step()
    bench.send("old", prompt(5 * BLOCK - 4, 1), out=30)
    bench.run_until_idle()
    assert set(bench.preempted) == {young}


def test_an_older_program_that_runs_again_after_a_preemption_is_not_the_next_victim(make: Make) -> None:
    bench = make(blocks=12)
    old = bench.send("old", prompt(5 * BLOCK - 4, 1), out=60)
    bench.step()
    young = bench.send("young", prompt(5 * BLOCK - 4, 2), out=60)
    bench.step()
    preempted = bench.scheduler.requests[old]
    bench.scheduler.running.remove(preempted)  # as vLLM does when it resets running requests
    bench.scheduler._preempt_request(preempted, bench.now_s, drop_stale_output=True)
    bench.scheduler.prev_step_scheduled_req_ids.discard(old)
    bench.run_until_idle()
    assert set(bench.preempted) == {young} and {old, young} == set(bench.done)


# which turns take pins ------------------------------------------------------


def test_pins_of_more_than_the_cache_reclaim_the_latest_programs_and_all_finish(make: Make) -> None:
    bench = make(blocks=20, static_ttl_s=100, max_pinned_share=1)
    for story in range(8):
        bench.turn(f"p{story}", prompt(5 * BLOCK, story))
    assert list(bench.engine.pins.pinned)[:2] == ["p0", "p1"], "the first programs keep theirs"
    for story in range(8):
        bench.turn(f"p{story}", prompt(5 * BLOCK + 8, story), is_last_step=True)
    assert bench.used_blocks == 0
    assert bench.engine.pins.outcomes[PinEnd.RECLAIMED] > 0


def test_a_waiting_turn_honours_pins_while_others_run(make: Make) -> None:
    bench = make(blocks=20, static_ttl_s=100, pin_reclaim_after_s=1000)
    bench.turn("pinned", prompt(8 * BLOCK, 1))
    bench.send("running", prompt(6 * BLOCK, 2), out=20, is_last_step=True)
    bench.step()
    waiting = bench.send("waiting", prompt(8 * BLOCK, 3), is_last_step=True)
    for _ in range(5):
        bench.step()
    assert waiting not in bench.order
    bench.run_until_idle()
    assert waiting in bench.order
    assert "pinned" in bench.engine.pins.pinned, "it fitted once the other was done"


def two_pins_beside_a_running_turn(make: Make) -> Bench:
    bench = make(blocks=20, static_ttl_s=1000, pin_reclaim_after_s=1000)
    bench.turn("first", prompt(5 * BLOCK, 1))
    bench.turn("second", prompt(5 * BLOCK, 2))
    bench.send("running", prompt(6 * BLOCK, 3), out=20, is_last_step=True)
    bench.step()
    return bench


def test_a_waiting_turn_takes_the_pin_of_a_later_program_that_waits_behind_it(make: Make) -> None:
    """Otherwise two returned programs that both need more than is free wait until nothing runs."""
    bench = two_pins_beside_a_running_turn(make)
    second = bench.send("second", prompt(9 * BLOCK, 2), is_last_step=True)
    bench.step()
    assert second not in bench.order, "the first program's tool runs: its pin is honoured"
    first = bench.send("first", prompt(9 * BLOCK, 1), is_last_step=True)
    bench.step()
    assert bench.order[-1] == first
    assert outcomes(bench) == {"reclaimed": 1, "reused": 1}
    bench.run_until_idle()


def test_a_preempted_turn_that_goes_first_takes_the_pin_of_an_older_program_behind_it(make: Make) -> None:
    """It is first in the queue although its program began later. Nobody could use that pin before it runs."""
    bench = make(blocks=61, static_ttl_s=300)
    old = bench.send("old", prompt(20 * BLOCK, 1), out=120)
    bench.now_s += 1
    bench.send("runs on", prompt(7 * BLOCK, 2), out=320)
    bench.now_s += 1
    new = bench.send("new", prompt(26 * BLOCK, 3), out=100)
    while old not in bench.done:
        bench.step(0.5)
    assert set(bench.preempted) == {new} and list(bench.engine.pins.pinned) == ["old"]
    again = bench.send("old", bench.done[old] + prompt(2 * BLOCK, 5), out=2)
    while new not in bench.done:
        bench.step(0.5)
    assert again not in bench.done and outcomes(bench) == {"reclaimed": 1}
    assert bench.engine.programs.records, "the running turn has not ended"
    bench.run_until_idle()


def test_an_urgent_turn_takes_the_pin_of_a_less_urgent_program_that_waits_behind_it(make: Make) -> None:
    bench = make(blocks=61, static_ttl_s=300, honor_priority=True)
    tokens = bench.turn("low", prompt(27 * BLOCK, 1), out=2, priority=5)
    bench.now_s += 1
    bench.send("runs on", prompt(7 * BLOCK, 2), out=320)
    bench.step(0.5)
    urgent = bench.send("urgent", prompt(28 * BLOCK, 3), out=20, priority=-5)
    low = bench.send("low", tokens + prompt(2 * BLOCK, 5), out=2, priority=5)
    began_s = bench.now_s
    while urgent not in bench.done:
        bench.step(0.5)
    assert bench.now_s - began_s < 15 and low not in bench.done
    bench.run_until_idle()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_streaming_session_whose_input_ends_ends_like_any_turn(make: Make, is_last: bool) -> None:
    """vLLM ends it as it ends an aborted request."""
    bench = make(blocks=60)
    session = bench.send("p", prompt(64, 1), out=4, resumable=True, is_last_step=is_last)
    bench.run_until_idle()
    for tokens, goes_on in ((prompt(40, 3), True), ([1], False)):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        bench.scheduler.add_request(Request(session, tokens, params, None, resumable=goes_on))
        bench.run_until_idle()
    assert bench.engine.pins.taken == (0 if is_last else 1)
    assert ("p" in bench.engine.programs.records) is not is_last


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="vllm#49439: vLLM preempts no session that waits"
)
@pytest.mark.parametrize("cls", [Scheduler, ContinuumScheduler])
def test_streaming_sessions_that_do_not_fit_together_go_on_one_after_the_other(
    model: Path, settings: Any, cls: Any
) -> None:
    settings()
    bench = Bench(cls, model, blocks=21)
    sessions = [bench.send(None, prompt(8 * BLOCK, story), resumable=True) for story in (1, 2)]
    bench.run_until_idle()
    for session in sessions:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        bench.scheduler.add_request(Request(session, prompt(5 * BLOCK, 3), params, None, resumable=True))
    bench.run_until_idle(100)


def test_a_turn_that_left_before_it_ran_has_attained_nothing(make: Make) -> None:
    bench = make(blocks=200, policy="plas")
    tokens = bench.turn("p", prompt(64, 1), out=2)
    before = bench.engine.programs.records["p"].attained_tokens
    left = bench.send("p", tokens + prompt(1500, 2), out=2)
    bench.scheduler.finish_requests([left], RequestStatus.FINISHED_ABORTED)
    assert bench.engine.programs.records["p"].attained_tokens == before > 0


def test_a_turn_that_waited_too_long_takes_anybodys_pin(make: Make) -> None:
    bench = make(blocks=20, static_ttl_s=1000, pin_reclaim_after_s=30)
    bench.turn("pinned", prompt(8 * BLOCK, 1))
    bench.send("running", prompt(6 * BLOCK, 2), out=30, is_last_step=True)
    bench.step()
    waiting = bench.send("waiting", prompt(8 * BLOCK, 3), is_last_step=True)
    bench.step(seconds=31)
    assert waiting not in bench.order
    bench.step()
    assert bench.order[-1] == waiting
    assert outcomes(bench)["reclaimed"] == 1


def test_the_wait_that_entitles_to_a_pin_ends_when_the_turn_gets_its_memory(make: Make) -> None:
    """Else a turn that is preempted much later would take others' pins at once."""
    bench = make(blocks=20, static_ttl_s=1000, pin_reclaim_after_s=30)
    bench.turn("pinned", prompt(8 * BLOCK, 1))
    running = bench.send("running", prompt(6 * BLOCK, 2), out=30, is_last_step=True)
    bench.step()
    waiting = bench.send("waiting", prompt(8 * BLOCK, 3), out=20, is_last_step=True)
    bench.step(seconds=20)
    assert bench.engine.turns[waiting].refused_s is not None
    while waiting not in bench.order:
        bench.step()
    assert running in bench.done and bench.engine.turns[waiting].refused_s is None


def test_no_pin_is_dropped_in_vain(make: Make) -> None:
    """The waiting turn needs 16 blocks; 19 less the 6 running leave 13, pins or not."""
    bench = make(blocks=20, static_ttl_s=1000, pin_reclaim_after_s=0)
    bench.turn("pinned", prompt(4 * BLOCK, 1))
    bench.send("running", prompt(6 * BLOCK, 2), out=30, is_last_step=True)
    bench.step()
    bench.send("waiting", prompt(16 * BLOCK, 3), is_last_step=True)
    for _ in range(10):
        bench.step()
    assert bench.engine.pins.taken == 1 and not outcomes(bench)
    bench.run_until_idle()


def test_pins_that_were_lent_come_back_whole_when_nothing_came_of_it(make: Make) -> None:
    """vLLM may refuse for a reason that no count foresees."""
    bench = make(blocks=20, static_ttl_s=1000)
    bench.turn("p", prompt(4 * BLOCK, 1))
    bench.turn("q", prompt(4 * BLOCK, 2))
    running = bench.scheduler.requests[bench.send("r", prompt(2 * BLOCK, 3), out=50)]
    bench.step()
    reclaimer = bench.scheduler._reclaimer
    stock, reclaimer._stock = reclaimer._stock, lambda *_args, **_kwargs: None
    used = bench.used_blocks
    assert reclaimer.allocate_slots(running, 1) is None
    assert bench.used_blocks == used and len(bench.engine.pins.pinned) == 2
    reclaimer._stock = stock
    bench.run_until_idle()


def test_where_all_layers_have_windows_a_prompt_longer_than_the_cache_takes_pins_at_once(
    model: Path, settings: Any
) -> None:
    settings(static_ttl_s=300)
    bench = Bench(ContinuumScheduler, model, 24, 64, spec=WINDOW)
    for i in range(6):
        bench.turn(f"p{i}", prompt(60, i))
    began_s = bench.now_s
    bench.turn(None, prompt(900, 9))
    assert bench.now_s - began_s < 10.0 and outcomes(bench)["reclaimed"] > 0
    bench.scheduler.shutdown()
    assert bench.used_blocks == 0


def test_a_prompt_under_way_takes_a_pin_before_anyone_is_preempted(make: Make) -> None:
    """Of 18 blocks 4 are pinned; 12 for the prompt and 2 for a decoding turn, which grows to 3, are used."""
    bench = make(blocks=19, budget_tokens=4 * BLOCK + 1, static_ttl_s=1000)
    bench.turn("pinned", prompt(4 * BLOCK, 1))
    bench.send("talker", prompt(2 * BLOCK - 1, 2), out=40, is_last_step=True)
    bench.step()
    bench.send("prompt", prompt(12 * BLOCK, 3), is_last_step=True)
    bench.run_until_idle()
    assert outcomes(bench)["reclaimed"] == 1
    assert not bench.preempted


def test_whoever_wraps_allocate_slots_between_two_steps_keeps_the_place_and_pins_still_give_way(
    make: Make,
) -> None:
    bench = make(blocks=12, static_ttl_s=1000)
    bench.turn("pinned", prompt(4 * BLOCK, 1))
    manager, asked = bench.scheduler.kv_cache_manager, []
    stock = manager.allocate_slots

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(request.request_id)
        return stock(request, *args, **kwargs)

    manager.allocate_slots = counted
    running = bench.send("running", prompt(6 * BLOCK, 2), out=40, is_last_step=True)
    bench.run_until_idle()
    assert manager.allocate_slots is counted
    assert asked.count(running) >= 40 and outcomes(bench)["reclaimed"] == 1
    assert not bench.preempted


# how a turn ends ------------------------------------------------------------


def test_a_stop_string_ends_a_turn_though_it_reaches_the_scheduler_as_an_abort(make: Make) -> None:
    bench = make()
    with_stop = bench.send("p", prompt(64), out=50, stop=["</call>"])
    for _ in range(3):
        bench.step()
    bench.scheduler.finish_requests(with_stop, RequestStatus.FINISHED_ABORTED)
    bench.run_until_idle()
    assert bench.engine.pins.taken == 1
    assert bench.used_blocks == 4


@pytest.mark.parametrize("steps", [0, 3], ids=["waiting", "running"])
def test_a_client_that_leaves_pins_nothing(make: Make, steps: int) -> None:
    bench = make()
    gone = bench.send("p", prompt(64), out=50)
    for _ in range(steps):
        bench.step()
    bench.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
    bench.run_until_idle()
    assert bench.engine.pins.taken == 0 and bench.used_blocks == 0


# programs -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "outcome", "found_blocks"), [(prompt(64, 2), "diverged", 0), (prompt(40, 1), "reused", 2)]
)
def test_a_program_that_comes_back_with_another_prompt_gives_its_pin_up_and_with_a_shorter_one_uses_it(
    make: Make, tokens: list[int], outcome: str, found_blocks: int
) -> None:
    bench = make()
    bench.turn("p", prompt(64, 1))
    bench.turn("p", tokens, is_last_step=True)
    assert outcomes(bench) == {outcome: 1}
    assert bench.parts.residency.prompt_tokens["gpu"] == found_blocks * BLOCK


# tenants and wrong requests -------------------------------------------------


def test_equal_ids_under_different_cache_salts_are_different_programs(make: Make) -> None:
    bench = make()
    bench.turn("p", prompt(64, 1), salt="tenant-a")
    bench.turn("p", prompt(64, 1), salt="tenant-b")
    assert len(bench.engine.programs.records) == 2
    assert bench.parts.residency.prompt_tokens["gpu"] == 0


@pytest.mark.parametrize(
    "fields",
    [{"job_id": {"a": 1}}, {"job_id": "x" * 10**6}, {"job_id": ""}, {"is_last_step": "maybe"}],
    ids=["an object", "a megabyte", "empty", "maybe"],
)
def test_a_bad_field_that_got_here_is_ignored_and_counted(make: Make, fields: dict[str, Any]) -> None:
    bench = make()
    bench.turn(None, prompt(32), **fields)
    assert bench.parts.ignored == {next(iter(fields)): 1}
    assert not bench.engine.programs.records and bench.used_blocks == 0


@pytest.mark.parametrize(("tools", "tool"), [("", ("python", "bash")), ("a digest", ())])
def test_a_bash_block_is_a_call_unless_the_request_offers_tools(
    make: Make, tools: str, tool: tuple[str, ...]
) -> None:
    bench = make()
    says = SimpleNamespace(decode=lambda *_, **__: "```bash\npython app.py\n```")
    bench.scheduler._events.tool_calls = ToolCallReader(says)
    bench.turn("p", prompt(64), **({TOOLS_FIELD: tools} if tools else {}))
    assert bench.engine.programs.records["p"].tool == tool


# programs without ids -------------------------------------------------------


@pytest.mark.parametrize("kind", ["tekken", "sentencepiece"])
def test_a_token_beyond_the_tokenizers_vocabulary_costs_a_turn_its_tools_name_and_no_more(
    make: Make, tmp_path: Path, kind: str
) -> None:
    """A padded vocabulary has such tokens. Mistral's own tokenizers raise different errors for them."""
    source, name = MISTRAL[kind]
    shutil.copy(Path(mistral_common.__file__).parent / "data" / source, tmp_path / name)
    tokenizer = get_tokenizer(str(tmp_path), tokenizer_mode="mistral")
    bench = make()
    bench.scheduler._events.tool_calls = ToolCallReader(tokenizer)
    bench.send("p", [tokenizer.vocab_size + 5] * 40)
    (request,) = bench.scheduler.requests.values()
    bench.sampled = tokenizer.vocab_size + 5
    bench.run_until_idle()
    assert request.output_token_ids[-1] > tokenizer.vocab_size
    assert bench.parts.ignored == {"output_token_ids": 1} and list(bench.engine.pins.pinned) == ["p"]


class PanicException(BaseException):
    """As tokenizers in Rust raise it."""


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, RuntimeError, PanicException])
def test_no_error_of_a_models_own_tokenizer_ends_an_engine(
    make: Make, error: type[BaseException], logged: Any
) -> None:
    def decode(*_: Any, **__: Any) -> str:
        raise error("unknown ids")

    bench, warnings = make(), logged(tool_calls, "warning_once")
    bench.scheduler._events.tool_calls = ToolCallReader(SimpleNamespace(decode=decode))
    for turn in range(3):
        bench.turn("p", prompt(40 + turn))
    assert bench.parts.ignored == {"output_token_ids": 3} and list(bench.engine.pins.pinned) == ["p"]
    assert len({*warnings}) == 1 and f"SimpleNamespace.decode raised {error.__name__}" in warnings[0]


def test_requests_without_ids_become_a_program_once_one_extends_the_other(make: Make) -> None:
    bench = make()
    first = bench.turn(None, prompt(64, 1), out=20)
    assert bench.used_blocks == 0, "one turn is no program"
    bench.now_s += 3
    second = bench.turn(None, first + prompt(20, 5), out=20)
    assert len(bench.engine.pins.pinned) == 1
    bench.turn(None, second + prompt(20, 6), out=2)
    assert outcomes(bench) == {"reused": 1}


@pytest.mark.parametrize("fields", [{}, {HINT_FIELD: "a session"}], ids=["nothing", "a hint"])
def test_a_turn_sent_again_after_its_client_left_goes_on_with_its_program(
    make: Make, fields: dict[str, str]
) -> None:
    """SDKs send a request again after a timeout or a lost connection."""
    bench = make(blocks=40)
    first = bench.turn(None, prompt(64, 1), out=20, **fields)
    second = bench.turn(None, first + prompt(20, 5), out=20, **fields) + prompt(20, 6)
    for _ in range(2):
        left = bench.send(None, second, out=20, **fields)
        bench.step()
        bench.scheduler.finish_requests(left, RequestStatus.FINISHED_ABORTED)
        bench.run_until_idle()
    third = bench.turn(None, second, out=20, **fields)
    bench.turn(None, third + prompt(20, 7), out=20, **fields)
    (program,) = bench.engine.programs.records.values()
    assert program.turns == 4


@pytest.mark.parametrize("fields", [{}, {"session_id": "session"}], ids=["nothing", "a session"])
def test_the_beams_of_a_search_are_no_programs_and_teach_no_tool_gaps(
    make: Make, fields: dict[str, str]
) -> None:
    """vLLM sends one request of one token for each beam and token, all with the search's session id."""
    bench = make(blocks=60)
    beams: list[list[int]] = [[]]
    for _ in range(20):
        for beam in beams:
            bench.send(None, prompt(64, 1) + beam, **fields)
        bench.run_until_idle()
        beams = [beams[i % len(beams)] + [200 + i if i else 7] for i in range(4)]
    assert not bench.engine.programs.records and not bench.engine.pins.taken
    assert bench.engine.learned.gaps.exact(()).n == 0


def test_a_request_of_one_token_does_not_take_a_turn_from_its_program(make: Make) -> None:
    bench = make(blocks=40)
    first = bench.turn(None, prompt(64, 1), out=20)
    bench.turn(None, first + prompt(20, 5))
    assert not bench.engine.programs.records
    bench.turn(None, first + prompt(20, 5), out=2)
    assert len(bench.engine.programs.records) == 1


# metrics --------------------------------------------------------------------


def test_the_stats_carry_the_pins_and_lose_them_again_before_vllm_looks(make: Make) -> None:
    bench = make()
    bench.turn("p", prompt(64))
    counts = [detach(stats) for stats in bench.stats]
    assert sum(news.get("pins", {}).get("taken", 0) for news in counts) == 1
    assert {"": 4} in [news.get("pinned_blocks") for news in counts]
    assert {stats.kv_connector_stats for stats in bench.stats} == {None}


def test_nothing_is_held_of_a_run_that_nobody_records(make: Make) -> None:
    bench = make()
    bench.turn("p", prompt(64))
    bench.turn("p", prompt(96), is_last_step=True)
    assert bench.parts.files.recorder is None


def test_preemption_and_resumption_are_recorded(make: Make, tmp_path: Path) -> None:
    bench = make(blocks=12, run_output_dir=tmp_path)
    bench.send("old", prompt(5 * BLOCK - 4, 1), out=30)
    bench.step()
    bench.send("young", prompt(5 * BLOCK - 4, 2), out=30)
    bench.run_until_idle()
    log = bench.parts.files.recorder.snapshot()["young"]
    names = [next(iter(event)) for event in log]
    assert "Request_evicted_from_running_queue_time" in names and "evicted_to_running" in names


def test_an_aborted_turn_is_recorded_as_gone(make: Make, tmp_path: Path) -> None:
    bench = make(run_output_dir=tmp_path)
    gone = bench.send("p", prompt(64), out=50)
    bench.step()
    bench.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
    bench.run_until_idle()
    assert "Request_departure_time" in next(iter(bench.parts.files.recorder.snapshot()["p"][-1:]))


def test_a_preempted_turn_takes_its_new_place_when_its_programs_pin_comes_or_goes(make: Make) -> None:
    """Found by the state machine: only turns that had not started yet were moved."""
    bench = make(blocks=10, static_ttl_s=2)
    preempted = bench.send("p", prompt(32, 1), out=100)
    bench.step()
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    waiting = bench.scheduler.requests[preempted]
    before = bench.scheduler.waiting.head_key()
    bench.scheduler._events.carry_out([PinReleased(bench.now_s, ProgramId("p"), PinEnd.RESET)])
    assert preempted in bench.engine.turns.to_rekey
    assert before == bench.scheduler._events.queue_key(waiting)


def test_a_preempted_turn_stays_first_while_its_kv_is_loaded_back(make: Make) -> None:
    """Found by the state machine: its status is then that of a turn that waits for a load."""
    bench = make(static_ttl_s=0)
    preempted = bench.scheduler.requests[bench.send("p", prompt(32, 1), out=9)]
    bench.step()
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    before = bench.scheduler._events.queue_key(preempted)
    preempted.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert bench.scheduler._events.queue_key(preempted) <= before
    assert bench.scheduler._events.queue_key(preempted)[2:] == before[2:]
    preempted.status = RequestStatus.PREEMPTED
