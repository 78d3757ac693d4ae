"""The simulator with several engines: routers' decisions, and no lost turn, block or program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from continuum_lmcache.errors import InvariantError
from experiments.fleet.figures import accurate_share, closed_share, thrash
from experiments.fleet.measure import of_workload, programs_of
from experiments.fleet.named import ROUTERS
from experiments.fleet.program_scheduling import MOST_PROGRAMS, ProgramScheduling
from experiments.fleet.replica import Replica, Turn
from experiments.fleet.routers import (
    Each,
    Ear,
    LeastOutstanding,
    RoundRobin,
    Router,
    Stateless,
    Sticky,
    by_hash,
    fewest_pending,
    fewest_requests,
    hits_and_load,
    lmetric,
)
from experiments.fleet.run import FleetSetup, Move, run_fleet
from experiments.fleet.workloads import BURST, CALM, bursts
from experiments.offload_sweep import main
from experiments.sim.engine import simulate
from experiments.sim.result import TurnResult
from experiments.sweep.cases import STOCK, FleetPoint, SweepError
from experiments.sweep.rows import FLEET, Rows
from tests.test_sim import A100, DRAM, SMALL, a_program, many_programs

POINT = FleetPoint("hash", STOCK, 1.0, 1)
TWO = FleetSetup(replace(SMALL, policy="continuum", tiers=DRAM), speeds=(1.0, 1.0))
STOCK_TWO = replace(TWO, engine=replace(SMALL, tiers=DRAM))


# routers' decisions -------------------------------------------------------------


@dataclass
class State:
    """A replica with given figures for routers."""

    index: int = 0
    requests: int = 0
    running: int = 0
    waiting: int = 0
    pending_tokens: int = 0
    context_tokens: int = 0
    free_tokens: int = 100_000
    kv_tokens: int = 100_000
    hit: int = 0

    def hit_tokens(self, _turn: Any) -> int:
        return self.hit


@dataclass(frozen=True)
class Asked:
    """A turn with given figures."""

    program: str = "p"
    number: int = 1
    prompt_tokens: int = 10_000
    is_last: bool = False
    id: str = "p/1"


def placed(router: Any, turn: Asked, *states: State, now_s: float = 0.0) -> int | None:
    """Where the router sends the turn; the replicas are numbered in their order."""
    found: int | None = router.place(now_s, turn, [replace(s, index=at) for at, s in enumerate(states)])
    return found


def test_round_robin_takes_turns() -> None:
    router = RoundRobin()
    assert [placed(router, Asked(), State(), State(), State()) for _ in range(4)] == [0, 1, 2, 0]


def test_least_outstanding_counts_a_waiting_line_more_on_a_full_gpu() -> None:
    calm = State(requests=5, running=5)
    line = State(requests=4, running=3, waiting=1)
    assert placed(LeastOutstanding(), Asked(), calm, line) == 1
    assert placed(LeastOutstanding(), Asked(), calm, replace(line, free_tokens=0)) == 0


def test_least_outstanding_rotates_among_equals() -> None:
    router = LeastOutstanding()
    assert [placed(router, Asked(), State(), State()) for _ in range(4)] == [0, 1, 0, 1]


def test_lmetric_multiplies_new_work_by_requests() -> None:
    holds = State(requests=3, hit=9_000)  # 1,000 x 4
    idle = State(requests=0)  # 10,000 x 1
    assert placed(Each(lmetric), Asked(), idle, holds) == 1
    assert placed(Each(lmetric), Asked(), idle, replace(holds, requests=10)) == 0


def test_hits_and_load_adds_prefill_to_what_is_active() -> None:
    holds = State(hit=9_000, context_tokens=8_000)
    assert placed(Each(hits_and_load), Asked(), State(), holds) == 1
    assert placed(Each(hits_and_load), Asked(), State(), replace(holds, context_tokens=9_500)) == 0


def test_a_hash_keeps_most_programs_where_they_were_when_a_replica_goes() -> None:
    names = [Asked(program=f"p{i}") for i in range(200)]
    three = [placed(Each(by_hash), turn, State(), State(), State()) for turn in names]
    two = [placed(Each(by_hash), turn, State(), State()) for turn in names]
    assert all(now == before for now, before in zip(two, three, strict=True) if before != 2)
    assert min(three.count(at) for at in range(3)) > 40


def test_sticky_places_a_first_turn_and_stays_however_busy_the_home_becomes() -> None:
    router = Sticky(fewest_requests)
    assert placed(router, Asked(), State(requests=2), State(requests=1)) == 1
    assert placed(router, Asked(number=2), State(), State(requests=9)) == 1
    assert placed(router, Asked(program="q"), State(), State(requests=9)) == 0


def test_sticky_places_a_program_anew_when_its_home_is_dead() -> None:
    router = Sticky(fewest_requests)
    placed(router, Asked(), State(requests=2), State(requests=1))
    assert router.place(1.0, Asked(number=2), [State(index=0)]) == 0  # type: ignore[arg-type, list-item]
    assert placed(router, Asked(number=3), State(requests=9), State()) == 0


def test_ear_leaves_a_hot_home_for_the_coldest_replica_with_room() -> None:
    router = Ear(fewest_pending, hot_tokens=20_000)
    assert placed(router, Asked(), State(), State(pending_tokens=1), State(pending_tokens=1)) == 0
    hot, full = State(pending_tokens=20_001), State(free_tokens=9_999)
    assert placed(router, Asked(number=2), replace(hot, pending_tokens=20_000), State(), State()) == 0
    assert placed(router, Asked(number=3), hot, full, full) == 0, "nobody has room: it stays"
    assert placed(router, Asked(number=4), hot, full, State(pending_tokens=20_000)) == 2


def test_ear_does_not_move_a_program_again_while_it_cools() -> None:
    router = Ear(fewest_pending, hot_tokens=20_000, cool_s=30.0)
    hot = State(pending_tokens=50_000)
    placed(router, Asked(), State(), hot)
    assert placed(router, Asked(number=2), hot, State(), now_s=100.0) == 1
    assert placed(router, Asked(number=3), State(), hot, now_s=129.0) == 1
    assert placed(router, Asked(number=4), State(), hot, now_s=130.0) == 0


def scheduled() -> ProgramScheduling:
    return ProgramScheduling(prefill_s=lambda tokens: tokens / 5000)


def test_program_scheduling_holds_a_program_that_does_not_fit_beside_the_active_ones() -> None:
    router, room = scheduled(), [State(kv_tokens=15_000)]
    for name in ("p/1", "q/1"):
        assert router.place(0.0, Asked(program=name[0], id=name), room) is None  # type: ignore[arg-type]
    assert [o.turn.id for o in router.opens(0.0, room)] == ["p/1"]  # type: ignore[arg-type]
    assert router.opens(1.0, room) == []  # type: ignore[arg-type]
    router.ended(2.0, Asked(), 0, 10_000)  # type: ignore[arg-type]
    assert [o.turn.id for o in router.opens(2.0, room)] == ["q/1"]  # type: ignore[arg-type]


def test_program_scheduling_admits_nobody_while_a_request_waits_in_the_engine() -> None:
    router, busy = scheduled(), [State(waiting=1)]
    router.place(0.0, Asked(), busy)  # type: ignore[arg-type]
    assert router.opens(0.0, busy) == []  # type: ignore[arg-type]
    assert router.opens(0.5, [State()]) == [], "it looks each second"  # type: ignore[list-item]
    assert len(router.opens(1.0, [State()])) == 1  # type: ignore[list-item]


def test_program_scheduling_lets_a_program_in_that_has_waited_too_long() -> None:
    router, busy = scheduled(), [State(waiting=1)]
    router.place(0.0, Asked(), busy)  # type: ignore[arg-type]
    assert router.opens(299.0, busy) == []  # type: ignore[arg-type]
    assert len(router.opens(300.0, busy)) == 1  # type: ignore[arg-type]


def test_program_scheduling_counts_programs_too() -> None:
    router, room = scheduled(), [State(kv_tokens=10**9)]
    turns = [Asked(program=f"p{i}", id=f"p{i}/1") for i in range(MOST_PROGRAMS + 1)]
    for turn in turns:
        router.place(0.0, turn, room)  # type: ignore[arg-type]
    assert len(router.opens(0.0, room)) == MOST_PROGRAMS  # type: ignore[arg-type]


# runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_every_turn_is_answered_once_whatever_the_router_and_a_run_repeats_itself(name: str) -> None:
    """The run itself checks that every block is free at the end."""
    programs = many_programs(8)
    for setup in (TWO, STOCK_TWO):
        first, again = (run_fleet(programs, setup, ROUTERS[name](POINT)) for _ in range(2))
        assert {(t.program_id, t.number) for t in first.result.turns} == first.replica_of.keys()
        assert len(first.result.turns) == 24
        assert first == again


def test_one_replica_behind_a_router_gives_the_simulation_of_one_engine() -> None:
    programs, setup = many_programs(8), TWO.engine
    alone = run_fleet(programs, FleetSetup(setup, speeds=(1.0,)), RoundRobin())
    assert alone.result == simulate(programs, setup)


def test_a_slow_replica_takes_longer_for_the_same_steps() -> None:
    program = [a_program("p", turns=1)]
    fast, slow = (run_fleet(program, FleetSetup(SMALL, speeds=(s,)), RoundRobin()) for s in (1.0, 0.5))
    assert slow.result.mean_job_s == pytest.approx(2 * fast.result.mean_job_s)


def test_a_program_that_is_sent_elsewhere_counts_as_a_move() -> None:
    found = run_fleet([a_program("p", turns=3)], TWO, RoundRobin())
    assert [(m.source, m.target, m.number) for m in found.moves] == [(0, 1, 2), (1, 0, 3)]


class Listed(RoundRobin):
    """Records the turns that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Turn] = []

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        self.asked.append(turn)
        return super().place(now_s, turn, replicas)


