"""`continuum-lmcache status` as a user runs it, on servers that only have metrics."""

from __future__ import annotations

import pytest
from console import Command, metrics_server
from console import text_of as page
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.console import app
from continuum_lmcache.console.metrics_page import page_of
from continuum_lmcache.console.status import status_of
from continuum_lmcache.errors import ServerError

ON = 'continuum_policy_info{policy="continuum"}'
BUSY = {
    'vllm:cache_config_info{num_gpu_blocks="100"}': 1,
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 9,
    "vllm:kv_cache_usage_perc": 0.99,
    "vllm:num_preemptions_total": 40,
    'vllm:request_success_total{finished_reason="stop"}': 90,
    'vllm:request_success_total{finished_reason="length"}': 10,
    "vllm:time_to_first_token_seconds_sum": 50,
    "vllm:time_to_first_token_seconds_count": 100,
    'continuum_prompt_tokens_total{tier="none"}': 5000,
    'continuum_prompt_tokens_total{tier="gpu"}': 15_000,
    'continuum_pins_total{outcome="taken"}': 16,
    'continuum_pins_total{outcome="reused"}': 13,
    "continuum_pinned_blocks": 25,
    ON: 1,
    "continuum_programs": 4,
    'continuum_longest_wait_seconds{engine="0"}': 200,
    'continuum_longest_wait_seconds{engine="1"}': 286,
    'continuum_live_programs{engine="0"}': 30,
    'continuum_live_programs{engine="1"}': 6,
    'continuum_programs_in_time{engine="0"}': 20,
    'continuum_programs_in_time{engine="1"}': 20,
    "continuum_working_set_tokens": 3000,
    'continuum_tier_capacity_tokens{tier="dram"}': 2000,
    "continuum_tier_store_up": 0,
    'continuum_lost_tokens_total{cause="changed-first-third"}': 2000,
    'continuum_ignored_fields_total{field="job-id"}': 7,
}
QUIET = {"vllm:num_requests_running": 0, ON: 1, "continuum_programs": 1}


@pytest.mark.parametrize(("chosen", "loads"), [(None, True), ("continuum,other", True), ("other", False)])
def test_the_versions_are_told_and_whether_vllm_loads_the_plugin(
    command: Command, monkeypatch: pytest.MonkeyPatch, chosen: str | None, loads: bool
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    ran = command("--version")
    assert ran.status == (0 if loads else 1)
    assert [line.split()[0] for line in ran.out.splitlines()] == [
        "continuum-lmcache",
        "vllm",
        "lmcache",
        "vLLM",
    ]
    assert "does not load the plugin: VLLM_PLUGINS is 'other'" in ran.out or loads


def test_without_vllm_nothing_is_said_to_load_the_plugin(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "find_spec", lambda _name: None)
    ran = command("--version")
    assert ran.status == 1 and "the plugin has no vLLM to load it here" in ran.out
    assert "loads the plugin" not in ran.out


def test_everything_wrong_with_a_server_is_reported_with_its_figure(command: Command) -> None:
    with metrics_server([page(BUSY)]) as url:
        ran = command("status", url, "--json")
    assert ran.status == 1
    found = {finding["name"]: finding["evidence"] for finding in ran.json["findings"]}
    assert found.keys() == {
        "tier-store-down",
        "low-batch-memory-full",
        "preemptions",
        "tier-too-small",
        "prompts-change-in-first-third",
        "ignored-fields",
    }
    assert (ran.json["figures"]["kv_usage"], ran.json["figures"]["longest_wait_s"]) == (0.99, 286)
    assert (ran.json["figures"]["live_programs"], ran.json["figures"]["replicas_in_time"]) == (36, 1.8)
    assert "40 preemptions for 100 finished turns" in found["preemptions"]
    assert "25% of it by pins" in found["low-batch-memory-full"]
    assert "2,000 of 5,000 computed" in found["prompts-change-in-first-third"]


def test_the_first_line_says_that_it_is_on_and_what_it_brings(command: Command) -> None:
    with metrics_server([page(BUSY)]) as url:
        ran = command("status", url)
    assert ran.status == 1
    first = ran.out.splitlines()[0]
    assert first == (
        f"{url}: continuum is on: policy continuum, 4 programs known. Prompt tokens by the source of their "
        "KV: 25% computed, 75% gpu. Pins: 16 taken, 13 reused. First tokens came after 0.5 s on average."
    )
    for words in ("99%", "286 s", "lost, changed-first-third", "WARNING preemptions", "Something is wrong."):
        assert words in ran.out, words


def test_on_a_stock_server_continuum_is_not_on(command: Command) -> None:
    stock = {name: value for name, value in BUSY.items() if name.startswith("vllm:num_requests")}
    with metrics_server([page(stock)]) as url:
        ran = command("status", url)
    assert ran.status == 1 and "continuum is NOT on here" in ran.out.splitlines()[0]
    assert "too early to tell" in ran.out.splitlines()[0]
    assert "--scheduling-policy continuum" in ran.out
    assert ran.out.rstrip().endswith("continuum is off.") and "wrong" not in ran.out
    assert "not reported" not in ran.out


def test_a_quiet_server_is_well_and_the_address_may_end_in_v1(command: Command) -> None:
    with metrics_server([page(QUIET)]) as url:
        ran = command("status", url + "/v1/")
    assert ran.status == 0 and "Nothing is wrong." in ran.out


def test_what_is_no_vllm_server_is_refused_in_one_line(command: Command) -> None:
    assert "is the server up" in command.refused("status", "http://127.0.0.1:1")
    assert "is the server up" in command.refused("status", "no url")
    with metrics_server(["up 1\n"]) as url:
        assert "no vllm: metrics" in command.refused("status", url)
        assert "HTTP 404" in command.refused("status", url + "/other")
    with metrics_server(["<html>{ not metrics"]) as url:
        assert "no Prometheus text" in command.refused("status", url)


names = st.sampled_from([*BUSY, "vllm:x", "# TYPE vllm:x", "# HELP", 'a{b="c'])
values = st.sampled_from(["1", "nan", "-inf", "1e999", "", "one", '"', "1 2 3", "{", "\\"])


@given(st.lists(st.tuples(names, values), max_size=6), st.text('vlm:#{}="\\, \n1e', max_size=20))
def test_any_answer_is_read_or_refused(lines: list[tuple[str, str]], tail: str) -> None:
    text = "".join(f"{name} {value}\n" for name, value in lines) + tail
    try:
        status_of("http://h", page_of(text, "http://h"))
    except ServerError as refused:
        assert str(refused).startswith("http://h/metrics")


def test_a_replica_of_a_fleet_is_asked_by_its_rank(command: Command) -> None:
    with metrics_server([page(QUIET)]) as url:
        ran = command("status", url, "--replica", "1")
        assert ran.out.startswith(f"{url}, replica 1: continuum is on") and ran.status == 0
        assert "/metrics?replica=1: HTTP 404" in command.refused("status", url + "/other", "--replica", "1")
