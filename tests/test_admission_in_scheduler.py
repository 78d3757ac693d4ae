"""Admission and dead KV on vLLM's own scheduler, step by step. Blocks hold 16 tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench import BLOCK, Bench, fake_tiers, prompt
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.engine import REFRESH_S
from continuum_lmcache.policy import continuum
from continuum_lmcache.steps.step_times import PrefillShare, StepTimes
from continuum_lmcache.types import ProgramId, Tier, TurnId
from continuum_lmcache.vllm_plugin.metrics_delta import totals_of
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler
from experiments.trust.soak_scheduler import tables

Make = Callable[..., Bench]


@pytest.fixture
def make(make: Make) -> Make:
    """Under this project's own policy."""
    return partial(make, policy="continuum")


def held(bench: Bench) -> list[str]:
    return sorted(t.id for t in bench.engine.turns.values() if t.in_line)


def send_programs(bench: Bench, programs: int, tokens: int = 100, out: int = 4) -> list[str]:
    return [bench.send(f"p{i}", prompt(tokens, i), out=out) for i in range(programs)]


def test_the_room_in_a_tier_follows_its_size_which_shrinks_as_other_engines_come_to_share_it(
    make: Make,
) -> None:
    bench = make(transfer=fake_tiers(1.0))
    engine, store = bench.engine, bench.scheduler.connector.scheduler_side.store
    whole_tokens = engine.admission.capacity.tier_tokens
    assert whole_tokens == bench.scheduler.connector.capacity_tokens()[Tier.DRAM]
    store.dram.capacity //= 4
    bench.advance(REFRESH_S)
    bench.step()
    assert engine.admission.capacity.tier_tokens == pytest.approx(whole_tokens / 4, abs=BLOCK)
    assert engine.learned.survival.capacity_tokens == bench.scheduler.connector.capacity_tokens()


def test_programs_beyond_the_room_wait_and_all_of_them_are_served(make: Make) -> None:
    bench = make(blocks=20)  # 19 of them: 304 tokens
    sent = send_programs(bench, 8)
    bench.step()
    assert 0 < len(held(bench)) < 8
    assert len(bench.scheduler.running) == 8 - len(held(bench))
    bench.run_until_idle(5000)
    assert sorted(bench.done) == sorted(sent)


def test_a_burst_on_an_engine_that_has_just_started_is_not_let_in_beyond_the_room(make: Make) -> None:
    bench = make(blocks=60)
    bench.step_seconds = lambda output: 0.004 + 1e-4 * output.total_num_scheduled_tokens
    send_programs(bench, 12, tokens=400, out=20)
    bench.step()
    held_first = held(bench)
    for _ in range(8):  # most of the time so far went into prompts
        bench.step()
    assert held(bench) == held_first != []


def test_a_common_head_counts_once_and_programs_that_fit_are_not_held(make: Make) -> None:
    bench = make(blocks=200)  # 199 of them: 3,184 tokens
    for i in range(2):  # the second one hits the KV of the first one, which is in its tool call
        bench.turn(f"first {i}", prompt(480) + prompt(16, 50 + i))
    for i in range(8):
        bench.send(f"p{i}", prompt(480) + prompt(16, 1 + i), out=4)
    bench.step()
    assert held(bench) == [], "480 tokens in common, and 128 of their own"


def test_a_held_program_starts_once_steps_of_decodes_have_left_time_for_its_prompt(make: Make) -> None:
    bench = make(blocks=60)
    for i in range(4):
        bench.send(f"p{i}", prompt(400, i), out=200)
    for _ in range(40):  # prompts, and nothing else
        bench.step(0.1)
        bench.send(None, prompt(150, 99))
    waiting = len(held(bench))
    assert waiting > 0
    for _ in range(3):
        bench.step(10.0)
    assert len(held(bench)) < waiting


def test_many_small_requests_without_a_program_leave_a_program_its_room(make: Make) -> None:
    bench = make(blocks=4000)
    bench.turn("seen", prompt(2000, 999), out=2, is_last_step=True)
    sent = ""
    for i in range(200):  # at any time 40 of them are here
        bench.send(None, prompt(160, 1000 + i), out=40)
        if i == 100:
            sent = bench.send("p", prompt(2000, 7), out=2)
        bench.step(0.05)
    assert sent in bench.done and bench.used_blocks < 1000


