"""When and what a replica reports to the fleet's state. Virtual time; no engine.

Runs where Ray is installed; no cluster is started.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY
from virtual_loop import VirtualLoop

pytest.importorskip("ray")

from ray.serve.config import AutoscalingConfig
from ray.serve.context import _RequestContext, _serve_request_context
from ray.serve.schema import DeploymentSchema

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.fleet.fleet import KnownProgram, ReplicaReport
from continuum_lmcache.programs.identity import MOST_AGE_S, MOST_TURNS, hidden, parse
from continuum_lmcache.serve.names import TurnName
from continuum_lmcache.serve.replica import GATHER_S, REPORT_S, Replica, with_progress
from continuum_lmcache.serve.replica_programs import ReplicaPrograms
from continuum_lmcache.serve.settings import ServeSettings

KEY = bytes(16)


class ReportingReplica:
    """As much of a replica as its reports need; `heard`: when, which programs, and whether these are all."""

    _watch = Replica._watch

    def __init__(self) -> None:
        self.heard: list[tuple[float, list[str], bool]] = []
        self.state = "state"
        self.rank, self._name = 0, "a"
        self._engine = SimpleNamespace(wait_s=None)
        self._settings = ServeSettings("m", key=KEY.hex())
        self._hurry = asyncio.Event()
        self._programs = ReplicaPrograms()

    async def _call(
        self, method: str, report: ReplicaReport, programs: list[KnownProgram], heard: str
    ) -> str:
        assert (method, report.replica, report.wait_s) == ("take_report", "a", None)
        at_s = round(asyncio.get_running_loop().time(), 3)
        self.heard.append((at_s, [known.program for known in programs], not heard))
        return self.state if heard in ("", self.state) else ""

    def starts(self, request_id: str, **turn: Any) -> Callable[[bool], None]:
        """A prompt of that turn, as the request's task starts it; returns what ends it."""
        _serve_request_context.set(_RequestContext(session_id=str(TurnName(**turn))))
        return self._watch(SimpleNamespace(extra_args=None), request_id)  # type: ignore[misc]


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"loop_factory": VirtualLoop}


@pytest.mark.anyio
async def test_a_replica_reports_each_period_and_soon_after_an_answer_is_stored_and_to_a_new_state_all() -> (
    None
):
    replica = ReportingReplica()
    reports = asyncio.create_task(Replica._report(replica))  # type: ignore[arg-type]
    await asyncio.sleep(1.5 * REPORT_S)
    for name in "pq":
        replica.starts(f"resp_{name}", program=name)(True)
    names = [name for each in "pq" for name in (each, hidden(f"resp_{each}", KEY))]
    await asyncio.sleep(0.5 * REPORT_S)
    soon_s = 1.5 * REPORT_S + GATHER_S
    assert replica.heard == [(0.0, [], True), (REPORT_S, [], False), (soon_s, names, False)]
    replica.state = "another one"
    await asyncio.sleep(2 * REPORT_S)
    reports.cancel()
    later_s = soon_s + REPORT_S
    assert replica.heard[3:5] == [(later_s, [], False), (later_s, names, True)]
    assert [all_ for _, _, all_ in replica.heard[5:]] == [False]


def test_a_stored_answers_id_names_the_program_for_its_next_turn() -> None:
    replica = ReportingReplica()
    for number, request_id in enumerate(("resp_0a1b", "resp_0a1c_1", "cmpl-0a1d")):
        replica.starts(request_id, program=f"p{number}", turns=number)
    found = {known.program: known.turns for known in replica._programs.report(0.0, is_complete=True)}
    answers = {hidden("resp_0a1b", KEY): 0, hidden("resp_0a1c", KEY): 1}
    assert found == {"p0": 0, "p1": 1, "p2": 2} | answers


def test_prompts_are_counted_by_the_reason_for_their_replica() -> None:
    before = REGISTRY.get_sample_value("continuum_fleet_turns_total", {"why": "moved"}) or 0.0
    ReportingReplica().starts("cmpl-1", program="p", why="moved")
    assert REGISTRY.get_sample_value("continuum_fleet_turns_total", {"why": "moved"}) == before + 1


def test_the_engine_takes_the_fields_of_a_program_that_is_very_old() -> None:
    sent = {"job_id": "p", "continuum_owner": "o", "program_turns": 3}
    for turns, age_s in ((9, 60.4), (9, 2 * MOST_AGE_S), (2 * MOST_TURNS, 60.0)):
        fields = parse(with_progress(sent, TurnName("p", turns=turns, age_s=age_s)) or {})
        assert (fields.job_id, fields.owner) == ("p", "o")
        assert (fields.turns, fields.age_s) == (min(turns, MOST_TURNS), min(round(age_s), MOST_AGE_S))


@pytest.mark.anyio
async def test_a_stock_engine_tells_how_long_its_oldest_prompt_without_a_token_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own class, its engine and its outputs made here."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from continuum_lmcache.vllm_plugin import watched_server

    class Engine(watched_server.WatchedEngine):
        def __del__(self) -> None:
            """It was not started."""

    states: dict[str, Any] = {}
    ends: list[bool] = []

    async def generate(_self: Any, _prompt: Any, _params: Any, request_id: str) -> Any:
        states[request_id] = state = SimpleNamespace(external_req_id=request_id, is_prefilling=True)
        await asyncio.sleep(5.0)
        state.is_prefilling = False
        await asyncio.sleep(2.0)
        del states[request_id]
        yield SimpleNamespace(finished=True)

    async def ask(request_id: str) -> None:
        async for _ in engine.generate("", None, request_id):
            pass

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    monkeypatch.setattr(watched_server, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
    engine = Engine.__new__(Engine)
    engine.watch, engine._began_s = lambda *_: ends.append, {}
    engine.output_processor = SimpleNamespace(request_states=states)  # type: ignore[assignment]
    scheduler = SimpleNamespace(scheduler_cls=None)
    engine.vllm_config = SimpleNamespace(scheduler_config=scheduler)  # type: ignore[assignment]
    assert engine.wait_s == 0.0
    first = asyncio.create_task(ask("a"))
    await asyncio.sleep(3.0)
    second = asyncio.create_task(ask("b"))
    await asyncio.sleep(1.0)
    assert engine.wait_s == 4.0
    await asyncio.sleep(2.0)
    assert engine.wait_s == 3.0, "the first one decodes"
    await asyncio.sleep(3.0)
    assert engine.wait_s == 0.0
    second.cancel()
    await asyncio.wait({first, second})
    assert ends == [True, False] and not engine._began_s
    scheduler.scheduler_cls = "continuum_lmcache.vllm_plugin.scheduler.ContinuumScheduler"
    assert engine.wait_s is None, "it admits programs"


def test_a_vllm_whose_internals_were_not_read_is_refused() -> None:
    from continuum_lmcache.vllm_plugin.watched_server import refuse_unchecked

    refuse_unchecked("0.32.1")
    for other in ("0.31.0", "0.33.0"):
        with pytest.raises(ConfigError, match="0.32"):
            refuse_unchecked(other)


def test_ray_takes_the_pages_example_of_autoscaling() -> None:
    page = (Path(__file__).parents[1] / "docs" / "fleet.md").read_text()
    example = page[page.index("    num_replicas: auto") :].partition("\n\n")[0]
    given = yaml.safe_load(textwrap.dedent(example))
    assert DeploymentSchema(name="vllm", **given).num_replicas == "auto"
    assert AutoscalingConfig(**given["autoscaling_config"]).policy.get_policy().__name__ == "replicas"
