"""The fleet's state in its actor: the line, a restart, replicas that die. Virtual time; no ray, no engine."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from virtual_loop import run_virtually

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.fleet.fleet import FleetConfig, KnownProgram, Refused, Route, RouteReason
from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.serve.gauges import costs, replica_report
from continuum_lmcache.serve.names import TurnName
from continuum_lmcache.serve.replica_programs import FirstToken, ReplicaPrograms, TurnEnd
from continuum_lmcache.serve.settings import ServeSettings
from continuum_lmcache.serve.state import END_GRACE_S, GONE_S, MORE_TURNS, START_WAIT_S, FleetState
from continuum_lmcache.types import ProgramId, TurnId

GPU_TOKENS = 1000
BYTES = 4  # a token, before anything is learnt


class Host:
    """A state, its replicas and a router."""

    def __init__(self, replicas: str = "ab", **settings: Any) -> None:
        clock = asyncio.get_running_loop().time
        self.state = FleetState(asdict(FleetConfig(**settings)), b"key".hex(), now_s=clock)
        self.replicas = list(replicas)
        self.numbers = 0

    async def hears(self, *names: str, **figures: Any) -> None:
        for name in names or self.replicas:
            says = ReplicaReport(ReplicaId(name), 0.0, GPU_TOKENS, **figures)
            await self.state.take_report(name, {"rank": self.replicas.index(name)}, says, [])
            await self.state.restore_programs(name, [])

    def sends(self, program: str, tokens: int = 100) -> asyncio.Task[Route | Refused]:
        self.numbers += 1
        named = TurnName(program, tokens * BYTES)
        asked = self.state.place_turn(f"t{self.numbers}", named, False, tuple(self.replicas))
        return asyncio.get_running_loop().create_task(asked)

    async def runs(self, program: str, tokens: int = 100) -> Route:
        """A whole turn."""
        route = await self.sends(program, tokens)
        assert isinstance(route, Route)
        await self.ends(route, tokens)
        return route

    async def ends(self, route: Route, tokens: int, is_last: bool = False) -> None:
        says = ReplicaReport(route.replica, 0.0, GPU_TOKENS)
        events = [FirstToken(route.turn, tokens, tokens * BYTES), TurnEnd(route.turn, tokens, is_last)]
        about = {"rank": self.replicas.index(route.replica)}
        await self.state.take_report(route.replica, about, says, events)
        await self.state.check()


async def started(replicas: str = "ab", **settings: Any) -> Host:
    host = Host(replicas, **settings)
    await host.hears()
    return host


def test_a_programs_turns_go_to_one_replica_and_programs_are_spread() -> None:
    async def go() -> None:
        host = await started()
        first = {p: (await host.sends(p)) for p in "pqrs"}
        at = {p: r.replica for p, r in first.items() if isinstance(r, Route)}
        assert sorted(at.values()) == ["a", "a", "b", "b"]
        for route in first.values():
            assert isinstance(route, Route)
            await host.ends(route, 100)
        for program, replica in at.items():
            again = await host.runs(program)
            assert (again.replica, again.why, again.program_turns) == (replica, RouteReason.HOME, 1)

    run_virtually(go())


def test_a_program_that_finds_no_room_waits_until_another_ends() -> None:
    async def go() -> None:
        host = await started(max_wait_s=1000.0)
        inside = [await host.sends(f"big-{i}", 900) for i in range(2)]
        waits = host.sends("late", 900)
        await asyncio.sleep(30)
        assert not waits.done() and (await host.state.snapshot())["line"] == 1
        assert isinstance(inside[0], Route)
        await host.ends(inside[0], 900, is_last=True)
        route = await waits
        assert isinstance(route, Route) and route.replica == inside[0].replica

    run_virtually(go())


def test_nobody_waits_longer_in_the_line_than_the_setting_says_though_no_news_come() -> None:
    async def go() -> None:
        host = await started(max_wait_s=20.0)
        for i in range(2):
            await host.sends(f"big-{i}", 900)
        start_s = asyncio.get_running_loop().time()
        route = await host.sends("late", 900)
        assert isinstance(route, Route) and route.why is RouteReason.LET_IN
        assert asyncio.get_running_loop().time() - start_s <= 21.0

    run_virtually(go())


def test_a_turn_in_the_line_is_answered_when_its_programs_next_turn_starts_it() -> None:
    """It became due after the last look at the line."""

    async def go() -> None:
        host = await started(max_wait_s=20.2)
        for i in range(2):
            await host.sends(f"big-{i}", 900)
        first = host.sends("p", 900)
        await asyncio.sleep(20.3)
        second = await host.sends("p", 900)
        assert isinstance(second, Route)
        await host.state.remove_replica(second.replica, died=True)  # at once: its turns are gone
        route = await asyncio.wait_for(first, 1)
        assert isinstance(route, Route) and route.replica == second.replica

    run_virtually(go())


def test_a_full_line_refuses_new_programs_with_a_time_and_nobody_elses_turn() -> None:
    async def go() -> None:
        host = await started(max_line=1, max_wait_s=1000.0)
        known = await host.runs("known", 900)
        assert isinstance(await host.sends("other", 900), Route)
        back = await host.sends("known", 900)
        assert isinstance(back, Route) and back.replica == known.replica
        waits = host.sends("third", 900)
        await asyncio.sleep(1)
        refused = await host.sends("fourth", 900)
        assert isinstance(refused, Refused) and refused.retry_after_s >= 1 and not waits.done()
        await host.state.cancel_turn("t4")  # the third's client leaves
        assert not isinstance(await asyncio.wait_for(asyncio.shield(host.sends("x", 1)), 1000), Refused)

    run_virtually(go())


def test_a_client_that_leaves_the_line_is_not_sent_anywhere_later() -> None:
    async def go() -> None:
        host = await started(max_wait_s=1000.0)
        inside = [await host.sends(f"big-{i}", 900) for i in range(2)]
        waits = host.sends("late", 900)
        await asyncio.sleep(1)
        await host.state.cancel_turn("t3")
        assert isinstance(inside[0], Route)
        await asyncio.wait_for(waits, 1)  # Ray does not end the call whose caller has gone
        await host.ends(inside[0], 900, is_last=True)
        await asyncio.sleep(10)
        told = await host.state.snapshot()
        assert told["line"] == 0 and sum(row["turns"] for row in told["replicas"]) == 1
        await host.state.check()

    run_virtually(go())


def test_one_programs_many_turns_leave_the_state_calls_for_reports() -> None:
    async def go() -> None:
        host = await started(max_line=3, max_wait_s=1000.0)
        for name in ("big-0", "big-1"):
            assert isinstance(await host.sends(name, 900), Route)
        waiting = [host.sends("flood", 900) for _ in range(3 + MORE_TURNS + 20)]
        await asyncio.sleep(1)
        refused = [asked.result() for asked in waiting if asked.done()]
        assert len(refused) == 20 and all(isinstance(each, Refused) for each in refused)
        await host.state.check()
        assert (await host.state.snapshot())["line"] == 1
        for number in range(3, 3 + len(waiting)):
            await host.state.cancel_turn(f"t{number}")
        await asyncio.gather(*waiting)

    run_virtually(go())


def test_a_client_that_leaves_before_a_new_state_has_its_reports_is_not_counted() -> None:
    async def go() -> None:
        host = Host()
        asked = host.sends("early", 900)
        await asyncio.sleep(START_WAIT_S / 2)
        await host.state.cancel_turn("t1")
        await host.hears()
        assert isinstance(await asked, Refused)
        told = await host.state.snapshot()
        assert told["programs"] == told["line"] == 0 and not any(row["turns"] for row in told["replicas"])
        await host.state.check()

    run_virtually(go())


def test_programs_of_a_dead_replica_go_to_the_others_and_the_engine_learns_that_they_have_started() -> None:
    async def go() -> None:
        host = await started()
        routes = {p: await host.runs(p) for p in "pqrs"}
        await host.state.remove_replica("a", died=True)
        await host.hears("a")  # its last words come late: it stays gone
        for program, before in routes.items():
            after = await host.runs(program)
            assert (after.replica, after.program_turns) == ("b", 1)
            assert after.why is (RouteReason.REHOMED if before.replica == "a" else RouteReason.HOME)
        assert [row["replica"] for row in (await host.state.snapshot())["replicas"]] == ["b"]

    run_virtually(go())


def test_a_replica_that_the_routers_see_again_takes_turns_again() -> None:
    """Ray leaves a replica out of their lists while it changes the replica's settings."""

    async def go() -> None:
        host = await started("a")
        await host.state.remove_replica("a", died=False)
        await host.hears()
        waits = host.sends("p")
        await asyncio.sleep(1)
        assert not waits.done(), "while it drains it only reports"
        await host.state.add_replica("a")
        await host.hears()
        route = await asyncio.wait_for(waits, 1)
        assert isinstance(route, Route) and route.replica == "a"
        await host.state.check()

    run_virtually(go())