@pytest.mark.parametrize(("starts_known", "expected"), [(True, [None, 1, 2]), (False, [None, None, None])])
def test_an_engine_gets_the_number_of_turns_that_a_program_has_finished(
    starts_known: bool, expected: list[int | None]
) -> None:
    router = Listed()
    run_fleet([a_program("p", turns=3)], replace(TWO, starts_known=starts_known), router)
    said = [turn.request.sampling_params.extra_args for turn in router.asked]  # type: ignore[union-attr]
    assert [fields.get("program_turns") for fields in said] == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["hash", "sticky", "program-sched", "fleet"])
@pytest.mark.parametrize("setup", [TWO, STOCK_TWO], ids=["continuum", "stock"])
def test_the_programs_of_a_dead_replica_go_on_elsewhere(name: str, setup: FleetSetup) -> None:
    programs = many_programs(8)
    found = run_fleet(programs, replace(setup, dies_at_s=1.5), ROUTERS[name](POINT))
    assert found.lost_turns > 0, "nothing was in flight there"
    assert len(found.result.turns) == 24
    assert any(move.is_forced for move in found.moves)
    after = [t for t in found.result.turns if t.finished_s > 1.5]
    assert {found.replica_of[t.program_id, t.number] for t in after} == {1}
    assert 1.0 <= found.rehomed_s <= 10.0