def test_an_idle_session_does_not_keep_a_program_waiting(make: Make) -> None:
    """It waits in vLLM's queue for its next input. By forecast the program does not fit."""
    bench = make(blocks=40)
    session = bench.send(None, prompt(32, 1), resumable=True)
    bench.run_until_idle()
    began_s = bench.now_s
    bench.turn("p", prompt(560, 2), out=2)
    assert bench.now_s - began_s < 2.0
    had_tokens = bench.scheduler.requests[session].num_computed_tokens
    more = Request(
        session, prompt(20, 3), SamplingParams(max_tokens=4, ignore_eos=True), None, resumable=True
    )
    bench.scheduler.add_request(more)
    bench.step()
    assert bench.scheduler.requests[session].num_computed_tokens >= had_tokens + 20
    bench.run_until_idle()
    bench.scheduler.finish_requests([session], RequestStatus.FINISHED_ABORTED)


def test_the_room_on_the_gpu_is_what_turns_of_a_model_with_windows_have_had(
    model: Path, settings: Any
) -> None:
    """A group of layers keeps all tokens, three keep a window of 64: 16 tokens have up to four blocks."""
    settings(policy="continuum")
    kinds = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    windows = [SlidingWindowSpec(**kinds, sliding_window=64) for _ in range(3)]
    bench = Bench(ContinuumScheduler, model, 800, spec=[FullAttentionSpec(**kinds), *windows])
    capacity = lambda: bench.engine.admission.capacity.gpu_tokens  # noqa: E731
    assert capacity() == 800 * BLOCK
    for tokens, few, many in ((48, 3, 5), (1600, 11, 15)):
        for story in range(200):
            bench.turn(None, prompt(tokens, story), out=2)
        bench.advance(REFRESH_S)
        bench.turn(None, prompt(48), out=2)
        assert few < capacity() / 800 < many
    bench.scheduler.shutdown()


def test_without_admission_no_new_program_is_held(make: Make) -> None:
    bench = make(blocks=20, admission="false")
    send_programs(bench, 8)
    bench.step()
    assert held(bench) == []


def test_a_plain_request_passes_those_who_wait(make: Make) -> None:
    bench = make(blocks=20)
    send_programs(bench, 6, out=30)
    bench.step()
    plain = bench.send(None, prompt(16, 77))
    bench.step()
    assert held(bench) and bench.order[-1] == plain


def test_a_clients_priority_moves_nobody_unless_the_operator_honors_it(make: Make) -> None:
    bench = make(blocks=20)
    send_programs(bench, 6, out=30)
    bench.step()
    urgent = bench.send("urgent", prompt(100, 78), priority=-9)
    plain = bench.send(None, prompt(16), priority=-9)
    assert {bench.engine.turns[turn_id].priority for turn_id in (urgent, plain)} == {0}
    bench.step()
    assert urgent in held(bench), "admission counts those under way for it as for anybody"
    assert totals_of(bench.parts)["ignored_fields"]["priority"] == 2


def test_an_honored_priority_is_first_in_line_and_waits_for_room_all_the_same(make: Make) -> None:
    bench = make(blocks=20, honor_priority="true")
    sent = send_programs(bench, 6, out=30)
    bench.step()
    waiting = held(bench)
    urgent = bench.send("urgent", prompt(100, 78), priority=-1)
    prompts = bench.scheduler._prompt_time = PrefillShare()
    prompts.on_step(30.0, prefills=True)  # prompts leave no time for another
    bench.step()
    assert waiting and urgent in held(bench)
    bench.run_until_idle()
    entered = [request_id for request_id in bench.order if request_id in (*waiting, urgent)]
    assert entered[0] == urgent and set(sent) <= set(bench.done)
    assert totals_of(bench.parts)["ignored_fields"] == {}


def test_a_program_that_started_elsewhere_is_not_held_and_is_ordered_by_its_age(make: Make) -> None:
    bench = make(blocks=20)
    send_programs(bench, 6, out=30)
    bench.step()
    assert held(bench)
    stranger = bench.send("elsewhere", prompt(40, 78), program_turns=6, program_age_s=90.0)
    assert stranger not in held(bench)
    entry = bench.engine.programs.records[ProgramId("elsewhere")]
    assert (entry.turns, entry.arrival_s) == (6, bench.now_s - 90.0)
    bench.run_until_idle()
    assert entry.turns == 7