def test_a_replica_of_whose_end_nobody_spoke_is_dropped_when_it_is_silent_and_out_of_sight() -> None:
    async def go() -> None:
        host = await started()
        routes = {p: await host.runs(p) for p in "pq"}
        lost = next(p for p, route in routes.items() if route.replica == "a")

        async def is_there() -> bool:
            await host.sends("~")  # any turn, from a router that sees b alone
            return "a" in [row["replica"] for row in (await host.state.snapshot())["replicas"]]

        host.replicas = ["b"]
        await asyncio.sleep(GONE_S - 1)
        await host.hears("b")
        assert await is_there(), "it may be new to this router"
        await asyncio.sleep(2)
        assert not await is_there()
        assert (await host.runs(lost)).replica == "b"
        await host.state.check()
        host.replicas = ["b", "a"]
        await host.hears("a")
        assert await is_there(), "it was only slow"

    run_virtually(go())


def test_a_turn_whose_replica_died_under_it_is_sent_to_another_when_it_is_asked_again() -> None:
    async def go() -> None:
        host = await started()
        route = await host.sends("p")
        assert isinstance(route, Route) and route.replica == "a"
        await host.state.remove_replica("a", died=False)  # the controller said so
        named = TurnName("p", 400)
        again = await host.state.place_turn(route.turn, named, True, ("b",))
        assert isinstance(again, Route) and again.replica == "b"
        await host.state.check()

    run_virtually(go())


