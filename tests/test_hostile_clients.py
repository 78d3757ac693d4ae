"""A lying client does not harm others. Virtual time, vLLM's own scheduler."""

from __future__ import annotations

import functools
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import Bench, prompt
from hypothesis import given
from hypothesis import strategies as st
from kv_oracle_fake import CHUNK
from kv_oracle_server import ServerBench, in_one_process
from vllm.v1.request import RequestStatus

from connectors.request_params import drop_invalid
from continuum_lmcache import engine
from continuum_lmcache.policy.continuum import evicts_first, returns_late
from continuum_lmcache.policy.interface import End, EngineState
from continuum_lmcache.programs.identity import FIELDS, OWNER_FIELD, UNUSED_FIELD, program_id
from continuum_lmcache.programs.prompt_linker import MAX_TAILS
from continuum_lmcache.telemetry.events import EvictFirst
from continuum_lmcache.types import MOST_TENANTS, ProgramId, Residency
from continuum_lmcache.vllm_plugin.metrics_delta import totals_of
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler
from experiments.sim.engine import simulate
from experiments.sim.serving import Setup
from experiments.sim.step_time import MACHINES
from experiments.workload import Program, TurnSpec

LABELS = {*FIELDS, "session_id"}
NASTY = ["\x00\x1b[31m", "../../etc/passwd", 'a"}\n# HELP x', "\ud800", "é" * 200, "\u202e\u0000", "🦊" * 256]