@pytest.mark.parametrize("honored", [False, True])
def test_a_tenants_claim_to_be_under_way_counts_only_where_the_operator_honors_it(
    make: Make, honored: bool
) -> None:
    bench = make(blocks=20, honor_program_age=str(honored).lower())
    send_programs(bench, 6, out=30)
    bench.step()
    liar = bench.send("liar", prompt(100, 78), salt="s", program_turns=9, program_age_s=9999.0)
    assert (liar not in held(bench)) == honored
    assert totals_of(bench.parts)["ignored_fields"] == ({} if honored else {"program_turns": 1})
    assert (bench.engine.turns[liar].program.arrival_s == bench.now_s) != honored


def test_an_age_without_turns_makes_no_program_older(make: Make) -> None:
    bench = make(blocks=20)
    new = bench.send("new", prompt(100, 1), program_age_s=500.0)
    assert bench.engine.turns[new].program.arrival_s == bench.now_s


def test_the_time_a_program_spent_on_another_engine_is_no_tools(make: Make) -> None:
    bench = make(blocks=60)
    bench.turn("p", prompt(40, 1), this_func_call="bash")
    for said, gaps, turns in ((5, 0, 6), (6, 1, 7), (0, 2, 8)):
        bench.advance(30.0)
        bench.send("p", prompt(20 + 10 * turns, 1), program_turns=said, this_func_call="bash")
        bench.run_until_idle()
        assert bench.engine.learned.gaps.exact(()).n == gaps
        assert bench.engine.programs.records[ProgramId("p")].turns == turns


def test_priorities_without_end_leave_nothing_behind(make: Make) -> None:
    bench = make(blocks=40, honor_priority="true")
    seen = []
    for i in range(1, 301):
        bench.send(None, prompt(4, i % 7), priority=-i)
        if i % 100 == 0:
            bench.run_until_idle()
            seen.append(tables(bench.engine.admission).total())
    assert seen[0] == seen[-1]


def test_a_held_turn_is_admitted_although_a_further_one_of_its_name_that_is_not_held_left(make: Make) -> None:
    bench = make(blocks=20)
    send_programs(bench, 7)
    first, second = (bench.send("twice", prompt(100, 9), out=4) for _ in range(2))
    bench.step()
    assert first in held(bench) and second not in held(bench)
    bench.scheduler.finish_requests([first], RequestStatus.FINISHED_ABORTED)
    bench.run_until_idle(5000)
    assert second in bench.done


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_that_may_not_be_cut_runs_beside_decodes(
    model: Path, settings: Any, tmp_path: Path, chunked: bool
) -> None:
    rate = {"bytes_per_s": 1e9, "fixed_s": 0.001, "samples": 9}
    prefill = {"fixed_s": 0.004, "per_token_s": 2e-5, "per_pair_s": 1e-10, "samples": 9}
    steps = {0: 0.010, 128: 0.010, 256: 0.0125, 512: 0.0175, 2048: 0.048}
    profile = {"prefill": prefill, "dram": rate, "ssd": rate, "steps": steps}
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({**profile, "kv_bytes_per_token": 8, "chunk_tokens": 16}))
    settings(policy="continuum", profile=path)
    bench = Bench(ContinuumScheduler, model, 4000, 8192, chunked=chunked)
    bench.turn("before", prompt(32, 50), out=4)
    for i in range(3):
        bench.send(f"decodes-{i}", prompt(40, i), out=300)
    for _ in range(5):
        bench.step()
    long = bench.send("long", prompt(3000, 9))
    for _ in range(100):
        bench.step()
    assert long in bench.done


def test_an_engine_whose_only_work_is_held_is_not_idle(make: Make) -> None:
    bench = make(blocks=20)
    bench.send("huge", prompt(290, 1))  # more than its forecast leaves room for
    assert bench.scheduler.has_requests()
    bench.run_until_idle()
    assert len(bench.done) == 1


# state removed with a program -------------------------------------------------