def test_a_pool_outlives_the_replica_that_filled_it() -> None:
    program = [a_program("p", turns=2, prompt=4000)]
    own, pool = (
        run_fleet(program, replace(TWO, dies_at_s=2.0, pool=shared), Sticky(fewest_requests))
        for shared in (False, True)
    )
    assert own.replica_of == pool.replica_of == {("p", 1): 0, ("p", 2): 1}
    assert own.result.turns[1].dram_tokens == 0 and pool.result.turns[1].dram_tokens > 3000


def test_kv_follows_a_program_over_the_link_and_costs_its_bytes() -> None:
    program = [a_program("p", turns=2, prompt=4000)]
    found = run_fleet(program, replace(TWO, link_gbps=1.0), RoundRobin())
    back = found.result.turns[1]
    assert back.dram_tokens == 4019 // 256 * 256  # the last sampled token has no KV
    assert found.copies_s == [pytest.approx(back.dram_tokens * A100.kv_bytes_per_token / 1e9)]
    assert back.ttft_s > found.copies_s[0]


class Stubborn(Stateless):
    """Sends everything to the first replica, dead or not."""

    def place(self, *_: object) -> int:
        return 0


class Forgetful(Stateless):
    """Holds every turn for ever."""

    def place(self, *_: object) -> None:
        return None


def test_a_router_that_sends_a_turn_to_a_dead_replica_fails_the_run() -> None:
    with pytest.raises(InvariantError, match="sent to replica 0, which is dead"):
        run_fleet(many_programs(4), replace(TWO, dies_at_s=1.0), Stubborn())


def test_a_router_that_holds_a_turn_for_ever_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.fleet.run.ENDLESS_S", 100.0)
    router: Router = Forgetful()
    with pytest.raises(InvariantError, match="stuck: 1 turns at the router"):
        run_fleet([a_program("p")], TWO, router)


# programs -----------------------------------------------------------------------


