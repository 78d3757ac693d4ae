"""The simulator: vLLM's scheduler in virtual time. Small runs; figures are checked by hand where possible."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from continuum_lmcache.errors import InvariantError, TraceError
from experiments.sim.agents import Agents
from experiments.sim.engine import simulate
from experiments.sim.serving import Setup
from experiments.sim.step_time import MACHINES
from experiments.workload import Program, growing

A100 = MACHINES["a100"]
SMALL = Setup(machine=replace(A100, kv_tokens=20_480), shared_tokens=128)


def a_program(
    name: str, turns: int = 3, prompt: int = 2000, output: int = 20, arrival_s: float = 0.0
) -> Program:
    """Each prompt is the last one, its answer, and 500 tokens more; tools take 2 s."""
    program = growing(name, (prompt, *[500] * (turns - 1)), [output] * turns, gap_s=2.0)
    return replace(program, arrival_s=arrival_s)


def many_programs(programs: int = 12, every_s: float = 0.3, **shape: int) -> list[Program]:
    """More programs than the small GPU holds."""
    return [a_program(f"p{i}", arrival_s=i * every_s, **shape) for i in range(programs)]


DRAM = {"dram_gb": 8.0}
SETUPS = {
    "stock": SMALL,
    "stock, DRAM": replace(SMALL, tiers=DRAM),
    "stock, small DRAM and disk": replace(SMALL, tiers={"dram_gb": 1.0, "ssd_gb": 8.0}),
    "stock, async scheduler": replace(SMALL, tiers=DRAM, async_scheduling=True),
    "program-fcfs": replace(SMALL, policy="program-fcfs"),
    "continuum": replace(SMALL, policy="continuum"),
    "continuum, DRAM": replace(SMALL, policy="continuum", tiers=DRAM),
    "static-ttl, DRAM": replace(SMALL, policy="static-ttl", tiers=DRAM),
    "continuum, async scheduler": replace(SMALL, policy="continuum", tiers=DRAM, async_scheduling=True),
    "merged decode": replace(SMALL, policy="continuum", tiers=DRAM, merge_steps=8),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_every_token_of_every_turn_is_accounted_for_and_a_run_repeats_itself(setup: Setup) -> None:
    programs = many_programs()
    result = simulate(programs, setup)
    assert [job.program_id for job in result.jobs] == [p.program_id for p in programs]
    assert len(result.turns) == 36
    for turn in result.turns:
        assert turn.arrival_s < turn.first_token_s <= turn.finished_s
        assert min(turn.gpu_tokens, turn.dram_tokens, turn.ssd_tokens, turn.computed_tokens) >= 0
    assert result.scheduled_tokens >= result.tokens["computed"]
    assert simulate(programs, setup) == result


def test_one_turn_alone_takes_what_the_machine_says() -> None:
    """A chunk of 2,048 tokens, one of 952, then a token a step; the first comes with the second chunk."""
    [job] = simulate([a_program("p", turns=1, prompt=3000, output=4)], SMALL).jobs
    chunks = [[(2048, 0)], [(952, 2048)], *([[(1, 3000 + i)] for i in range(3)])]
    assert job.job_s == pytest.approx(sum(A100.seconds(chunk) for chunk in chunks))


def test_a_prompt_that_leaves_its_history_finds_only_what_it_kept() -> None:
    first, second = a_program("p", turns=2, prompt=1000, output=20).turns
    changed = replace(second, new_tokens=second.input_tokens - 500)
    program = Program("p", 0.0, (first, changed))
    assert simulate([program], SMALL).turns[1].gpu_tokens == 500 // 64 * 64


def test_programs_share_the_system_prompt_and_nothing_else() -> None:
    result = simulate([a_program("p", turns=1), a_program("q", turns=1, arrival_s=9.0)], SMALL)
    assert [turn.gpu_tokens for turn in result.turns] == [0, SMALL.shared_tokens]


def test_what_the_gpu_lost_comes_from_dram_in_whole_chunks() -> None:
    no_room = replace(SMALL, machine=replace(A100, kv_tokens=3072), tiers={"dram_gb": 8.0})
    result = simulate([a_program("p", turns=2), a_program("q", turns=1, arrival_s=0.7)], no_room)
    [back] = [t for t in result.turns if t.number == 2]
    assert back.dram_tokens > 0 and (back.gpu_tokens + back.dram_tokens) % 256 == 0


def test_a_slow_load_holds_up_no_other_turn() -> None:
    slow = {"dram_gb": 8.0, "load_gbps": 0.1}  # 900 tokens take 1.2 s
    gpu = replace(A100, kv_tokens=8192)
    evicts, decodes = (
        a_program("e", 1, 3500, arrival_s=0.5),
        a_program("d", 1, 4000, output=400, arrival_s=1.0),
    )
    programs = [a_program("p", turns=2), evicts, decodes]
    ends = {}
    for name, tiers in (("slow", slow), ("fast", DRAM)):
        result = simulate(programs, replace(SMALL, machine=gpu, tiers=tiers))
        assert result.tokens["dram"] > 800
        ends[name] = {job.program_id: job.job_s for job in result.jobs}
    assert ends["slow"]["d"] - ends["fast"]["d"] < 0.1 < 1.0 < ends["slow"]["p"] - ends["fast"]["p"]


def test_a_pin_keeps_a_program_on_the_gpu_that_stock_order_lets_go() -> None:
    programs = many_programs(8)
    stock = simulate(programs, SMALL)
    pinned = simulate(programs, replace(SMALL, policy="static-ttl", continuum={"static_ttl_s": 60.0}))
    assert pinned.pins["reused"] > 0
    assert pinned.tokens["computed"] < stock.tokens["computed"]
    assert pinned.mean_job_s < stock.mean_job_s


@pytest.mark.parametrize("untold", [False, True])
def test_a_client_that_tells_no_ends_leaves_the_pin_of_its_last_turn(untold: bool) -> None:
    setup = replace(SMALL, policy="static-ttl", continuum={"static_ttl_s": 60.0}, untold_ends=untold)
    result = simulate([a_program("a", turns=2)], setup)
    assert result.pins["taken"] == (2 if untold else 1)


def test_merged_decode_steps_change_a_mean_by_less_than_two_percent() -> None:
    programs = many_programs(6, output=200)
    exact, merged = simulate(programs, SMALL), simulate(programs, replace(SMALL, merge_steps=8))
    assert merged.mean_job_s == pytest.approx(exact.mean_job_s, rel=0.02)


@pytest.mark.parametrize("policy", ["stock", "program-fcfs", "static-ttl", "continuum"])
@pytest.mark.parametrize("tiers", [None, DRAM], ids=["none", "DRAM"])
def test_not_asking_in_vain_changes_no_digit(policy: str, tiers: dict[str, object] | None) -> None:
    setup = replace(SMALL, policy=policy, tiers=tiers)
    programs = many_programs(16, prompt=3000, every_s=0.1)
    assert simulate(programs, setup) == simulate(programs, replace(setup, skip_blocked=False))


def test_unknown_tool_times_and_contexts_too_long_are_refused() -> None:
    first, last = a_program("p", turns=2).turns
    with pytest.raises(TraceError, match="1 tool times are unknown"):
        simulate([Program("p", 0.0, (replace(first, gap_s=None), last))], SMALL)
    with pytest.raises(TraceError, match="does not fit a GPU of 320 blocks"):
        simulate([a_program("p", prompt=30_000)], SMALL)


def test_a_run_that_leaks_a_block_fails_with_the_equation() -> None:
    from contextlib import ExitStack

    from experiments.sim.clock import VirtualClock, virtual_time
    from experiments.sim.engine import Simulation
    from experiments.sim.serving import build_scheduler

    clock = VirtualClock()
    with ExitStack() as until, virtual_time(clock):
        scheduler = build_scheduler(SMALL, clock, 4096, until)
        scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
        with pytest.raises(InvariantError, match=r"free blocks\(319\) != blocks\(320\)"):
            Simulation(partial(Agents, [a_program("p")]), SMALL, [scheduler], clock).run()
