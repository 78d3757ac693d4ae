"""Two machines on Ray, each with LMCache's server: what dies, is deployed and scaled under engines.

The other machine is made of namespaces (ray_machine.py), so 127.0.0.1 is another place there, as on two
computers. Every token is checked. Runs as root, where Ray is installed (README.md).
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.cluster_utils import Cluster
from ray_clients import CUT, OUTPUT_TOKENS, PATIENCE_S, REPLICA, Client, becomes, one_turn, running
from ray_machine import HERE, THERE, Machine, machine, may_make_namespaces
from ray_server import ENVIRONMENT, LOOPBACK, OPTIONS, fleet_report
from serving import ids

from continuum_lmcache.serve import app
from continuum_lmcache.serve.names import ENVIRONMENT as NAMING
from continuum_lmcache.serve.settings import ServeSettings
from experiments.exactness import judged, reference
from experiments.server import reserved_port

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not may_make_namespaces(), reason="another machine needs root, and its namespaces"),
]
ROUNDING = 1e-3  # of a log probability
TURNS, CLIENTS = 3, 8
OBJECTS = 100 * 2**20  # bytes of Ray's own, on each machine
SMALL = ("--max-model-len", "2048", "--num-gpu-blocks-override", "20")  # 2,432 tokens: three of the programs
LMCACHE = "lmcache.cli.main"
HITS, UP = "vllm:external_prefix_cache_hits_total", "continuum_tier_store_up"
BOUNDS = {"min_replicas": 1, "initial_replicas": 1, "max_replicas": 2}
DELAYS = {"look_back_period_s": 2.0, "upscale_delay_s": 1.0, "downscale_delay_s": 3.0}
POLICY = {"policy_function": "continuum_lmcache.serve.scaling:replicas"}


@dataclass
class Fleet:
    """A replica on each machine, whose CPU it takes."""

    cluster: Any
    there: Machine
    settings: ServeSettings
    urls: tuple[str, str]  # of the proxies
    number: Iterator[int] = field(default_factory=itertools.count)  # of programs
    model: Any = field(default_factory=reference)

    def deploy(self, **options: Any) -> None:
        """Each deploy is another version."""
        serve.run(app.deployment(self.settings).options(**options).bind(self.settings))

    def start_other_machine(self) -> None:
        self.there.start(self.cluster.address, "--num-cpus=1", f"--object-store-memory={OBJECTS}")

    def all_there(self) -> None:
        becomes(lambda: len(self.replicas()) == 2, "two replicas report")
        becomes(lambda: len(running("ray::ProxyActor")) == 2, "two proxies")
        becomes(self.both_use_lmcache, "both replicas use LMCache's server")

    def both_use_lmcache(self) -> bool:
        for _ in range(4):  # an engine without a step has no gauges; programs are divided evenly
            one_turn(self.urls[0], ids(100), job_id=f"asks-{next(self.number)}")
        return list(self.metric(UP).values()) == [1.0, 1.0]

    def replicas(self) -> set[str]:
        return {row["replica"] for row in fleet_report(self.urls[0]).get("replicas", ())}

    def metric(self, name: str) -> dict[str, float]:
        """By replica, of those that have it."""
        found = {}
        for rank in range(2):
            page = httpx.get(f"{self.urls[0]}/metrics", params={"replica": rank}, timeout=PATIENCE_S)
            samples = [
                each for family in text_string_to_metric_families(page.text) for each in family.samples
            ]
            for value in [each.value for each in samples if each.name == name]:
                found[page.headers[REPLICA]] = value
        return found

    def send(self, turns: int, programs: list[Client]) -> None:
        """One more program and all its turns; it is put into `programs` before them. It starts at a proxy
        that a load balancer would take."""
        number = next(self.number)
        url, spare = sorted(self.urls[:: 1 if number % 2 else -1], key=is_healthy, reverse=True)
        programs.append(program := Client(f"run-{number}", number, spare=spare))
        program.run(url, turns)


def is_healthy(proxy: str) -> bool:
    """Ray's answer to a load balancer: no for 30 s and more before it ends the proxy of a node without a
    replica."""
    try:
        return httpx.get(f"{proxy}/-/healthz", timeout=PATIENCE_S).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    ports = {"lmcache_port": reserved_port(), "lmcache_http_port": reserved_port()}
    vllm = " ".join((*OPTIONS, *SMALL))
    settings = ServeSettings(str(model), 2, vllm, gpus=0, lmcache_gb=1, **ports, key=secrets.token_hex(32))
    port, log = reserved_port(), tmp_path_factory.mktemp("machine") / "ray.log"
    with pytest.MonkeyPatch.context() as patch, machine(log, [port, *ports.values()]) as there:
        for name, value in (ENVIRONMENT | NAMING | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}).items():
            patch.setenv(name, value)
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
        patch.setenv("CONTINUUM_FIRST_TOKEN_LIMIT_S", "1")  # so that the programs of one test are too many
        patch.delenv(LOOPBACK)
        head = {"num_cpus": 1, "object_store_memory": OBJECTS, "node_ip_address": HERE}
        made = Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False})
        try:
            ray.init(address=made.address, log_to_driver=False, _node_ip_address=HERE)
            serve.start(proxy_location="EveryNode", http_options={"host": "0.0.0.0", "port": port})
            found = Fleet(made, there, settings, (f"http://{HERE}:{port}", f"http://{THERE}:{port}"))
            found.start_other_machine()
            found.deploy()
            yield found
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(autouse=True)
def _all_there(fleet: Fleet) -> None:
    """An earlier test may have killed something."""
    fleet.all_there()


def under_load(fleet: Fleet, act: Callable[[], object], clients: int = CLIENTS) -> list[Client]:
    """Programs of TURNS turns, so many at a time, from before `act` until after it."""
    programs: list[Client] = []
    is_over = threading.Event()

    def one_after_the_other() -> None:
        is_last = False
        while not is_last:
            is_last = is_over.is_set()
            fleet.send(TURNS, programs)

    with ThreadPoolExecutor(clients) as pool:
        runs = [pool.submit(one_after_the_other) for _ in range(clients)]
        try:
            becomes(lambda: sum(len(each.replicas) for each in programs) >= clients, "a turn of each")
            act()
        finally:
            is_over.set()
        for run in runs:
            run.result()
    return programs


def check(fleet: Fleet, programs: list[Client], *allowed: int, turns: int = TURNS) -> None:
    """Each token is the model's in plain PyTorch, without a cache. Each program lost one turn in flight at
    most, by no other failure than these."""
    failed = Counter(status for each in programs for status in each.failures)
    off = [max(pair) for each in programs for pair in judged(each.conversation, fleet.model)]
    print(f"{len(off)} tokens, off by {max(off):.1g} at most; failures {dict(failed)}")
    assert set(failed) <= set(allowed) and all(len(each.failures) <= 1 for each in programs)
    assert len(off) == len(programs) * turns * OUTPUT_TOKENS and max(off) < ROUNDING


def left(programs: list[Client]) -> set[str]:
    """The replicas from which a program went to another."""
    return {a for each in programs for a, b in pairwise(each.replicas) if a != b}


def loads(fleet: Fleet) -> None:
    """Turns whose blocks are gone from the GPU load them from the server of their machine: while one replica
    does, the other loads nothing."""
    homes: dict[str, Client] = {}
    while len(homes) < 2:
        number = next(fleet.number)
        program = Client(f"loads-{number}", number)
        program.conversation.tokens += ids(600, story=100 * number)
        program.turn(fleet.urls[0], is_last=False)
        homes[program.replicas[0]] = program
    others = Counter[str]()
    while len(others) < 2 or min(others.values()) < 2:  # each prompt needs three quarters of the blocks
        number = next(fleet.number)
        answer = one_turn(fleet.urls[0], ids(1900, story=100 * number), job_id=f"fills-{number}")
        others[answer.headers[REPLICA]] += 1
    for home, program in homes.items():
        before = fleet.metric(HITS)
        program.conversation.tokens += ids(200, story=100 * program.seed + 1)
        program.turn(fleet.urls[0], is_last=True)
        loaded = {replica for replica, tokens in fleet.metric(HITS).items() if tokens > before[replica]}
        assert program.replicas == [home, home] and loaded == {home}
        check(fleet, [program], turns=2)


def test_a_turn_loads_its_kv_from_the_lmcache_server_of_its_own_machine(fleet: Fleet) -> None:
    assert len(running(LMCACHE)) == 2 and len(running(LMCACHE, fleet.there.pid)) == 1, "the same port on both"
    loads(fleet)


@pytest.mark.parametrize(
    ("victim", "failures"), [("ray::FleetState", ()), ("ray::ProxyActor", (CUT,)), (LMCACHE, ())]
)
def test_no_token_is_lost_or_wrong_and_no_program_moves_when_one_of_them_dies(
    fleet: Fleet, victim: str, failures: tuple[int, ...]
) -> None:
    def die_and_come_back() -> None:
        died = (running(victim, fleet.there.pid) or running(victim))[0]
        died.kill()
        becomes(lambda: [each for each in running(victim) if each.pid != died.pid], f"another {victim}")
        fleet.all_there()

    programs = under_load(fleet, die_and_come_back)
    check(fleet, programs, *failures)
    assert not left(programs)


def test_programs_of_a_dead_machine_go_on_at_the_other_and_it_serves_again_when_it_is_back(
    fleet: Fleet,
) -> None:
    before = fleet.replicas()

    def die_and_come_back() -> None:
        fleet.there.kill()
        fleet.start_other_machine()
        becomes(lambda: fleet.replicas() - before, "a replica on the machine that is back")
        fleet.all_there()

    programs = under_load(fleet, die_and_come_back)
    check(fleet, programs, CUT, 500)
    dead = before - fleet.replicas()
    assert left(programs) == dead and len(dead) == 1
    assert len({each.replicas[0] for each in programs[-CLIENTS:]}) == 2, "new programs start on both"
    loads(fleet)


def test_turns_go_on_while_another_version_is_deployed(fleet: Fleet) -> None:
    before = fleet.replicas()
    programs = under_load(fleet, fleet.deploy)
    check(fleet, programs)
    assert left(programs) <= before, "no program leaves a new replica"
    becomes(lambda: not before & fleet.replicas(), "all are new")


def test_a_replica_is_started_under_load_and_given_back_after(fleet: Fleet) -> None:
    """The signal: one replica serves some of these programs within a second."""
    fleet.deploy(num_replicas=None, autoscaling_config=BOUNDS | DELAYS | {"policy": POLICY})
    becomes(lambda: len(fleet.replicas()) == 1, "one replica")
    programs = under_load(fleet, lambda: becomes(lambda: len(fleet.replicas()) == 2, "a second one"))
    assert not left(programs), "started programs stay"
    programs += under_load(fleet, lambda: becomes(lambda: len(fleet.replicas()) == 1, "one again"), clients=1)
    check(fleet, programs)
    fleet.deploy()