@pytest.fixture
def bench(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(engine, "MOST_PROGRAMS", 50)
    return make(40, max_tenant_share=0.5, max_ttl_s=30, run_output_dir=tmp_path / "run")


KV_TRANSFER_PARAMS: list[Any] = [  # of these that are no mapping, vLLM passes on the false ones
    {"lmcache.max_offload_tokens": "many"},
    {"lmcache.max_offload_tokens": [1]},
    {"lmcache.max_offload_tokens": -5},
    {"lmcache.tag.user": [1, {"a": 2}]},
    {"lmcache.tag.user": "a\0b"},
    {"lmcache.tag.a\ud800": "b"},
    {"ret_first_tok": True},
    0,
    False,
    "",
    {"disagg_spec": 5},
    {"cached_token_stats": True},
    {"do_remote_prefill": True, "remote_block_ids": "x"},
]


def test_no_kv_transfer_params_end_an_engine_with_lmcache(
    model: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come from any client of the API, to LMCache's own adapters. One of the turns leaves at once."""
    settings(policy="continuum")
    in_one_process(monkeypatch)
    bench = ServerBench(ContinuumScheduler, model, False, 80, chunk=CHUNK)
    for number, params in enumerate(KV_TRANSFER_PARAMS):
        for _ in range(2):
            tokens = prompt(6 * CHUNK, number)
            bench.turn(f"a{number}", tokens, 9, kv_transfer_params=deepcopy(params), is_last_step=True)
            bench.scheduler.reset_prefix_cache()
        left = bench.send("b", prompt(6 * CHUNK, 90), 9, kv_transfer_params=deepcopy(params))
        bench.scheduler.finish_requests([left], RequestStatus.FINISHED_ABORTED)
        bench.run_until_idle()
    assert bench.lmcache.chunks


def test_tags_that_no_file_name_and_no_message_can_have_are_dropped() -> None:
    told = {"lmcache.tag.user": "é b", "other": "\0"}
    request = SimpleNamespace(
        kv_transfer_params={**told, "lmcache.tag.a": "a\0b", "lmcache.tag.\ud800": "b", "lmcache.b": "\n"}
    )
    drop_invalid(request)
    assert request.kv_transfer_params == told


def test_ids_that_come_once_and_never_end_fill_no_table(bench: Bench) -> None:
    for i in range(400):
        bench.turn(f"job-{i}", prompt(20, i), this_func_call=f"tool-{i} x{i}")
        bench.now_s += 1
    engine = bench.engine
    assert len(engine.programs.records) <= 50 + 11  # looked at every 10 s
    assert not engine.turns and not engine.turns.to_rekey
    assert len(engine.linker._turns) <= 50 and all(
        len(tails) <= MAX_TAILS for tails in engine.linker._turns.values()
    )
    assert len(engine.pins._deadlines) <= 61


@pytest.mark.parametrize("key", ["greedy", None], ids=["a key", "a server without keys"])
@pytest.mark.parametrize("salts", [1, 12])
def test_one_client_cannot_pin_more_than_its_share_by_however_many_salts(
    bench: Bench, salts: int, key: str | None
) -> None:
    owner = {OWNER_FIELD: key} if key else {}
    for i in range(12):
        bench.turn(f"greedy-{i}", prompt(64, i), salt=f"salt-{i % salts}", **owner)
    assert bench.engine.pins.pinned_blocks <= bench.engine.pins.max_tenant_blocks
    assert bench.engine.pins.refused["tenant"] > 0
    bench.turn("victim", prompt(64, 99), **{OWNER_FIELD: "victim"})
    assert any(pin.program.startswith("victim") for pin in bench.engine.pins.pinned.values())


def test_a_keys_programs_are_one_tenants_under_whatever_salt_and_those_of_two_keys_two(make: Any) -> None:
    """The line gives places to tenants by turns (test_admission.py)."""
    bench = make(40)
    for salt, key in (("a", "greedy"), ("b", "greedy"), (None, "greedy"), ("a", "victim"), ("a", "")):
        bench.turn("p", prompt(20), salt=salt, **({OWNER_FIELD: key} if key else {}))
    tenants = [program.tenant for program in bench.engine.programs.records.values()]
    assert tenants == ["greedy", "greedy", "greedy", "victim", ""]


@pytest.mark.parametrize("flood", ["salts", "keys"])
def test_nobody_drops_what_was_learned_of_another_tenants_tools(make: Any, flood: str) -> None:
    """300 gaps of 3 s. Then another's salts, or keys, more than any table of tenants has."""
    bench = make(40, policy="continuum")
    gaps = bench.engine.learned.gaps
    for _ in range(300):
        gaps.observe(("pytest",), 3.0, "victim")
    for i in range(150):
        said = {"this_func_call": "pytest", OWNER_FIELD: f"key-{i}" if flood == "keys" else "liar"}
        salt = f"salt-{i}" if flood == "salts" else "salt"
        first = bench.turn("p", prompt(20, i), salt=salt, **said)
        bench.turn("p", first, salt=salt, **said)
    assert len(gaps._tenants) <= MOST_TENANTS and gaps.distribution(()).n >= 300 + 100
    assert gaps.of("victim").distribution(("pytest",)).samples_s == (3.0,) * 300


@pytest.mark.parametrize("value", [[[]], [{}], [1, None], {"a": 1}, "job_id"], ids=str)
def test_a_clients_own_list_of_unused_fields_ends_no_engine(bench: Bench, value: Any) -> None:
    """Token-in-token-out requests and LLM.generate bring extra_args past the API server's hooks."""
    bench.turn(None, prompt(40), **{UNUSED_FIELD: value})
    assert not bench.parts.ignored


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_name_makes_neither_a_label_nor_a_file(bench: Bench, tmp_path: Path, name: str) -> None:
    bench.turn(name, prompt(40), salt=None, this_func_call=name[:40], out=2)
    bench.turn(None, prompt(40, 2), is_last_step=name)
    labels = {label for metric in totals_of(bench.parts).values() for label in metric}
    assert name not in labels and set(bench.parts.ignored) <= LABELS
    bench.scheduler.shutdown()
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"scheduler_timestamps"}


def test_a_name_cannot_be_made_to_meet_another_tenants() -> None:
    theirs = program_id("job", "secret")
    assert program_id(theirs, None) != theirs, "an id without a salt that spells a salted one"
    assert program_id("~request-1", None) != "~request-1", "an id that spells an inferred program"
    assert program_id("job", "\ud800") != program_id("job", None)


@given(
    a=st.tuples(st.text(max_size=8), st.text(max_size=3)),
    b=st.tuples(st.text(max_size=8), st.text(max_size=3)),
)
def test_two_programs_have_one_name_only_if_they_are_one(a: tuple[str, str], b: tuple[str, str]) -> None:
    assert (program_id(*a) == program_id(*b)) == (a == b)


def test_a_client_whose_every_turn_is_its_last_loses_its_own_pins_and_nobody_elses(bench: Bench) -> None:
    bench.turn("victim", prompt(64, 99))
    bench.turn("liar", prompt(40, 1), is_last_step=True)
    arrival_s = bench.engine.end_claims[""].ended[ProgramId("liar")].arrival_s
    for turn in range(2, 30):
        bench.turn("liar", prompt(40 + turn, 1), is_last_step=True)
    engine = bench.engine
    assert list(engine.pins.pinned) == [ProgramId("victim")] == list(engine.programs.records)
    assert engine.end_claims[""].ended[ProgramId("liar")].arrival_s == arrival_s, "no older, no newer"
    counts = engine.end_claims.counts("")
    assert not evicts_first(End(True, *counts, 0.0)).is_first, (
        "its word is not taken any more, nor is its KV dropped"
    )


def test_one_tenants_lies_about_ends_cost_no_other_its_trust(bench: Bench) -> None:
    for turn in range(20):
        bench.turn("liar", prompt(40 + turn, 1), salt=f"{turn}", is_last_step=True, **{OWNER_FIELD: "liar"})
        bench.turn("liar", prompt(41 + turn, 1), salt=f"{turn}", is_last_step=True, **{OWNER_FIELD: "liar"})
    victim, liar = (End(True, *bench.engine.end_claims.counts(name), 0.0) for name in ("victim", "liar"))
    assert evicts_first(victim).is_first and not evicts_first(liar).is_first


@pytest.mark.parametrize("tenant", ["victim", ""])
def test_tools_that_never_return_for_one_tenant_end_no_pins_of_another(make: Any, tenant: str) -> None:
    engine = make(policy="continuum").engine
    gaps = engine.learned.gaps
    for number in range(150):
        gaps.observe(("pytest",), 2.0 + number % 3, tenant)

    def state() -> EngineState:
        return engine.state_of(("pytest",), tenant, Residency(0, 0, 0, 100), 0)

    before_s = state().expected_s
    for _ in range(400):
        gaps.add_lost(("pytest",), "liar")
        gaps.observe(("pytest",), 1e5, "liar")
    assert state().expected_s == before_s
    assert not returns_late(("pytest",), state())
    assert not evicts_first(End(False, 0, 0, state().lost_share)).is_first
    assert gaps.of(tenant).distribution(("pytest",)).mean_s < 4
    assert gaps.of("liar").longer_share(("pytest",), math.inf) == pytest.approx(0.5, abs=0.01)
    assert gaps.of("new").longer_share(("pytest",), math.inf) == 0.0, "others tell nothing against a new one"


def test_programs_that_make_one_call_and_leave_do_not_evict_the_kv_of_one_that_returns(make: Any) -> None:
    """A gateway's new name for each request, say. With one API key for all, or none."""
    bench = make(60, policy="continuum")
    for n in range(40):
        bench.turn(f"once{n}", prompt(20, 10 + n), this_func_call="pytest")
    bench.now_s += 100.0
    tokens = prompt(64, 1)
    for _ in range(3):
        bench.events.clear()
        tokens = bench.turn("agent", tokens, 4, this_func_call="pytest") + prompt(10, 2)
        bench.now_s += 2.0
    assert bench.engine.learned.gaps.longer_share(("pytest",), math.inf) > 0.8
    assert not bench.events_of(EvictFirst)
    bench.turn("new", prompt(64, 3), 4, this_func_call="pytest")
    assert [event.program for event in bench.events_of(EvictFirst)] == ["new"]


def agent(name: str, arrival_s: float, source: str) -> Program:
    """Six turns; each prompt is the last one, its answer, and 600 tokens more."""
    turns: list[TurnSpec] = []
    for _ in range(6):
        kept = turns[-1].context_tokens if turns else 0
        new = 600 if turns else 3000
        turns.append(TurnSpec(kept + new, new, 40, "bash", "", 2.0))
    return Program(name, arrival_s, (*turns[:-1], replace(turns[-1], gap_s=None)), source)


@functools.cache
def victims_p95_s(attackers_say: str) -> float:
    """Of the victims' job times, beside a tenant whose programs lie about their ends (a short simulation)."""
    setup = Setup(
        policy="continuum",
        machine=replace(MACHINES["a100"], kv_tokens=40_960),
        shared_tokens=0,
        continuum={"max_tenant_share": 0.5, "program_idle_s": 300},
        tiers={"dram_gb": 8.0},
    )
    victims = [agent(f"v{i}", i * 1.5, "tenant:victims") for i in range(10)]
    others = [agent(f"x{i}", i * 3.0, f"tenant:attacker{attackers_say}") for i in range(6)]
    result = simulate([*victims, *others], setup)
    times_s = sorted(job.job_s for job in result.jobs if job.program_id.startswith("v"))
    return times_s[math.ceil(0.95 * len(times_s)) - 1]


@pytest.mark.parametrize("lie", ["never-last", "always-last"])
def test_lying_about_turns_costs_victims_less_than_a_fifth(lie: str) -> None:
    """Their P95 of job time, against the same load with true fields."""
    assert victims_p95_s(f",{lie}") < 1.2 * victims_p95_s("")