def test_a_turn_whose_end_no_replica_reports_is_not_counted_for_ever() -> None:
    async def go() -> None:
        host = await started()
        route = await host.sends("p")
        assert isinstance(route, Route)
        await host.state.turn_answered(route.turn)
        assert route.turn in host.state.fleet.turns, "the replica's news may be on their way"
        await asyncio.sleep(END_GRACE_S + 0.1)
        assert route.turn not in host.state.fleet.turns
        await host.state.check()

    run_virtually(go())


def test_a_full_replicas_refusal_ends_no_turn_that_is_sent_again() -> None:
    """Ray reports the refused attempt as a request that has ended."""

    async def go() -> None:
        host = await started()
        route = await host.sends("p")
        assert isinstance(route, Route)
        await host.state.turn_answered(route.turn)
        await asyncio.sleep(0.2)
        assert await host.state.place_turn(route.turn, TurnName("p", 400), True, ("a", "b")) == route
        await asyncio.sleep(2 * END_GRACE_S)
        assert route.turn in host.state.fleet.turns
        await host.state.turn_answered(route.turn)
        await asyncio.sleep(END_GRACE_S + 0.1)
        assert not host.state.fleet.turns
        await host.state.check()

    run_virtually(go())


def test_a_program_that_only_its_router_knows_goes_on_at_home_and_not_into_the_line() -> None:
    """The router placed it by its own table while the state was slow."""

    async def go() -> None:
        host = await started(max_wait_s=1000.0)
        for i in range(2):
            await host.sends(f"big-{i}", 900)
        named, seen = TurnName("p", 400), ("a", "b")
        waits = host.sends("p")  # from another router, which does not know it
        await asyncio.sleep(1)
        assert not waits.done()
        here = host.state.place_turn("x", named, False, seen, "b")
        for asked in (here, waits):
            route = await asyncio.wait_for(asked, 1)
            assert isinstance(route, Route) and (route.replica, route.why) == ("b", RouteReason.HOME)
        elsewhere = host.state.place_turn("y", TurnName("q", 400), False, seen, "not reported yet")
        assert isinstance(await asyncio.wait_for(elsewhere, 1), Route)
        await host.state.check()

    run_virtually(go())