def cached_tokens(bench: Bench, tokens: list[int], job: str = "probe") -> int:
    """How much of a prompt the GPU still has."""
    before = bench.parts.residency.prompt_tokens["gpu"]
    bench.turn(job, tokens, is_last_step=True)
    return int(bench.parts.residency.prompt_tokens["gpu"] - before)


EVICTION = pytest.mark.parametrize(("without", "survives"), [([], True), (["evict_ended_programs"], False)])


@EVICTION
def test_the_kv_of_a_program_that_is_over_goes_first(make: Make, without: list[str], survives: bool) -> None:
    """q's context is older than dead p's, and is still there after as much has passed as p held."""
    bench = make(blocks=20, without=without, max_ttl_s=0)
    bench.turn("q", prompt(6 * BLOCK, 1))
    bench.turn("p", prompt(10 * BLOCK, 2), is_last_step=True)
    bench.turn("r", prompt(9 * BLOCK, 3))
    assert (cached_tokens(bench, prompt(6 * BLOCK + 1, 1), "q") > 0) is survives


@EVICTION
def test_the_kv_of_a_program_that_calls_what_ends_programs_goes_first(
    make: Make, without: list[str], survives: bool
) -> None:
    """As above, but no client says that a program ends."""
    bench = make(blocks=20, without=without, max_ttl_s=0)
    for _ in range(6):
        bench.engine.learned.gaps.observe(("bash",), 1.0)
        bench.engine.learned.gaps.add_lost(("submit",))
    bench.turn("q", prompt(6 * BLOCK, 1), this_func_call="bash")
    bench.turn("p", prompt(10 * BLOCK, 2), this_func_call="submit")
    bench.turn("r", prompt(9 * BLOCK, 3), this_func_call="bash")
    assert (cached_tokens(bench, prompt(6 * BLOCK + 1, 1), "q") > 0) is survives


def test_the_head_that_others_use_outlives_its_first_owner(make: Make) -> None:
    bench = make(blocks=40, max_ttl_s=0)
    system = prompt(4 * BLOCK, 5)
    first = bench.send("first", system + prompt(3 * BLOCK, 6))
    bench.run_until_idle()
    bench.turn("second", system + prompt(3 * BLOCK, 7))
    bench.turn("first", bench.done[first] + prompt(BLOCK, 8), is_last_step=True)
    assert cached_tokens(bench, system + prompt(2 * BLOCK, 9)) == 4 * BLOCK


def test_programs_one_after_another_find_the_system_prompt_that_they_share(make: Make) -> None:
    """None shares it with another that is here, so it is not known that it is shared."""
    bench = make(blocks=400, max_ttl_s=0)
    system = prompt(100 * BLOCK, 5)
    for story in range(3):
        if story:
            assert cached_tokens(bench, system + prompt(BLOCK, 40 + story)) == 100 * BLOCK
        bench.turn(f"p{story}", system + prompt(2 * BLOCK, 10 + story), is_last_step=True)


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "inferred"])
def test_conversations_share_their_system_prompt_whether_or_not_they_have_names(
    make: Make, is_named: bool
) -> None:
    bench = make(blocks=600)
    system, histories = prompt(64 * BLOCK, 5), {}
    for step in range(3):
        for job in range(12):
            tokens = histories.get(job, system) + prompt(4 * BLOCK, 100 + 40 * step + job)
            sent = bench.send(f"job-{job}" if is_named else None, tokens, out=4 if step < 2 else 100)
            if step < 2:
                bench.run_until_idle()
                histories[job] = bench.done[sent]
    for _ in range(6):
        bench.step()
    assert bench.engine.programs.context_tokens < 600 * BLOCK / 2
    assert len(bench.engine.admission.shared_prefixes._heads) == 1
    bench.run_until_idle()


def test_a_program_whose_end_was_claimed_is_the_same_one_when_it_comes_back_and_waits_in_line(
    make: Make,
) -> None:
    bench = make(blocks=20, max_ttl_s=0)
    bench.turn("p", prompt(64, 1), is_last_step=True)
    began_s = bench.now_s
    send_programs(bench, 8, out=30)
    bench.step()
    back = bench.send("p", prompt(80, 1))
    turn = bench.engine.turns[back]
    assert turn.in_line and turn.program.arrival_s < began_s
    assert bench.engine.end_claims[""].wrong == 1


# the chunk budget -------------------------------------------------------------


