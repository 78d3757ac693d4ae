"""The closed loop: what its figures count, and that the simulator plays it whole."""

import asyncio
from dataclasses import replace
from itertools import islice

import pytest
from virtual_loop import run_virtually

from experiments.client import Answer, TurnFailed
from experiments.driver import Plan, run_sessions, untold
from experiments.sessions import LOAD_IDLE_S, STARTS, SessionTurn, capped, figures, played, turn_at, warming
from experiments.sim.serving import Setup
from experiments.sim.sessions import play, play_batch
from experiments.sim.step_time import MACHINES
from experiments.workload import Program, TurnSpec, growing

TURNS = (TurnSpec(4_000, 4_000, 50, "bash", "", 60.0), TurnSpec(5_000, 950, 50, "bash", "", None))
POOL = tuple(Program(f"p{n}", 0.0, TURNS, "") for n in range(3))


def turn(session: int, arrival_s: float, first_s: float | None, tokens: int = 0) -> SessionTurn:
    """A program's only turn; it gets a token a second."""
    last_s = None if first_s is None else first_s + tokens
    return SessionTurn(session, f"p{session}", 1, 1, 10, arrival_s, first_s, last_s, tokens)


def test_a_turn_that_still_waits_counts_with_the_time_it_has_waited():
    found = figures([turn(0, 0.0, 1.0, 10), turn(1, 0.0, None)], 2, 0.0, 700.0)
    assert found["ttft_max_s"] == 700.0
    assert found["starved_sessions"] == 1
    assert found["sessions_in_time_share"] == 0.5


def test_goodput_counts_the_tokens_of_turns_whose_first_token_came_in_time():
    found = figures([turn(0, 0.0, 5.0, 20), turn(1, 0.0, 50.0, 40)], 2, 0.0, 100.0)
    assert found["tokens_per_s"] == pytest.approx(0.6)
    assert found["goodput_10"] == found["goodput_30"] == pytest.approx(0.2)
    assert found["goodput_60"] == pytest.approx(0.6)


def test_a_program_is_in_time_if_it_ended_within_a_quarter_of_an_hour():
    soon, late, unfinished = turn(0, 0.0, 100.0, 10), turn(1, 0.0, 1_000.0, 10), turn(2, 0.0, 100.0, 9)
    found = figures([soon, late, unfinished], 3, 0.0, 3_600.0)
    assert (found["programs"], found["programs_in_time_share"]) == (3, pytest.approx(1 / 3))


def test_interactivity_is_the_tokens_a_second_that_nine_whole_turns_of_ten_reach():
    turns = [turn(n, 0.0, 10.0, 10) for n in range(19)] + [turn(19, 0.0, 90.0, 10), turn(20, 0.0, 95.0, 9)]
    found = figures(turns, 21, 0.0, 200.0)
    assert found["interactivity_p90"] == pytest.approx(10 / 20), (
        "the slowest one and the unfinished one are beyond"
    )
    assert found["ttft_mean_s"] == pytest.approx((19 * 10 + 90 + 95) / 21)


def test_a_first_program_starts_between_a_quarter_and_three_quarters_of_its_time():
    long = growing("long", (100,) * 9, (50,) * 9, gap_s=9.0)  # a turn each ten seconds, the last at 80 s
    assert [turn_at(long, share) for share in (0.25, 0.26, 0.75)] == [2, 3, 6]
    firsts = {next(played((long,), session, seed=1))[1] for session in range(40)}
    assert firsts <= set(range(2, 7)) and len(firsts) > 2 and STARTS == (0.25, 0.75)


def test_a_session_warms_up_by_turns_of_one_token_without_gaps_and_then_goes_on():
    """Its programs are of four turns; five warm it up, from the one before the start."""
    program = growing("p", (100, 100, 100, 100), (50, 50, 50, 50), gap_s=9.0)
    first, second, third = (p.turns[n:] for p, n in warming([(program, 2), (program, 0), (program, 0)], 5))
    assert [(t.output_tokens, t.gap_s) for t in first] == [(1, 0.0), (1, 0.0), (1, None)]
    assert [(t.output_tokens, t.gap_s) for t in second] == [(1, 0.0), (1, 9.0), (50, 9.0), (50, None)]
    assert [t.new_tokens for t in second] == [100, 150, 150, 100], "nobody knows the recorded answers' KV"
    assert third == program.turns


def test_a_session_begins_within_a_program_and_no_two_programs_have_one_name():
    names, starts = set(), set()
    for session in range(8):
        for count, (program, start) in enumerate(islice(played(POOL, session, seed=1), 5)):
            names.add(program.program_id)
            starts.add((count == 0, start))
    assert len(names) == 40
    assert starts == {(True, 1), (False, 0)}