def test_a_turn_in_the_line_goes_home_when_its_replicas_table_comes_late() -> None:
    async def go() -> None:
        host = Host(max_wait_s=1000.0)
        await host.hears("b")
        await asyncio.sleep(START_WAIT_S + 0.1)
        await host.sends("big", 900)
        waits = host.sends("p", 900)
        await asyncio.sleep(0.1)
        says = ReplicaReport(ReplicaId("a"), 0.0, GPU_TOKENS, requests=1, headroom_tokens=-1.0)
        await host.state.take_report("a", {}, says, [])
        await host.state.restore_programs("a", [KnownProgram(ProgramId("p"), 7, 900, 60.0)])
        route = await asyncio.wait_for(waits, 1)
        assert isinstance(route, Route)
        assert (route.replica, route.why, route.program_turns) == ("a", RouteReason.HOME, 7)
        assert route.program_age_s == 60.0
        await host.state.check()

    run_virtually(go())


def test_a_new_state_moves_nobody_before_the_replicas_have_reported_what_they_remember() -> None:
    async def go() -> None:
        first = await started()
        homes = {p: (await first.runs(p)).replica for p in "pqrs"}
        books: dict[str, list[KnownProgram]] = {name: [] for name in "ab"}
        for program, replica in homes.items():
            books[replica].append(KnownProgram(ProgramId(program), 1, 100, 5.0))
        second = Host()
        turns = [second.sends(program) for program in homes]
        await asyncio.sleep(0.4)
        assert not any(turn.done() for turn in turns)
        for name, known in books.items():
            says = ReplicaReport(ReplicaId(name), 0.0, GPU_TOKENS)
            assert await second.state.take_report(name, {}, says, []) != first.state.name
            await second.state.restore_programs(name, known)
        routes = [await turn for turn in turns]
        found = {p: r.replica for p, r in zip(homes, routes, strict=True) if isinstance(r, Route)}
        assert found == homes

    run_virtually(go())


def test_a_replica_that_reports_nothing_holds_a_new_state_up_for_a_moment_only() -> None:
    async def go() -> None:
        host = Host()
        await host.hears("a")
        route = await host.sends("p")
        assert isinstance(route, Route) and route.replica == "a"
        assert asyncio.get_running_loop().time() <= START_WAIT_S + 0.1

    run_virtually(go())


def test_a_replica_that_has_long_been_silent_gets_no_first_turn_and_its_programs_still_come_home() -> None:
    async def go() -> None:
        host = await started(first_turn_age_s=30.0)
        silent = await host.runs("p")
        for _ in range(80):
            await asyncio.sleep(0.5)
            await host.hears("b" if silent.replica == "a" else "a")
        for i in range(4):
            assert (await host.runs(f"new-{i}")).replica != silent.replica
        assert (await host.runs("p")).replica == silent.replica

    run_virtually(go())


def test_a_prompts_size_is_estimated_from_its_bytes_by_what_prompts_had() -> None:
    async def go() -> None:
        host = await started()
        assert host.state.tokens_of(4000) == 1000
        says = ReplicaReport(ReplicaId("a"), 0.0, GPU_TOKENS)
        await host.state.take_report("a", {}, says, [FirstToken(TurnId("x"), 1000, 20_000)])
        assert 190 <= host.state.tokens_of(4000) <= 210 and host.state.tokens_of(0) == 1

    run_virtually(go())


def test_the_state_reports_its_figures_and_no_programs_name() -> None:
    async def go() -> None:
        host = await started()
        await host.runs("secret-program")
        told, text = await host.state.snapshot(), await host.state.metrics()
        assert "secret" not in str(told) + text
        assert [row["rank"] for row in told["replicas"]] == [0, 1]
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["continuum_fleet_turns"].samples[0].value == 1
        assert {s.labels["replica"] for s in families["continuum_fleet_replica_programs"].samples} == {
            "0",
            "1",
        }

    run_virtually(go())


def test_replicas_are_listed_in_the_order_of_their_ranks() -> None:
    async def go() -> None:
        host = await started(replicas="abcdefghijkl")
        ranks = [row["rank"] for row in (await host.state.snapshot())["replicas"]]
        assert ranks == list(range(12))

    run_virtually(go())


