"""Two nodes of Ray's own test cluster on this machine: what dies, is deployed and scaled under its programs.

The router, the state, the proxies and the replicas' reports are the product's; replicas answer at once. One
test has engines, and checks each token. Runs where Ray is installed (README.md).
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("ray")

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray_clients import CUT, OUTPUT_TOKENS, REPLICA, Client, becomes, running
from ray_server import ENVIRONMENT, LOOPBACK, OPTIONS, fleet_report

from continuum_lmcache.serve import app
from continuum_lmcache.serve.names import ENVIRONMENT as NAMING
from continuum_lmcache.serve.replica import Replica
from continuum_lmcache.serve.settings import ServeSettings
from experiments.exactness import judged, reference
from experiments.fleet.ray_cost import Answering
from experiments.server import reserved_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
ROUNDING = 1e-3  # of a log probability
TURNS = 3  # of a program with an engine
PROGRAMS = [f"run-{i}" for i in range(30)]
SETTINGS = ServeSettings("m", replicas=2, gpus=0, cpus=0.1, key=secrets.token_hex(32))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes. Ray of several nodes listens on the machine's addresses, so it has a token."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | NAMING | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}).items():
            patch.setenv(name, value)
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
        patch.delenv(LOOPBACK)
        made = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            made.add_node(**NODE)
            ray.init(address=made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(scope="module")
def url(cluster: Any) -> str:
    """Both proxies have this port: the kernel divides the connections."""
    port = reserved_port()
    assert len(cluster.list_all_nodes()) == 2
    serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
    deploy()
    return f"http://127.0.0.1:{port}"


def deploy(settings: ServeSettings = SETTINGS, replica: type[Replica] = Answering, **options: Any) -> None:
    """Each deploy is another version."""
    deployed = app.deployment(settings, replica).options(max_replicas_per_node=1)
    serve.run(deployed.options(**options).bind(settings))


@pytest.fixture(autouse=True)
def _both_replicas(cluster: Any, url: str) -> None:
    """An earlier test may have killed a node."""
    if len(cluster.list_all_nodes()) < 2:
        cluster.add_node(**NODE)
    all_there(url)


def all_there(url: str) -> None:
    becomes(lambda: len(replicas(url)) == 2, "two replicas report")
    becomes(lambda: len(running("ray::ProxyActor")) == 2, "two proxies")


def replicas(url: str) -> set[str]:
    return {row["replica"] for row in fleet_report(url).get("replicas", ())}


def homes(url: str, prefix: str, turns: int = 1) -> dict[str, list[str]]:
    """The replicas of so many turns of each program; a connection that a proxy's death cut is made again."""
    found: dict[str, list[str]] = {}
    for _ in range(turns):
        for name in PROGRAMS:
            answer = sent(url, prefix + name)
            found.setdefault(name, []).append(answer.headers[REPLICA])
    return found


def sent(url: str, program: str, **fields: Any) -> httpx.Response:
    for _ in range(100):
        try:
            answer = httpx.post(f"{url}/v1/completions", json={"job_id": program} | fields, timeout=60)
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        if answer.status_code == 200:
            return answer
        assert answer.status_code in (500, 503), answer.text
        time.sleep(0.2)
    raise AssertionError("no answer in 100 tries")


def test_programs_are_at_home_on_both_nodes_whichever_proxy_their_turns_pass(url: str) -> None:
    found = homes(url, "a", turns=4)
    assert all(len(set(replicas)) == 1 for replicas in found.values())
    counts = Counter(replicas[0] for replicas in found.values())
    assert len(counts) == 2 and min(counts.values()) >= len(PROGRAMS) // 4


@pytest.mark.parametrize("victim", ["ray::FleetState", "ray::ProxyActor"])
def test_every_program_keeps_its_replica_when_the_state_or_a_proxy_dies(url: str, victim: str) -> None:
    before = homes(url, victim)
    os.kill(running(victim)[0].pid, signal.SIGKILL)
    after = homes(url, victim, turns=2)
    assert {name: [*before[name], *replicas] for name, replicas in after.items()} == {
        name: 3 * replicas for name, replicas in before.items()
    }


def test_programs_of_a_dead_node_go_to_the_other_one_and_stay_and_a_new_node_gets_new_ones(
    cluster: Any, url: str
) -> None:
    before, pids = homes(url, "n"), [row["pid"] for row in fleet_report(url)["replicas"]]
    (worker,) = cluster.worker_nodes
    cluster.remove_node(worker, allow_graceful=False)
    becomes(lambda: sum(map(psutil.pid_exists, pids)) == 1, "its replica, which may answer a little longer")
    after = homes(url, "n", turns=2)
    alive = {replica for replicas in after.values() for replica in replicas}
    assert len(alive) == 1 and alive < {replicas[0] for replicas in before.values()}
    cluster.add_node(**NODE)
    becomes(lambda: len(replicas(url)) == 2, "a replica on the new node")
    assert homes(url, "n") == {name: [*alive] for name in PROGRAMS}, "started programs stay"
    assert len({replicas[0] for replicas in homes(url, "new").values()}) == 2