async def streamed(body, heard):
    """A server that answers a token every half second."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(body["max_tokens"]):
        await asyncio.sleep(0.5)
        heard(loop.time(), 1)
    return Answer(began_s + 0.5, loop.time(), (7,) * body["max_tokens"], len(body["prompt"]), None)


async def broken(_body, _heard):
    raise TurnFailed("no server")


def live(complete, limit_s: float):
    """Three live sessions on virtual time until the limit: their turns, and what was recorded."""
    turns, records = [], []
    plan = Plan("fake", 1, range(300, 4000), identify=untold)

    async def until_limit() -> None:
        running = asyncio.create_task(run_sessions(POOL, plan, complete, records.append, 3, turns))
        await asyncio.wait({running}, timeout=limit_s)
        running.cancel()
        await asyncio.wait({running})

    run_virtually(until_limit())
    return turns, records


def test_a_live_session_plays_the_turns_of_one_program_after_another():
    turns, records = live(streamed, 600.0)
    assert {turn.session for turn in turns} == {0, 1, 2}
    mine = [turn for turn in turns if turn.session == 0]
    assert [turn.number for turn in mine[-4:]] in ([1, 2, 1, 2], [2, 1, 2, 1])
    assert len({turn.program for turn in mine}) > 5
    assert all(turn.tokens == 50 for turn in mine[:-1])
    assert all(record.error is None for record in records)
    assert figures(turns, 3, 100.0, 600.0)["ttft_max_s"] == pytest.approx(0.5)


def test_a_failed_turn_is_recorded_and_its_session_goes_on_with_another_program():
    turns, records = live(broken, 5.5)
    assert len(records) == len(turns) == 3 * 6
    assert {record.error for record in records} == {"no server"}


@pytest.fixture
def setup() -> Setup:
    machine = replace(MACHINES["a100"], kv_tokens=12_800)
    return Setup("continuum", machine=machine, tiers={"dram_gb": 5.0}, untold_ends=True)


def test_all_sessions_are_live_until_the_end_and_then_nothing_is_left(setup):
    """`play` checks blocks, pins and requests when the clients have left."""
    ran = play(capped(POOL, 2.0), setup, sessions=6, seed=1, counted_s=60.0)
    assert {turn.session for turn in ran.turns} == set(range(6))
    last = {turn.session: turn for turn in ran.turns}
    assert ran.end_s == pytest.approx(ran.start_s + 60.0, abs=1.0)
    assert all((turn.last_s or 0.0) > ran.end_s - 20.0 or turn.first_s is None for turn in last.values())
    assert play(capped(POOL, 2.0), setup, sessions=6, seed=1, counted_s=60.0).turns == ran.turns


@pytest.mark.parametrize("contender", ["stock", "continuum", "gate"])
def test_no_turn_counts_before_every_session_is_warm(setup, contender):
    named = replace(setup, policy="stock" if contender == "gate" else contender, gate=contender == "gate")
    ran = play(capped(POOL, 2.0), named, sessions=4, seed=1, counted_s=30.0, warm_up_turns=3)
    before = [turn for turn in ran.turns if turn.arrival_s < ran.start_s]
    assert len(before) == 4 * 3 and {turn.asked_tokens for turn in before} == {1}
    assert all(turn.last_s is not None and turn.last_s <= ran.start_s for turn in before)
    assert {turn.asked_tokens for turn in ran.turns if turn.arrival_s >= ran.start_s} == {50}


def test_all_sessions_together_are_idle_for_ten_seconds_at_most(setup):
    """Two sessions with gaps of a minute."""
    ran = play(POOL, setup, sessions=2, seed=1, counted_s=120.0, warm_up_turns=1)
    ends_s = sorted(turn.last_s for turn in ran.turns if turn.last_s is not None)
    idle_s = [
        turn.arrival_s - max((end_s for end_s in ends_s if end_s <= turn.arrival_s), default=0.0)
        for turn in ran.turns
    ]
    assert LOAD_IDLE_S - 0.1 <= max(idle_s) <= LOAD_IDLE_S + 2.0, (
        "two seconds: another turn may run meanwhile"
    )


def test_a_batch_ends_when_every_program_has(setup):
    ran = play_batch(POOL, setup, workers=2)
    assert sorted(job.program_id for job in ran.result.jobs) == ["p0", "p1", "p2"]
    assert sum(turn.ended_program for turn in ran.turns) == 3
    assert ran.end_s == pytest.approx(max(job.finished_s for job in ran.result.jobs))