def test_a_turn_is_reported_once_however_many_prompts_it_brought() -> None:
    ends: list[None] = []
    programs = ReplicaPrograms(most=10, on_end=lambda: ends.append(None))
    for _ in range(2):
        programs.on_start(0.0, TurnId("t"), ProgramId("p"), 3, 7.0)
    for tokens in (50, 80):
        programs.on_first_token(TurnId("t"), tokens - 10, 400)
    programs.on_stop(TurnId("t"), 50, is_last=False)
    assert programs.known(1.0) == [KnownProgram(ProgramId("p"), 3, 0, 8.0, (TurnId("t"),))] and not ends
    programs.on_stop(TurnId("t"), 80, is_last=False)
    assert programs.events == [FirstToken(TurnId("t"), 40, 400), TurnEnd(TurnId("t"), 80, False)]
    assert programs.known(2.0) == [KnownProgram(ProgramId("p"), 4, 80, 9.0, ())] and len(ends) == 1


def test_a_program_that_comes_back_has_the_turns_that_it_finished_elsewhere() -> None:
    programs = ReplicaPrograms(most=2)
    for number, turns in enumerate((0, 6)):
        programs.on_start(0.0, TurnId(f"t{number}"), ProgramId("p"), turns, 0.0)
        programs.on_stop(TurnId(f"t{number}"), 10, is_last=False)
    assert [known.turns for known in programs.known(1.0)] == [7]


def test_a_program_is_forgotten_with_its_last_turn_and_of_too_many_the_oldest() -> None:
    programs = ReplicaPrograms(most=2)
    for name in ("p", "q", "r"):
        programs.on_start(0.0, TurnId(name), ProgramId(name), 0, 0.0)
        programs.on_stop(TurnId(name), 10, is_last=name == "r")
    assert [known.program for known in programs.known(1.0)] == ["q"]
    programs.on_start(2.0, TurnId("gone"), ProgramId("q"), 0, 0.0)
    programs.on_stop(TurnId("gone"), 0, is_last=False)  # it came to nothing
    assert [(k.program, k.turns, k.context_tokens) for k in programs.known(3.0)] == [("q", 1, 10)]


def test_a_report_takes_the_engines_figures_and_what_stock_vllm_does_not_report_is_not_there() -> None:
    stock = replica_report(
        "a", 5000, {("vllm:num_requests_waiting", ""): 2.0, ("vllm:num_requests_running", ""): 3.0}
    )
    assert (stock.requests, stock.gpu_tokens, stock.headroom_tokens) == (5, 5000, None)
    assert not stock.returning_first
    told = {
        ("continuum_gpu_capacity_tokens", ""): 8192.0,
        ("continuum_admission_headroom_tokens", ""): -5.0,
        ("continuum_tier_capacity_tokens", "dram"): 9000.0,
        ("continuum_prefill_fixed_seconds", ""): 0.1,
        ("continuum_prefill_seconds_per_token", ""): 0.01,
        ("continuum_prefill_seconds_per_token_pair", ""): 0.0,
        ("continuum_kv_bytes_per_token", ""): 8192.0,
    }
    ours = replica_report("a", 5000, told)
    assert (ours.gpu_tokens, ours.headroom_tokens, ours.tier_tokens) == (8192, -5.0, 9000.0)
    assert ours.returning_first and costs(told).prefill_s(100) == pytest.approx(1.1)


def test_settings_come_from_text_and_an_unknown_or_senseless_one_is_refused() -> None:
    text = {"model": "m", "replicas": "2", "gpus": "0", "lmcache_gb": "1", "fleet.max_line": "7"}
    settings = ServeSettings.of(text)
    assert (settings.replicas, settings.gpus, settings.fleet.max_line) == (2, 0.0, 7)
    assert settings.vllm_args[0] == "m" and "--kv-transfer-config" in settings.vllm_args
    for wrong in (
        {"model": ""},
        {},
        {"replica": 2},
        {"replicas": 0},
        {"replicas": "x"},
        {"fleet.movr": "cost"},
        {"key": "short"},
    ):
        with pytest.raises(ConfigError):
            ServeSettings.of({"model": "m", **wrong} if wrong and "model" not in wrong else wrong)
    with pytest.raises(ConfigError, match="^replicas is 'x'; it must be a number$"):
        ServeSettings.of({"model": "m", "replicas": "x"})
