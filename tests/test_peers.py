"""Other projects' schedulers as contenders: their settings, missing ones, their rules in the simulator."""

from __future__ import annotations

import json
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.client import Client
from experiments.driver import Plan, run
from experiments.offload_sweep import Wanted, cases_of, wanted
from experiments.peers import install, live, settings
from experiments.sim.sessions import play
from experiments.sweep import closed_loop, simulated
from experiments.sweep.cases import AGENTINFER, PEERS, ROUTER, ROUTER_WARM, Live, Point, SweepError
from experiments.sweep.grids import Size
from experiments.sweep.live_plans import LIVE_PLANS
from experiments.sweep.plans import PLANS
from experiments.workload import Program, TurnSpec
from tests.openai_server import FakeServer
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
MACHINE = live.profiled("cpu-tiny.yaml")
SMALL = Point(AGENTINFER, 8, 0.2, 1)
IN_THE_SIMULATOR = pytest.mark.skipif(
    bool(install.missing(AGENTINFER, simulated=True)), reason=install.missing(AGENTINFER, simulated=True)
)


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
def test_a_peers_settings_have_what_this_machines_prefill_costs(tokens: int) -> None:
    told = settings.router(MACHINE, 15_360, None)["prefill_cost_model"]
    thousands = tokens / 1000
    cost_s = told["intercept_seconds"] + told["linear_seconds_per_1k_tokens"] * thousands
    cost_s += told["quadratic_seconds_per_1k_tokens_squared"] * thousands**2
    assert cost_s == pytest.approx(MACHINE.costs.prefill_s(tokens))


@pytest.mark.parametrize("batch", [1, 8])
def test_a_peers_settings_have_what_this_machines_decode_steps_take(batch: int) -> None:
    told = settings.agentinfer(MACHINE)["progress_ttl"]
    step_s = told["decode_step_fixed_seconds"] + batch * told["decode_step_seconds_per_request"]
    step_s += batch * 1000 * told["decode_step_seconds_per_context_token"]
    assert step_s == pytest.approx(MACHINE.seconds([(1, 1000)] * batch))


@pytest.mark.anyio
async def test_a_program_names_itself_to_a_peer_in_its_own_field_and_in_no_other() -> None:
    program = Program("run-1", 0.0, (TurnSpec(20, 20, 2, gap_s=0.0), TurnSpec(30, 8, 2)))
    server, plan = FakeServer(), Plan("fake", 1, range(300, 400), identify=live.identity)
    async with server.running() as url, Client(url, timeout_s=PATIENCE_S) as client:
        await run([program], plan, client.complete, lambda _: None)
    told = [json.loads(body["vllm_xargs"]["agentic_context"]) for body in server.bodies]
    assert [(t["program_id"], t["expected_resume"]) for t in told] == [("run-1", True), ("run-1", False)]
    assert not {"job_id", "is_last_step", "this_func_call"} & set().union(*server.bodies)


def test_a_contender_that_is_not_installed_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "ROUTER", tmp_path / "vllm-router")
    monkeypatch.setattr(install, "ENGINE", tmp_path / "engine")
    cases = cases_of(LIVE_PLANS["peers"], Size.DEFAULT, [3], Wanted())
    assert cases
    assert not {case.contender for case in cases} & {*PEERS}
    said = capsys.readouterr().err
    assert f"{ROUTER_WARM} is left out" in said
    assert "python -m experiments.peers.install makes it" in said
    simulated_too = cases_of(PLANS["peers"], Size.DEFAULT, [3], Wanted())
    assert simulated_too and not {case.contender for case in simulated_too} & {*PEERS}
    with pytest.raises(SweepError, match="no contender is installed: .*peers.install makes it"):
        closed_loop.tabulate(closed_loop.points(Size.QUICK, contenders=ROUTER_WARM), 1, tmp_path)


def test_contenders_and_tiers_choose_among_the_rows() -> None:
    plan = LIVE_PLANS["peers"]
    ours = cases_of(plan, Size.FULL, [3, 4], wanted("swe", "continuum,fcfs", "disk"))
    assert {(case.contender, case.seed) for case in ours} == {
        (name, seed) for name in ("continuum", "fcfs") for seed in (3, 4)
    }
    assert all(isinstance(case, Live) and case.ssd_gb for case in ours)
    with pytest.raises(SweepError, match="--tiers tape is not known; known: none, dram, disk"):
        wanted("", "", "tape")
    with pytest.raises(SweepError, match="--contenders lifo is not known; known: .*continuum"):
        cases_of(plan, Size.FULL, [3], wanted("", "lifo", ""))


def test_the_extra_and_the_lock_file_name_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["peers"]
    assert extra == [install.pinned(line.partition("==")[0]) for line in extra]
    assert len(extra) == 2


@IN_THE_SIMULATOR
@pytest.mark.parametrize("contender", PEERS)
def test_a_peer_runs_in_virtual_time_and_gives_the_clock_back(contender: str) -> None:
    point = replace(SMALL, contender=contender)
    result = simulated.run(point)
    assert result["jobs"] == point.programs
    assert result["job_mean_s"] == simulated.run(point)["job_mean_s"]
    from agentinfer.scheduling import runtime

    assert runtime.time is time


@IN_THE_SIMULATOR
@pytest.mark.parametrize("contender", [AGENTINFER, ROUTER_WARM])
def test_a_peers_sessions_that_leave_while_turns_run_leave_nothing_behind(contender: str) -> None:
    """`play` checks blocks and requests once the clients have left."""
    pool = tuple(Program(f"p{n}", 0.0, (TurnSpec(4_000, 4_000, 900, gap_s=None),)) for n in range(3))
    setup = simulated.setup_of(replace(SMALL, contender=contender), pool)
    ran = play(pool, setup, sessions=3, seed=1, end_s=20.0)
    assert any(turn.tokens and not turn.ended_program for turn in ran.turns)


@IN_THE_SIMULATOR
def test_a_peer_lets_held_programs_in_when_their_time_comes_though_nothing_else_happens() -> None:
    """On an idle engine after the last arrival; the simulator once postponed that time for ever."""
    point = Point(ROUTER, 8, 1.0, 3)
    assert simulated.run(point)["jobs"] == point.programs