def test_programs_go_on_while_another_version_is_deployed_and_stay_where_they_go(url: str) -> None:
    before, old = homes(url, "d"), replicas(url)
    with ThreadPoolExecutor(1) as pool:
        deployed = pool.submit(deploy)
        during = homes(url, "d")
        while not deployed.done():
            for name, there in homes(url, "d").items():
                during[name] += there
        deployed.result()
    after = homes(url, "d", turns=2)
    assert all(len(set(there)) == 1 for there in after.values())
    assert not old & {there[0] for there in after.values()}
    moved = [sum(a != b for a, b in pairwise(before[n] + during[n] + after[n])) for n in after]
    assert max(moved) <= 2, "from an old replica to the other one at most, and then to a new one"


def test_a_replica_is_started_for_more_programs_than_one_serves_in_time_and_given_back_after(
    url: str,
) -> None:
    policy = {"policy_function": "continuum_lmcache.serve.scaling:replicas"}
    scaling = {"min_replicas": 1, "max_replicas": 2, "policy": policy, "look_back_period_s": 2.0}
    scaling |= {"upscale_delay_s": 1.0, "downscale_delay_s": 1.0, "initial_replicas": 1}
    deploy(num_replicas=None, autoscaling_config=scaling)
    becomes(lambda: len(replicas(url)) == 1, "one replica")
    before = homes(url, "s")  # 30 programs; a replica without an engine says that it serves 25 in time
    becomes(lambda: len(replicas(url)) == 2, "another replica")
    assert homes(url, "s") == before, "started programs stay"
    new = homes(url, "new-s")
    assert len({there[0] for there in new.values()}) == 2
    for name in PROGRAMS:
        for prefix in ("s", "new-s")[: 1 + (name != PROGRAMS[0])]:
            sent(url, prefix + name, is_last_step=True)
    becomes(lambda: len(replicas(url)) == 1, "one replica again")
    assert homes(url, "s", turns=2)[PROGRAMS[0]]
    deploy(num_replicas=2)


def test_no_token_is_lost_or_wrong_when_the_state_a_proxy_or_a_node_dies_under_engines(
    cluster: Any, url: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32; the judge is the model in plain PyTorch, without a cache. What dies may cost each client
    the one turn that it has in flight there."""
    settings = dataclasses.replace(SETTINGS, model=str(model), cpus=0.5, vllm=" ".join(OPTIONS))
    deploy(settings, Replica)
    plain = reference()
    for seed, (what, kill, failures) in enumerate(
        (
            ("state", lambda: os.kill(running("ray::FleetState")[0].pid, signal.SIGKILL), set()),
            ("proxy", lambda: os.kill(running("ray::ProxyActor")[0].pid, signal.SIGKILL), {CUT}),
            ("node", lambda: cluster.remove_node(*cluster.worker_nodes, allow_graceful=False), {CUT, 500}),
        )
    ):
        all_there(url)
        clients = ran([Client(f"{what}-{i}", 8 * seed + i) for i in range(8)], url, kill)
        failed = Counter(status for client in clients for status in client.failures)
        off = [max(pair) for client in clients for pair in judged(client.conversation, plain)]
        with capsys.disabled():
            print(f"\n{what}: {len(off)} tokens, off by {max(off):.1g} at most; failures {dict(failed)}")
        assert set(failed) <= failures and all(len(client.failures) <= 1 for client in clients)
        assert len(off) == len(clients) * TURNS * OUTPUT_TOKENS and max(off) < ROUNDING
        left = {a for client in clients for a, b in pairwise(client.replicas) if a != b}
        assert len(left) == (what == "node"), "turns left the replica that died, and no other"
    cluster.add_node(**NODE)
    deploy()


def ran(clients: list[Client], url: str, kill: Callable[[], object]) -> list[Client]:
    """The clients after TURNS turns each, all at once; `kill` is called after the first third of them."""
    with ThreadPoolExecutor(len(clients)) as pool:
        runs = [pool.submit(client.run, url, TURNS) for client in clients]
        becomes(
            lambda: sum(len(client.replicas) for client in clients) >= len(clients), "a third of the turns"
        )
        kill()
        for run in runs:
            run.result()
    return clients
