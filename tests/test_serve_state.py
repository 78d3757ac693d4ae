"""The fleet's state in its actor: a restart, replicas that die, reports. Virtual time; no ray, no engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_loop import VirtualLoop

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.fleet.fleet import COOLDOWN_S, KnownProgram, ReplicaId, ReplicaReport, Route
from continuum_lmcache.programs.identity import hidden
from continuum_lmcache.serve.names import turn_name
from continuum_lmcache.serve.replica_programs import ReplicaPrograms
from continuum_lmcache.serve.settings import ServeSettings
from continuum_lmcache.serve.state import START_WAIT_S, FleetState
from continuum_lmcache.types import ProgramId

KEY = b"key"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"loop_factory": VirtualLoop}


class Host:
    """A state, its replicas and a router."""

    def __init__(self, replicas: str = "ab") -> None:
        clock = asyncio.get_running_loop().time
        self.state = FleetState(now_s=clock)
        self.replicas = list(replicas)
        self.programs = {name: ReplicaPrograms() for name in replicas}

    async def hears(self, *names: str, is_complete: bool = True, **figures: Any) -> None:
        for name in names or self.replicas:
            programs, now_s = self.programs[name], asyncio.get_running_loop().time()
            about = {"rank": list(self.programs).index(name)}
            report = ReplicaReport(ReplicaId(name), about=about, **figures)
            known, heard = programs.report(now_s, is_complete), "" if is_complete else self.state.name
            assert await self.state.take_report(report, known, heard) == self.state.name

    async def sends(self, program: str, stays: bool = False, **_: Any) -> Route:
        route = await self.state.place_turn(program, not stays, len(self.replicas))
        self.state.fleet.check()
        assert route is not None
        return route

    async def runs(self, program: str, answer: str | None = None, **named: Any) -> Route:
        """A whole turn, which its replica reports."""
        route = await self.sends(program, **named)
        there, now_s = self.programs[route.replica], asyncio.get_running_loop().time()
        names = [ProgramId(program), *([hidden(answer, KEY)] if answer else [])]
        there.on_start(now_s, names, route.program_turns, route.program_age_s)
        there.on_stop(names, True, is_last=named.get("is_last", False))
        await self.hears(route.replica, is_complete=False)
        return route


async def started(replicas: str = "ab") -> Host:
    host = Host(replicas)
    await host.hears()
    return host


async def test_a_new_state_moves_nobody_before_the_replicas_have_reported_what_they_remember() -> None:
    first = await started()
    homes = {p: (await first.runs(p)).replica for p in "pqrs"}
    second = Host()
    second.programs = first.programs
    turns = [asyncio.ensure_future(second.sends(program)) for program in homes]
    for name, programs in first.programs.items():
        changed = programs.report(0.0)
        heard = await second.state.take_report(ReplicaReport(ReplicaId(name)), changed, first.state.name)
        assert heard == "", "it is to report all"
    await asyncio.sleep(0.4)
    assert not any(turn.done() for turn in turns), "only what has changed was reported"
    await second.hears()
    routes = [await turn for turn in turns]
    assert {p: r.replica for p, r in zip(homes, routes, strict=True)} == homes
    assert {r.program_turns for r in routes} == {1}


async def test_a_replica_that_reports_nothing_holds_a_new_state_up_for_a_moment_only() -> None:
    host = Host()
    await host.hears("a")
    assert (await host.sends("p")).replica == "a"
    assert asyncio.get_running_loop().time() <= START_WAIT_S + 0.1


async def test_a_stored_answer_keeps_its_replica_though_its_id_is_all_that_names_the_program() -> None:
    """vLLM keeps stored answers in one replica's memory."""
    host = await started()
    home = (await host.runs("p", answer="resp_1")).replica
    for number in range(1, 4):
        await asyncio.sleep(COOLDOWN_S + 1)
        await host.hears()
        await host.hears(home, requests=9, wait_s=60.0)  # a program that may move would
        sent = turn_name(b'{"input": "go on", "previous_response_id": "resp_%d"}' % number, {})
        assert sent.stays
        program = hidden(sent.program, KEY)  # as the router does
        route = await host.runs(program, answer=f"resp_{number + 1}", stays=sent.stays)
        assert (route.replica, route.program_turns) == (home, number)