def test_a_tenth_of_the_skewed_programs_has_most_of_the_tokens() -> None:
    mass = sorted((sum(t.input_tokens for t in p.turns) for p in of_workload(POINT, 1000)), reverse=True)
    assert 0.58 < sum(mass[:100]) / sum(mass) < 0.72
    alike = of_workload(replace(POINT, skew=0.0), 1000)
    mass = sorted((sum(t.input_tokens for t in p.turns) for p in alike), reverse=True)
    assert sum(mass[:100]) / sum(mass) < 0.3


def test_tool_gaps_are_those_of_the_trace_up_to_two_minutes() -> None:
    gaps_s = [t.gap_s for p in of_workload(POINT, 500) for t in p.turns[:-1] if t.gap_s is not None]
    assert np.quantile(gaps_s, [0.25, 0.5, 0.9]) == pytest.approx([0.69, 1.6, 44.0], rel=0.2)
    assert max(gaps_s) == 120.0


def test_arrivals_come_in_bursts_at_the_rate_that_was_asked_for() -> None:
    programs = bursts(of_workload(POINT, 50) * 40, 1.0, seed=1)
    waits_s = np.diff([p.arrival_s for p in programs])
    assert np.mean(waits_s) == pytest.approx(1.0, rel=0.15)
    assert np.std(waits_s) > 1.15 * np.mean(waits_s), "a Poisson process has 1"
    assert (CALM[0] * CALM[1] + BURST[0] * BURST[1]) / (CALM[1] + BURST[1]) == pytest.approx(1.0)


def test_twice_the_load_is_the_same_programs_twice_as_fast() -> None:
    slow, fast = (programs_of(replace(POINT, programs=50, rho=rho)) for rho in (0.5, 1.0))
    assert [p.turns for p in slow] == [p.turns for p in fast]
    assert slow[10].arrival_s > fast[10].arrival_s


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    from experiments.fleet.measure import run

    for point, expected in (
        (replace(POINT, router="psychic"), "router is 'psychic'; known: round-robin, least"),
        (replace(POINT, workload="poetry"), "workload is 'poetry'; known: skew, swe, fitted:NAME"),
        (replace(POINT, machine="tpu"), "machine is 'tpu'; known: a100"),
        (replace(POINT, engine="lifo"), "contender is 'lifo'; known: fcfs"),
    ):
        with pytest.raises(SweepError, match=expected):
            run(point)


# figures ------------------------------------------------------------------------


def test_a_move_is_right_unless_its_program_moves_again_within_five_turns() -> None:
    first = Move(10.0, "p", 2, 0, 1, is_forced=False)
    soon = replace(first, at_s=30.0, number=7)
    late = replace(first, at_s=90.0, number=8)
    assert accurate_share([first]) == 1.0
    assert accurate_share([first, soon]) == 0.5
    assert accurate_share([first, late]) == 1.0
    assert accurate_share([first, replace(soon, program="q")]) == 1.0
    assert (thrash([first, soon], cool_s=30.0), thrash([first, late], cool_s=30.0)) == (1, 0)


def test_a_turn_is_in_the_closed_loop_if_it_takes_longer_than_the_tool_after_it() -> None:
    program = a_program("p", turns=3)  # tools take 2 s
    turns = [
        TurnResult("p", n, 0.0, 0.1, took_s, 1, 1, 0, 0, 0) for n, took_s in ((1, 3.0), (2, 1.0), (3, 9.0))
    ]
    assert closed_share(turns, [program]) == 0.5


def test_a_quick_fleet_writes_rows_tables_goals_and_figures(tmp_path: Path) -> None:
    main(["fleet"], quick=True, jobs=1, out=tmp_path)
    text = (tmp_path / "fleet-quick.md").read_text()
    assert "## Routers by load" in text and "| A2 hash / ours, skew, stock |" in text
    names = {path.name for path in tmp_path.iterdir() if path.suffix == ".svg"}
    assert names == {f"fleet-{n}-quick.svg" for n in ("load", "coupling", "balance", "timeline")}
    before = (tmp_path / "fleet.csv").read_text()
    assert len(Rows(tmp_path / "fleet.csv", FLEET).found) == 8
    main(["fleet"], quick=True, jobs=1, out=tmp_path)
    assert (tmp_path / "fleet.csv").read_text() == before, "finished rows are not run again"


def test_the_command_also_runs_by_its_path_and_names_its_sections() -> None:
    path = Path(__file__).parents[1] / "experiments" / "offload_sweep.py"
    command = [sys.executable, str(path), "fleet", "--quick", "--regimes", "nothing"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 1 and "no section has 'nothing' in its name; there are: load" in said.stderr
