"""Two nodes of Ray's own test cluster on this machine, a replica on each: a node dies, and another joins.

Runs where Ray is installed (docs/ray.md). Both nodes have this machine's address, so they share one LMCache
server, and the kernel divides connections between their two proxies.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.cluster_utils import Cluster
from ray_clients import OUTPUT_TOKENS, Client, becomes
from ray_server import ENVIRONMENT, LOOPBACK, fleet_report, serve_fleet
from serving import ids

from experiments.exactness import judged, reference

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
ROUNDING = 1e-3  # of a log probability
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes. Ray of several nodes listens on the machine's addresses, so it has a token."""
    for name, value in (ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(LOOPBACK)
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()


def test_a_node_dies_under_its_programs_and_another_joins(cluster: Any, model: Path, tmp_path: Path) -> None:
    clients = [Client(f"run-{i}", 300 + i) for i in range(8)]

    def turns(count: int) -> None:
        def run(client: Client) -> None:
            client.conversation.tokens += ids(200, story=100 * client.seed + len(client.replicas))
            for _ in range(count):
                client.turn(url, is_last=False)

        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(run, clients))

    with serve_fleet(model, tmp_path, start_s=900, cluster=cluster.address, a_node=1) as url:
        turns(2)
        homes = {client.name: set(client.replicas) for client in clients}
        assert all(len(home) == 1 for home in homes.values()), "whichever proxy a turn passes"
        assert len(set.union(*homes.values())) == 2
        (worker,) = cluster.worker_nodes
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(turns, 3)
            cluster.remove_node(worker, allow_graceful=False)
            running.result()
        assert {status for client in clients for status in client.failures} <= {500, 503}
        moved = [client for client in clients if set(client.replicas) != homes[client.name]]
        assert moved and all(len(set(client.replicas)) == 2 for client in moved)
        assert all(len(client.failures) <= 1 for client in clients), "no more than the turn in flight"
        cluster.add_node(**NODE)
        becomes(lambda: len(fleet_report(url).get("replicas", ())) == 2, "a replica on the new node")
        new = [Client(f"new-{i}", 900 + i) for i in range(4)]
        for client in new:
            client.conversation.tokens += ids(200, story=client.seed)
            client.turn(url, is_last=False)
        assert len({client.replicas[0] for client in new}) == 2, "new programs start there"
        model_alone = reference()
        off = [max(pair) for client in clients + new for pair in judged(client.conversation, model_alone)]
        assert len(off) == sum(len(c.replicas) for c in clients + new) * OUTPUT_TOKENS and max(off) < ROUNDING
