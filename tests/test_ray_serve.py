"""Two small replicas and one LMCache server under Ray: a replica, the state and LMCache's server die in turn.

Runs where Ray is installed (tests/README.md); one start for all tests, which pass in any order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("ray")

from ray_clients import OUTPUT_TOKENS, PATIENCE_S, REPLICA, Client, becomes, one_turn, running
from ray_server import fleet_report, serve_fleet
from serving import ids

from experiments.exactness import judged, reference
from experiments.tiny_model import KV_BYTES_PER_TOKEN

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]  # the first test has the start, of up to 800 s
ROUNDING = 1e-3  # of a log probability
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_fleet(model, tmp_path_factory.mktemp("fleet"), start_s=800) as at:
        yield at


@pytest.fixture(autouse=True)
def _both_replicas(url: str) -> None:
    """An earlier test may have killed one."""
    becomes(lambda: len(fleet_report(url).get("replicas", ())) == 2, "two replicas report")


def test_a_replica_dies_under_twenty_programs_and_no_token_is_lost_or_wrong(url: str) -> None:
    clients, turns = [Client(f"run-{i}", i) for i in range(20)], 4
    with ThreadPoolExecutor(len(clients)) as pool:
        runs = [pool.submit(client.run, url, turns) for client in clients]
        half = len(clients) * turns / 2
        becomes(
            lambda: sum(len(client.replicas) for client in clients) >= half, "half of the turns are answered"
        )
        victim = max(fleet_report(url)["replicas"], key=lambda row: row["programs"])
        os.kill(victim["pid"], signal.SIGKILL)
        for run in runs:
            run.result()
    dead, model = victim["replica"], reference()
    assert all(len(client.replicas) == turns for client in clients), "each turn was answered"
    assert {status for client in clients for status in client.failures} <= {500, 503}
    assert all(len(client.failures) <= 1 for client in clients), "no more than the turn in flight"
    steps = [pair for c in clients for pair in zip(c.replicas, c.replicas[1:], strict=False)]
    left = {a for a, b in steps if a != b}
    assert left == {dead}, "no turn left a replica that lived"
    off = [max(pair) for client in clients for pair in judged(client.conversation, model)]
    assert len(off) == len(clients) * turns * OUTPUT_TOKENS and max(off) < ROUNDING


def test_a_new_state_knows_where_every_program_is_at_home(url: str) -> None:
    clients = [Client(f"keeps-{i}", 7000 + i) for i in range(8)]

    def turns(n: int) -> None:
        def run(client: Client) -> None:
            client.conversation.tokens += ids(200, story=client.seed)
            for _ in range(n):
                client.turn(url, is_last=False)

        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(run, clients))

    turns(1)
    before = fleet_report(url)["state"]
    (state,) = running("ray::FleetState")
    os.kill(state.pid, signal.SIGKILL)
    turns(2)  # at once: none is refused
    becomes(lambda: fleet_report(url).get("state", before) != before, "another state answers")
    turns(1)
    assert [client.failures for client in clients] == [[]] * len(clients)
    assert [len(set(client.replicas)) for client in clients] == [1] * len(clients)


def test_a_new_proxy_sends_every_program_home(url: str) -> None:
    clients = [Client(f"proxied-{i}", 8000 + i) for i in range(4)]
    for client in clients:
        client.conversation.tokens += ids(200, story=client.seed)
        client.turn(url, is_last=False)
    (proxy,) = running("ray::ProxyActor")
    os.kill(proxy.pid, signal.SIGKILL)
    becomes(lambda: [p for p in running("ray::ProxyActor") if p.pid != proxy.pid], "another proxy")
    becomes(lambda: fleet_report(url), "it answers")
    for client in clients:
        client.turn(url, is_last=False)
    assert [len(set(client.replicas)) for client in clients] == [1] * len(clients)


def test_ray_starts_lmcaches_server_again_and_turns_go_on_meanwhile(url: str) -> None:
    (server,) = running("lmcache.cli.main")
    os.kill(server.pid, signal.SIGKILL)
    for turn in range(1, 4):
        answer = one_turn(url, ids(300 * turn, story=9), job_id="meanwhile")
        assert answer.status_code == 200, answer.text
    becomes(lambda: [p for p in running("lmcache.cli.main") if p.pid != server.pid], "another LMCache server")
    up = partial(httpx.get, f"{url}/metrics", params={"replica": "0"}, timeout=PATIENCE_S)
    becomes(lambda: 'continuum_tier_store_up{engine="0"} 1.0' in up().text, "the replica finds it")


def test_two_replicas_on_a_node_count_each_on_half_of_its_lmcache_server(url: str) -> None:
    capacity = "continuum_tier_capacity_tokens"

    def counted_bytes(replica: str) -> float:
        page = httpx.get(f"{url}/metrics", params={"replica": replica}, timeout=PATIENCE_S).text
        samples = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples}
        return samples.get(capacity, 0.0) * KV_BYTES_PER_TOKEN["float32"]

    half_bytes = 0.8 * 2**30 / 2  # LMCache evicts above 0.8 of L1, which has 1 GiB here
    with ThreadPoolExecutor(8) as pool:  # an engine without a step has no gauges; so many use both
        list(pool.map(lambda i: one_turn(url, ids(100, story=20 + i), job_id=f"shares-{i}"), range(8)))
    for replica in ("0", "1"):
        becomes(lambda r=replica: abs(counted_bytes(r) / half_bytes - 1) < 0.01, f"{replica} counts on half")


def test_every_way_to_name_a_program_keeps_its_replica(url: str) -> None:
    """In the body, in a header, on the Anthropic endpoint; `?replica=N` selects a replica."""
    prompt = ids(100, story=20)
    chat = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}

    def answers(**how: Any) -> set[str]:
        found = [httpx.post(timeout=300, **how) for _ in range(4)]
        assert all(each.status_code == 200 for each in found), found[0].text
        return {each.headers[REPLICA] for each in found}

    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    assert len(answers(url=f"{url}/v1/completions", json=body | {"job_id": "b"})) == 1
    assert len(answers(url=f"{url}/v1/completions", json=body, headers={"X-Session-ID": "h"})) == 1
    assert len(answers(url=f"{url}/v1/messages", json=chat | {"job_id": "m"})) == 1
    pages = [httpx.get(f"{url}/metrics", params={"replica": n}, timeout=PATIENCE_S) for n in (0, 1)]
    names = [page.headers[REPLICA] for page in pages]
    assert sorted(names) == sorted(row["replica"] for row in fleet_report(url)["replicas"])
    assert one_turn(url, prompt, job_id=[1]).status_code == 400, "vLLM's own answer to a bad field"


def test_ray_and_lmcache_listen_on_loopback_alone(url: str) -> None:
    """`url` is a parameter so that they run."""
    assert url.startswith("http://127.0.0.1:")
    names = ("ray::", "raylet", "gcs_server", "lmcache.cli", "/ray/dashboard/", "/ray/autoscaler/")
    open_to = {
        (place.laddr.ip, place.laddr.port, name, " ".join(process.cmdline())[:200])
        for name in names
        for process in running(name)
        for place in process.net_connections(kind="inet")
        if place.status == psutil.CONN_LISTEN
    }
    assert open_to and not [one for one in open_to if one[0] not in LOOPBACK]
