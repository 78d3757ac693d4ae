"""When a replica reports to the fleet's state. Virtual time; no engine.

Runs where Ray is installed; no cluster is started.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_loop import run_virtually

pytest.importorskip("ray")

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.programs.identity import MOST_AGE_S, MOST_TURNS, parse
from continuum_lmcache.serve.engine import with_progress
from continuum_lmcache.serve.names import TurnName
from continuum_lmcache.serve.replica import GATHER_S, Replica
from continuum_lmcache.serve.replica_programs import ReplicaPrograms, TurnEnd
from continuum_lmcache.types import ProgramId, TurnId

REPORT_S = 0.5


class ReportingReplica:
    """As much of a replica as its reports need; `heard`: when, and the turns that had ended."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, list[str]]] = []
        self.rank, self._name = 0, "a"
        self._settings = SimpleNamespace(report_s=REPORT_S)
        self._engine = SimpleNamespace(report_prefills=lambda: None, gpu_tokens=1000)
        self._turn_ended = asyncio.Event()
        self._programs = ReplicaPrograms(10, on_end=self._turn_ended.set)

    async def _call(self, method: str, *args: Any) -> str:
        if method == "take_report":
            ended = [one.turn for one in args[3] if isinstance(one, TurnEnd)]
            self.heard.append((round(asyncio.get_running_loop().time(), 3), ended))
        return "state"

    def ends(self, *turns: str) -> None:
        for turn in turns:
            self._programs.on_start(0.0, TurnId(turn), ProgramId("p"), 0, 0.0)
            self._programs.on_stop(TurnId(turn), 10, is_last=False)


def test_a_replica_reports_each_period_and_soon_after_a_turns_end() -> None:
    async def go() -> None:
        replica = ReportingReplica()
        reports = asyncio.create_task(Replica._report(replica))
        await asyncio.sleep(2.5 * REPORT_S)
        replica.ends("t1", "t2")
        await asyncio.sleep(1.5 * REPORT_S)
        reports.cancel()
        soon_s = 2.5 * REPORT_S + GATHER_S
        assert replica.heard == [
            *((n * REPORT_S, []) for n in range(3)),
            (soon_s, ["t1", "t2"]),
            (soon_s + REPORT_S, []),
        ]

    run_virtually(go())


def test_the_engine_takes_the_fields_of_a_program_that_is_very_old() -> None:
    sent = {"job_id": "p", "continuum_owner": "o", "program_turns": 3}
    for turns, age_s in ((9, 60.4), (9, 2 * MOST_AGE_S), (2 * MOST_TURNS, 60.0)):
        fields = parse(with_progress(sent, TurnName("p", 100, turns=turns, age_s=age_s)) or {})
        assert (fields.job_id, fields.owner) == ("p", "o")
        assert (fields.turns, fields.age_s) == (min(turns, MOST_TURNS), min(round(age_s), MOST_AGE_S))


def test_a_vllm_whose_internals_were_not_read_is_refused() -> None:
    pytest.importorskip("vllm")
    from continuum_lmcache.vllm_plugin.watched_server import refuse_unchecked

    refuse_unchecked("0.32.1")
    for other in ("0.31.0", "0.33.0"):
        with pytest.raises(ConfigError, match="0.32"):
            refuse_unchecked(other)
