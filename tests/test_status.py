"""`continuum-lmcache status` as a user runs it, on servers that only have metrics."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from console import Command, metrics_server

from continuum_lmcache.console.metrics_page import page_of
from continuum_lmcache.console.scrape_window import METRICS, window
from continuum_lmcache.console.status import FIGURES
from continuum_lmcache.telemetry.health_rules import diagnose

QUICK = ("--seconds", "0.1")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return Command(capsys)


def page(samples: Mapping[str, float]) -> str:
    return "".join(f"{name} {value}\n" for name, value in samples.items())


BUSY = {
    'vllm:cache_config_info{num_gpu_blocks="100"}': 1,
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 9,
    "vllm:kv_cache_usage_perc": 0.99,
    "vllm:num_preemptions_total": 40,
    'vllm:request_success_total{finished_reason="stop"}': 90,
    'vllm:request_success_total{finished_reason="length"}': 10,
    "vllm:request_queue_time_seconds_sum": 100,
    "vllm:request_queue_time_seconds_count": 10,
    'vllm:request_prefill_time_seconds_sum{engine="0"}': 1,
    'continuum_prompt_tokens_total{tier="none"}': 5000,
    'continuum_prompt_tokens_total{tier="gpu"}': 9000,
    'continuum_loaded_tokens_total{tier="ssd"}': 2000,
    'continuum_load_seconds_total{tier="ssd"}': 0.5,
    "vllm:external_prefix_cache_queries_total": 50_000,
    "continuum_pinned_blocks": 25,
    "continuum_programs": 4,
    "continuum_store_seconds_total": 1.0,
    'continuum_rate_samples{tier="dram"}': 0,
    "continuum_tier_store_up": 0,
    'continuum_lost_prefill_seconds_total{cause="nonce"}': 10,
    'continuum_lost_prefill_seconds_total{cause="compaction"}': 0,
    'continuum_lost_returns_total{cause="nonce"}': 5,
    'continuum_lost_at_token{cause="nonce"}': 41,
}
LATER = BUSY | {
    "vllm:num_preemptions_total": 43,
    'vllm:request_success_total{finished_reason="stop"}': 95,
    "vllm:request_queue_time_seconds_sum": 160,
    "vllm:request_queue_time_seconds_count": 15,
    'vllm:request_prefill_time_seconds_sum{engine="0"}': 13,
    'continuum_prompt_tokens_total{tier="none"}': 25_000,
    'continuum_loaded_tokens_total{tier="ssd"}': 4000,
    'continuum_load_seconds_total{tier="ssd"}': 10.5,
    "vllm:external_prefix_cache_queries_total": 72_000,
    "continuum_store_seconds_total": 91.0,  # a share of the time, however long the window becomes
    'continuum_lost_prefill_seconds_total{cause="nonce"}': 12.5,
    'continuum_lost_returns_total{cause="nonce"}': 9,
}


def test_everything_wrong_with_a_server_is_reported_with_its_figure(command: Command) -> None:
    with metrics_server([page(BUSY), page(LATER)]) as url:
        ran = command("status", url, *QUICK, "--json")
    assert ran.status == 1
    found = {finding["name"]: finding["evidence"] for finding in ran.json["findings"]}
    assert found.keys() == {
        "low-batch-memory-full",
        "preemptions",
        "queue-over-target",
        "tier-misses",
        "reload-slower-than-recompute-ssd",
        "store-stalls",
        "tier-store-down",
        "guessed-rates",
        "lost-to-nonce",
    }
    assert "4 returns" in found["lost-to-nonce"] and "need 2.50 s" in found["lost-to-nonce"]
    assert "3 preemptions for 5 finished turns" in found["preemptions"]
    assert "12.0 s" in found["queue-over-target"]  # 60 s for 5 turns
    assert "2,000 of 22,000" in found["tier-misses"]
    assert "5,000 us a token, computing 100 us" in found["reload-slower-than-recompute-ssd"]
    assert "25% of it by pins" in found["low-batch-memory-full"]


def test_the_screen_shows_figures_and_remedies(command: Command) -> None:
    with metrics_server([page(BUSY), page(LATER)]) as url:
        ran = command("status", url, *QUICK)
    assert ran.status == 1
    for words in (
        "running turns",
        "99%",
        "4 returns, 2.50 s of prefill, the latest at token 41",
        "WARNING queue-over-target",
        "add a replica",
        "Something is wrong.",
    ):
        assert words in ran.out, words


def test_a_target_of_ones_own_is_kept(command: Command) -> None:
    with metrics_server([page(BUSY), page(LATER)]) as url:
        ran = command("status", url, *QUICK, "--json", "--target-queue-s", "13")
    assert "queue-over-target" not in {finding["name"] for finding in ran.json["findings"]}


def test_a_stock_server_is_judged_by_what_it_reports(command: Command) -> None:
    """No metric of ours at all: no crash, and missing figures are named."""
    stock = {name: value for name, value in BUSY.items() if name.startswith("vllm:num_requests")}
    with metrics_server([page(stock)]) as url:
        ran = command("status", url, *QUICK)
    assert ran.status == 0
    assert "not checked: store stalls (no continuum_store_seconds_total" in ran.out
    assert "Nothing is wrong." in ran.out


@pytest.mark.parametrize("name", [name for name in BUSY if name != "vllm:num_requests_running"])
def test_a_server_may_lack_any_metric(name: str) -> None:
    less = [page({k: v for k, v in found.items() if k != name}) for found in (BUSY, LATER)]
    before, after = (page_of(text, "") for text in less)
    whole = window(page_of(page(BUSY), ""), page_of(page(LATER), ""), 5.0)
    assert len(diagnose(whole)) - len(diagnose(window(before, after, 5.0))) in (0, 1, 2)


def test_every_figure_shown_is_read_from_a_metric() -> None:
    assert {field for field, _ in FIGURES.values()} <= METRICS.keys()


def test_a_server_that_restarts_meanwhile_is_not_judged(command: Command) -> None:
    with metrics_server([page(LATER), page(BUSY)]) as url:
        assert "the server restarted" in command.refused("status", url, *QUICK)


def test_what_is_no_vllm_server_is_refused_in_one_line(command: Command) -> None:
    assert "is the server up" in command.refused("status", "http://127.0.0.1:1", *QUICK)
    assert "is the server up" in command.refused("status", "no url", *QUICK)
    with metrics_server(["up 1\n"]) as url:
        assert "no vllm: metrics" in command.refused("status", url, *QUICK)
        assert "HTTP 404" in command.refused("status", url + "/v1", *QUICK)
    with metrics_server(["<html>{ not metrics"]) as url:
        assert "no Prometheus text" in command.refused("status", url, *QUICK)


def fleet(**figures: object) -> dict[str, object]:
    """The report of a fleet of two replicas."""
    row = {
        "report_age_seconds": 0.2,
        "programs": 3,
        "requests": 1,
        "headroom_tokens": 900,
        "pending_tokens": 0,
    }
    replicas = [{"rank": rank, "replica": f"name-{rank}", **row} for rank in (0, 1)]
    config = {"move_age_s": 1.5, "first_turn_age_s": 30.0}
    report = {"replicas": replicas, "config": config, "programs": 6, "line": 0, "line_wait_seconds": 0.0}
    return report | {"turns": {"home": 9, "first": 6}, "refused": 0, "thrash": 0} | figures


def test_a_fleet_is_shown_with_each_of_its_replicas(command: Command) -> None:
    quiet = page({"vllm:num_requests_running": 0, "continuum_programs": 1})
    with metrics_server([quiet], fleet=fleet()) as url:
        ran = command("status", url, *QUICK)
        printed = command("status", url, *QUICK, "--json").json
    assert ran.status == 0 and "a fleet of 2 replicas" in ran.out and "9 home, 6 first" in ran.out
    assert f"{url}, replica 0, watched" in ran.out and f"{url}, replica 1, watched" in ran.out
    assert [server["replica"] for server in printed["servers"]] == [0, 1] and printed["ok"]


@pytest.mark.parametrize(
    ("figures", "named"),
    [
        ({"refused": 7}, "fleet-refused"),
        ({"thrash": 1}, "fleet-thrash"),
        ({"replicas": [{**fleet()["replicas"][0], "report_age_seconds": 40.0}]}, "fleet-silent-replica"),  # type: ignore[index]
        ({"replicas": [{**fleet()["replicas"][0], "addresses": {"Ray": "8.8.8.8"}}]}, "fleet-public-address"),  # type: ignore[index]
    ],
)
def test_what_is_wrong_with_a_fleet_is_reported(
    command: Command, figures: dict[str, object], named: str
) -> None:
    with metrics_server([page({"vllm:num_requests_running": 0})], fleet=fleet(**figures)) as url:
        ran = command("status", url, *QUICK)
        printed = command("status", url, *QUICK, "--json").json
    assert ran.status == 1 and f"WARNING {named}" in ran.out
    assert [each["name"] for each in printed["fleets"][url]["findings"]] == [named] and not printed["ok"]


def test_a_line_is_no_fault_and_a_private_address_none(command: Command) -> None:
    row = {**fleet()["replicas"][0], "addresses": {"Ray": "10.0.0.7"}}  # type: ignore[index]
    report = fleet(line=3, line_wait_seconds=1.5, replicas=[row])
    with metrics_server([page({"vllm:num_requests_running": 0})], fleet=report) as url:
        ran = command("status", url, *QUICK)
    assert ran.status == 0 and "NOTE fleet-line" in ran.out and "fleet-public-address" not in ran.out


def test_several_servers_are_judged_in_one_run(command: Command) -> None:
    quiet = page({"vllm:num_requests_running": 0, "continuum_programs": 1})
    with metrics_server([quiet]) as one, metrics_server([page(BUSY), page(LATER)]) as two:
        ran = command("status", one, two, *QUICK, "--json")
    assert ran.status == 1 and [server["ok"] for server in ran.json["servers"]] == [True, False]