async def test_the_state_reports_its_figures_and_no_programs_name() -> None:
    host = await started(replicas="abcdefghijkl")
    await host.runs("secret-program")
    told = await host.state.snapshot()
    assert "secret" not in str(told) and told["turns"] == {"first": 1}
    assert [row["rank"] for row in told["replicas"]] == list(range(12)), "in the order of their ranks"
    assert sum(row["programs"] for row in told["replicas"]) == 1
    assert {row["wait_seconds"] for row in told["replicas"]} == {None}


# a replica's programs ---------------------------------------------------------


P, Q, R = ProgramId("p"), ProgramId("q"), ProgramId("r")


def test_a_turn_counts_once_however_many_prompts_it_brought() -> None:
    programs = ReplicaPrograms()
    for _ in range(2):
        programs.on_start(0.0, [P], 3, 7.0)
    programs.on_stop([P], True, is_last=False)
    assert programs.report(1.0) == [KnownProgram(P, 3, 8.0, 1.0, is_live=True)]
    programs.on_stop([P], True, is_last=False)
    assert programs.report(2.0) == [KnownProgram(P, 4, 9.0, 2.0)]
    assert programs.report(3.0) == [] and len(programs.report(3.0, is_complete=True)) == 1


def test_a_program_that_comes_back_has_the_turns_that_it_finished_elsewhere() -> None:
    programs = ReplicaPrograms()
    for turns in (0, 6):
        programs.on_start(0.0, [P], turns, 0.0)
        programs.on_stop([P], True, is_last=False)
    assert [known.turns for known in programs.report(1.0, is_complete=True)] == [7]


def test_a_turn_that_came_to_nothing_is_none_so_its_program_stands_in_line_again() -> None:
    programs = ReplicaPrograms()
    programs.on_start(0.0, [P])
    programs.on_stop([P], False, is_last=False)
    assert [known.turns for known in programs.report(1.0)] == [0]


def test_a_program_is_forgotten_with_its_last_turn_and_of_too_many_the_oldest() -> None:
    programs = ReplicaPrograms(_programs=BoundedDict(2))
    for name in (P, Q, R):
        programs.on_start(0.0, [name])
        programs.on_stop([name], True, is_last=name == R)
    assert {known.program: known.is_over for known in programs.report(1.0)} == {P: True, Q: False, R: True}
    assert [known.program for known in programs.report(1.0, is_complete=True)] == [Q]


def test_a_stored_answer_outlives_its_programs_last_turn() -> None:
    programs, answer = ReplicaPrograms(), ProgramId("resp")
    programs.on_start(0.0, [P, answer])
    programs.on_stop([P, answer], True, is_last=True)
    assert {known.program: known.is_over for known in programs.report(1.0)} == {P: True, answer: False}
    programs.on_start(2.0, [answer, Q], 1)
    programs.on_stop([answer, Q], True, is_last=False)
    assert {(known.program, known.turns) for known in programs.report(3.0)} == {(answer, 2), (Q, 2)}


# settings ---------------------------------------------------------------------


def test_settings_come_from_text_and_an_unknown_or_senseless_one_is_refused() -> None:
    text = {"model": "m", "replicas": "2", "gpus": "0", "lmcache_gb": "1"}
    settings = ServeSettings.of(text)
    assert (settings.replicas, settings.gpus, settings.lmcache_gb) == (2, 0.0, 1.0)
    assert settings.vllm_args[0] == "m" and "--kv-transfer-config" in settings.vllm_args
    for wrong in (
        {"model": ""},
        {},
        {"replica": 2},
        {"replicas": 0},
        {"replicas": "x"},
        {"lmcache_gb": -1},
        {"lmcache_gb": "nan"},
        {"fleet.mover": "never"},
        {"key": "short"},
    ):
        with pytest.raises(ConfigError):
            ServeSettings.of({"model": "m", **wrong} if wrong and "model" not in wrong else wrong)
    with pytest.raises(ConfigError, match="^replicas is 'x'; it must be a number$"):
        ServeSettings.of({"model": "m", "replicas": "x"})


@pytest.mark.parametrize(
    ("options", "variable", "keys"),
    [
        ("--max-num-seqs 8", "", []),
        ("--api-key one two --max-num-seqs 8", "", ["one", "two"]),
        ("--api_key=one", "other", ["one"]),
        ("--max-num-seqs 8", "other", ["other"]),
    ],
)
def test_the_api_keys_are_those_that_vllm_takes(
    options: str, variable: str, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)
    assert ServeSettings("m", vllm=options).api_keys == keys
