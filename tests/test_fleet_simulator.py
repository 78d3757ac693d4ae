"""The simulator with several engines: routers' decisions, and no lost turn, block or program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import typer

from experiments.fleet.replica import Replica, Turn
from experiments.fleet.routers import (
    ROUTERS,
    Each,
    Ear,
    Router,
    Sticky,
    by_hash,
    fewest_pending,
    fewest_requests,
)
from experiments.fleet.run import FleetResult, FleetSetup, Moved, run_fleet
from experiments.fleet.table import HEADER, main
from experiments.sim.engine import simulate
from experiments.sim.result import Result
from tests.test_sim import A100, DRAM, SMALL, a_program, many_programs

TWO = FleetSetup(replace(SMALL, policy="continuum", tiers=DRAM), speeds=(1.0, 1.0))
STOCK_TWO = replace(TWO, engine=replace(SMALL, tiers=DRAM))


# routers' decisions -------------------------------------------------------------


@dataclass
class State:
    """A replica with given figures for routers."""

    index: int = 0
    requests: int = 0
    pending_tokens: int = 0
    free_tokens: int = 100_000


@dataclass(frozen=True)
class Asked:
    """A turn with given figures."""

    program: str = "p"
    number: int = 1
    prompt_tokens: int = 10_000


def placed(router: Any, turn: Asked, *states: State, now_s: float = 0.0) -> int:
    """Where the router sends the turn; the replicas are numbered in their order."""
    found: int = router.place(now_s, turn, [replace(s, index=at) for at, s in enumerate(states)])
    return found


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


# runs ---------------------------------------------------------------------------


class InTurn(Router):
    """Each turn to the next replica; records what it gets."""

    def __init__(self) -> None:
        self.asked: list[Turn] = []
        self.turns = count()

    def place(self, _now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        self.asked.append(turn)
        return next(self.turns) % len(replicas)


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_every_turn_is_answered_once_whatever_the_router_and_a_run_repeats_itself(name: str) -> None:
    """The run itself checks that every block is free at the end."""
    programs = many_programs(8)
    for setup in (TWO, STOCK_TWO):
        first, again = (run_fleet(programs, setup, ROUTERS[name]()) for _ in range(2))
        assert {(t.program_id, t.number) for t in first.result.turns} == first.replica_of.keys()
        assert len(first.result.turns) == 24
        assert first == again


def test_one_replica_behind_a_router_gives_the_simulation_of_one_engine() -> None:
    programs, setup = many_programs(8), TWO.engine
    assert run_fleet(programs, FleetSetup(setup, speeds=(1.0,)), InTurn()).result == simulate(programs, setup)


def test_a_program_that_is_sent_elsewhere_moves_and_its_engine_learns_that_it_has_started() -> None:
    router = InTurn()
    found = run_fleet([a_program("p", turns=3)], TWO, router)
    assert [move.number for move in found.moves] == [2, 3]
    said = [turn.request.sampling_params.extra_args for turn in router.asked]  # type: ignore[union-attr]
    assert [fields.get("program_turns") for fields in said] == [None, 1, 2]  # type: ignore[union-attr]


def test_kv_follows_a_program_over_the_link_and_costs_its_bytes() -> None:
    program = [a_program("p", turns=2, prompt=4000)]
    found = run_fleet(program, replace(TWO, link_gbps=1.0), InTurn())
    back = found.result.turns[1]
    assert back.dram_tokens == 4019 // 256 * 256  # the last sampled token has no KV
    assert found.copies_s == [pytest.approx(back.dram_tokens * A100.kv_bytes_per_token / 1e9)]
    assert back.ttft_s > found.copies_s[0]


# programs -----------------------------------------------------------------------


# figures ------------------------------------------------------------------------


def result(*moves: Moved) -> FleetResult:
    return FleetResult(Result((), (), 0, 0, 0.0, 0, {}, False), moves=list(moves))


def test_a_move_is_right_unless_its_program_moves_again_within_five_turns() -> None:
    first = Moved(10.0, "p", 2)
    soon, late, other = (
        replace(first, number=7),
        replace(first, number=8),
        replace(first, program="q", number=3),
    )
    assert result().accurate_share() == result(first, late).accurate_share() == 1.0
    assert result(first, soon).accurate_share() == 0.5
    assert result(first, other).accurate_share() == 1.0


def test_the_command_prints_one_line_for_each_router_and_engine(capsys: pytest.CaptureFixture[str]) -> None:
    main(programs=4, rho=3.0, seed=[1], router=["hash", "ours"], engine=["stock", "continuum"])
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header.count("|") == len(HEADER) + 1
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines]
    assert cells == [[engine, router] for engine in ("stock", "continuum") for router in ("hash", "ours")]
    with pytest.raises(typer.BadParameter, match="unknown router 'psychic'; known: hash"):
        main(programs=4, router=["psychic"])