def test_an_inferred_program_is_not_held_while_its_context_counts_as_admitted(make: Make) -> None:
    bench = make(blocks=20, max_ttl_s=0)
    first = bench.turn(None, prompt(64, 1), out=2)
    send_programs(bench, 8, out=30)
    bench.step()
    back = bench.send(None, first + prompt(16, 2), out=2)
    assert bench.engine.turns[back].program is not None and back not in held(bench)


# chosen chunks ----------------------------------------------------------------


def measured_times() -> StepTimes:
    """Steps whose fixed time is small: small chunks pay."""
    times = StepTimes()
    for tokens in (128, 512, 2048) * 10:
        times.on_prompts(0.004 + 1e-4 * tokens, tokens, 1e-4 * tokens)
        times.on_decodes(0.050, 1.0)
    return times


def test_steps_are_measured_and_then_prompts_are_cut_beside_decodes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 4 ms and 0.1 ms a token, and some eight turns decode beside each prompt of 700 tokens."""
    monkeypatch.setattr(continuum, "BUSY_SHARE", 0.0)
    bench = make(blocks=4000, budget_tokens=512)
    bench.scheduler.scheduler_config.long_prefill_token_threshold = 512
    bench.step_seconds = lambda output: 0.004 + 1e-4 * output.total_num_scheduled_tokens
    for number in range(40):
        bench.send(f"p{number}", prompt(700, number), out=160)
        for _ in range(20):
            bench.step()
    assert bench.scheduler._step_timer.step_times.decodes_are_known
    fixed_s, token_s = bench.scheduler._step_timer.step_times.prompt_s()
    assert fixed_s == pytest.approx(0.004, abs=0.003) and token_s == pytest.approx(1e-4, rel=0.1)
    bench.send("last", prompt(700, 99), out=2)
    assert 128 < bench.step() < 512


def test_while_prompts_take_little_time_and_no_turn_waits_for_memory_no_prompt_is_cut(make: Make) -> None:
    bench = make(blocks=400, budget_tokens=512)
    bench.scheduler._step_times = measured_times()
    bench.scheduler._step_times.on_schedule(4000, 10)
    for number in range(8):
        bench.send(f"p{number}", prompt(4, number), out=400)
    for _ in range(40):
        bench.step(1.0)
    for number in range(8, 11):
        bench.send(f"p{number}", prompt(700, number), out=2)
    assert bench.step() == 512
    bench.engine.turns.refused_memory.add(TurnId("waits"))
    assert bench.step() < 512
    question = bench.send(None, prompt(100, 20), out=2)
    while question not in bench.order:
        bench.step()
        assert bench.scheduler.max_num_scheduled_tokens == 512, "it waits behind uncut prompts"
    bench.step()
    assert bench.scheduler.max_num_scheduled_tokens < 512


def test_an_older_programs_prompt_leaves_younger_decodes_their_place_in_a_chosen_chunk(make: Make) -> None:
    bench = make(blocks=200, budget_tokens=512)
    bench.scheduler._step_times = measured_times()
    bench.turn("old", prompt(16, 1))
    young = bench.send("young", prompt(16, 2), out=60)
    bench.step()
    bench.send("old", prompt(1600, 1))
    scheduled: list[dict[str, int]] = []
    bench.scheduled = lambda output: scheduled.append(output.num_scheduled_tokens)
    for _ in range(12):
        bench.step()
    assert all(tokens[young] == 1 for tokens in scheduled), "one token a step, whatever else there is"
    assert 512 <= sum(sum(tokens.values()) - 1 for tokens in scheduled[:4]) <= 4 * 512


@pytest.mark.parametrize("tokens", [110, 112])
def test_where_memory_may_run_short_the_newest_program_is_still_the_victim(make: Make, tokens: int) -> None:
    """The older one's prompt is half-way when the younger one's decode takes the last block."""
    bench = make(blocks=34, budget_tokens=128)
    bench.scheduler._step_times = measured_times()
    bench.turn("old", prompt(16, 1))
    young = bench.send("young", prompt(16, 2), out=400)
    for _ in range(tokens):
        bench.step()
    old = bench.send("old", prompt(400, 1), out=100)
    bench.run_until_idle()
    assert set(bench.preempted) == {young}, f"{old} came first"
