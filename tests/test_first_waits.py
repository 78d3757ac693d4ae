"""The simulated live pressure runs, and their times to first token."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from experiments.first_waits import figures, main, simulated_replica
from experiments.sweep.cases import ENDLESS, STOCK, Live, SweepError
from experiments.sweep.live_plans import KV_GB, SMALL

MEASURED = {("fcfs", 0.0): 35.6, ("fcfs", 2 * KV_GB): 14.9, ("continuum-published", 2 * KV_GB): 16.6}
"""Mean job times on real servers, seed 4 (experiments/records/LOG.md, 2026-11-21)."""


@pytest.mark.parametrize(("contender", "disk_gb"), MEASURED)
def test_the_simulator_is_near_what_real_servers_took(contender: str, disk_gb: float) -> None:
    case = Live(contender, 20, 1.0, 4, dram_gb=SMALL, ssd_gb=disk_gb)
    assert simulated_replica(case, {}).mean_job_s == pytest.approx(MEASURED[contender, disk_gb], rel=0.12)


def test_without_admission_the_policy_is_another() -> None:
    """At vLLM's own chunk: a chosen one leaves admission less of it (log, 2026-11-22)."""
    case, own_chunk = Live("continuum", 20, 1.0, 4, dram_gb=SMALL), {"measured_chunk": False}
    with_s, _ = figures(case, own_chunk)
    without_s, _ = figures(case, own_chunk | {"admission": False})
    assert without_s > 1.1 * with_s, "DRAM alone: programs that all start at once evict each other"


def test_a_kv_cache_that_never_fills_needs_no_tier() -> None:
    result = simulated_replica(Live(ENDLESS, 20, 1.0, 4, dram_gb=SMALL), {})
    assert result.tokens["dram"] == 0 and result.preemptions == 0
    behind_a_disk = simulated_replica(Live(ENDLESS, 20, 1.0, 4, dram_gb=SMALL, ssd_gb=2 * KV_GB), {})
    assert behind_a_disk.mean_job_s == result.mean_job_s, "it stores nothing either"
    assert result.mean_job_s < simulated_replica(Live(STOCK, 20, 1.0, 4, dram_gb=SMALL), {}).mean_job_s / 2


def test_the_table_has_every_setting_for_both_tiers() -> None:
    app = typer.Typer()
    app.command()(main)
    said = CliRunner().invoke(app, ["--programs", "2", "--seeds", "1,2", "--workers", "1"])
    assert said.exit_code == 0, said.output
    lines = [line.split("|") for line in said.output.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2 * 8
    assert {line[2].strip(): line[3].strip() for line in lines}[STOCK] == "1 (1..1)"


def test_bad_seeds_and_settings_in_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="first_waits: --seeds 'x' names no seed"):
        main(seeds="x")
    monkeypatch.setenv("CONTINUUM_POLICY", "fcfs")
    with pytest.raises(SystemExit, match="CONTINUUM_POLICY in the environment would change every run"):
        main()


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(SweepError, match="known to --engine live: cpu-tiny"):
        simulated_replica(Live(STOCK, 2, 1.0, 1, machine="a100", dram_gb=SMALL), {})
