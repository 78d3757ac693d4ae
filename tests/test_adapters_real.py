"""A real server whose adapters are loaded, replaced and loaded again beside requests, and whose weights are
others: each token is right.

    ADAPTER_ROUNDS=150 ADAPTER_SEED=7 python -m pytest -s tests/test_adapters_real.py    # 900 requests

What an adapter's version says to a prompt is asked once for each weights, of a copy with a name and a folder
of its own, as of a fresh server. In float32, so that a prompt in two pieces gives the tokens of one.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import BLOCK, HTTP, Answer, Server, ids, serve

from experiments.server import reserved_port
from experiments.tiny_adapters import Version, save_adapter
from experiments.tiny_model import make_model

pytestmark = pytest.mark.real
ROUNDS = int(os.environ.get("ADAPTER_ROUNDS", "6"))  # of six requests each
IS_LONG = "ADAPTER_ROUNDS" in os.environ  # then each run draws anew
SEED = int(os.environ.get("ADAPTER_SEED") or (secrets.randbelow(1 << 31) if IS_LONG else 0))
ADAPTERS, VERSIONS, TENANTS = "ab", 3, 3
ARGS = (
    *("--scheduling-policy", "continuum", "--max-model-len", "1024", "--num-gpu-blocks-override", "40"),
    *("--dtype", "float32", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
    *(
        "--max-cpu-loras",
        "64",
    ),  # one that is evicted is read again from its folder, whatever that has by then
)


class Adapters:
    """The server's two adapters, their newest versions, and what each version answers."""

    def __init__(self, server: Server, model: Path, folder: Path) -> None:
        self.server, self.model, self.folder = server, model, folder
        self.prompts = [ids(2 * BLOCK + 40, story) for story in range(TENANTS)]
        self.newest = dict.fromkeys(ADAPTERS, 0)
        self.checkpoints = [model, make_model(folder / "other", seed=1)]
        self.right: dict[tuple[int, Version, int], Answer] = {}
        for weights in (1, 0):
            self.new_weights(weights)
            for version in [(name, number) for name in ADAPTERS for number in range(VERSIONS)]:
                name = f"copy-{weights}-{version[0]}{version[1]}"
                self.load(name, save_adapter(folder / name, model, version))
                for tenant in range(TENANTS):
                    self.right[weights, version, tenant] = self.ask(name, tenant, is_last_step=True)
        for name in ADAPTERS:
            self.load(name, self.save(name))

    def save(self, name: str) -> Path:
        return save_adapter(self.folder / name, self.model, (name, self.newest[name]))

    def load(self, name: str, folder: Path, **fields: Any) -> None:
        self._post("v1/load_lora_adapter", lora_name=name, lora_path=str(folder), **fields)

    def load_again(self, name: str) -> None:
        """Unload, and load the same name from the same folder."""
        self._post("v1/unload_lora_adapter", lora_name=name)
        self.load(name, self.folder / name)

    def load_in_place(self, name: str) -> None:
        self.load(name, self.folder / name, load_inplace=True)

    def new_weights(self, number: int) -> None:
        """The model's own, without a pause."""
        self.weights, kwargs = number, {"weights_path": str(self.checkpoints[number])}
        self._post("collective_rpc", method="reload_weights", kwargs=kwargs)

    def _post(self, path: str, **body: Any) -> None:
        HTTP.post(f"{self.server.url}/{path}", json=body).raise_for_status()

    def ask(self, name: str, tenant: int, **fields: Any) -> Answer:
        return self.server.complete(self.prompts[tenant], 12, model=name, **fields)

    def answers_of(self, asked: list[tuple[str, int]]) -> list[Answer | None]:
        """Asked side by side, each as the next turn of the tenant's program; None: it was not loaded."""
        with ThreadPoolExecutor(len(asked)) as clients:
            return list(clients.map(self._answer, asked))

    def _answer(self, asked: tuple[str, int]) -> Answer | None:
        name, tenant = asked
        try:
            return self.ask(name, tenant, job_id=f"{name}-{tenant}")
        except AssertionError as refused:
            assert "does not exist" in str(refused), refused
            return None

    def says(self, answer: Answer, version: Version, tenant: int) -> bool:
        right = self.right[self.weights, version, tenant]
        return answer.output == right.output and answer.logprobs == pytest.approx(right.logprobs, abs=0.02)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    folder = tmp_path_factory.mktemp("adapters")
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
    env["CONTINUUM_POLICY"] = "static-ttl"
    with serve(model, ARGS, log=folder / "vllm.log", env=env) as url:
        yield Adapters(Server(url), model, folder)


def test_versions_differ_and_their_kv_is_found_again(adapters: Adapters) -> None:
    """The control: without a change a second turn hits, and an answer by other KV would be noticed."""
    assert len({tuple(answer.output) for answer in adapters.right.values()}) == len(adapters.right)
    adapters.ask("a", 0)
    before = adapters.server.metric("vllm:prefix_cache_hits_total")
    assert adapters.says(adapters.ask("a", 0), ("a", adapters.newest["a"]), 0)
    assert adapters.server.metric("vllm:prefix_cache_hits_total") >= before + 2 * BLOCK


def test_each_answer_is_of_the_newest_version_whatever_was_loaded_before(adapters: Adapters) -> None:
    """One that is asked meanwhile is of one version whole. Not beside a load in place or new weights: vLLM
    lets running requests go on with what they have."""
    draw, done = random.Random(SEED), Counter[str]()
    print(f"ADAPTER_SEED={SEED}")
    for number in range(ROUNDS):
        name, other = draw.sample(ADAPTERS, 2)
        way, old = ("in place", "again", "weights")[number % 3], adapters.newest[name]
        new = draw.randrange(VERSIONS)
        beside = [(draw.choice([name, other]), tenant) for tenant in range(TENANTS)]
        with ThreadPoolExecutor(1) as clients:
            meanwhile = clients.submit(adapters.answers_of, beside)
            time.sleep(draw.choice([0.0, 0.05, 0.2]))
            if way == "weights":
                adapters.new_weights(1 - adapters.weights)
            else:
                adapters.newest[name] = new
                adapters.save(name)
                (adapters.load_in_place if way == "in place" else adapters.load_again)(name)
        for (which, tenant), answer in zip(beside, meanwhile.result(), strict=True):
            if answer is None:
                assert which == name and way == "again"
            elif way == "again" or (way == "in place" and which == other):
                allowed = {adapters.newest[other]} if which == other else {old, new}
                assert any(adapters.says(answer, (which, each), tenant) for each in allowed), (number, which)
        asked = [(draw.choice([name, name, other]), tenant) for tenant in range(TENANTS)]
        for (which, tenant), answer in zip(asked, adapters.answers_of(asked), strict=True):
            assert answer is not None
            assert adapters.says(answer, (which, adapters.newest[which]), tenant), (number, which, old, new)
            done[which] += 1
    assert min(done[name] for name in ADAPTERS) > 0, done


def over_lmcache(folder: Path, port: int) -> str:
    """Settings of a KV connector with DRAM and a disk that outlives the server."""
    extra = {
        "lmcache.mp.autostart": True,
        "lmcache.mp.port": port,
        "lmcache.chunk_size": 2 * BLOCK,
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": 1,
        "lmcache.local_disk": f"file://{folder}/disk/",
        "lmcache.max_local_disk_size": 1,
    }
    kind = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    return json.dumps({**kind, "kv_connector_extra_config": extra})


def test_two_adapters_and_the_model_share_lmcache_and_its_disk_over_a_restart(
    model: Path, tmp_path: Path
) -> None:
    """Their prompts have the same tokens. With prompt_logprobs vLLM reads no cache."""
    names = ("tiny", *ADAPTERS)
    folders = [save_adapter(tmp_path / name, model, (name, 0)) for name in ADAPTERS]
    modules = [f"{name}={folder}" for name, folder in zip(ADAPTERS, folders, strict=True)]
    prompts = [ids(4 * BLOCK + 40, story) for story in range(2)]
    args = [*ARGS, "--lora-modules", *modules, "--shutdown-timeout", "60"]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    for start in range(2):
        transfer = ["--kv-transfer-config", over_lmcache(tmp_path, reserved_port())]
        with serve(model, [*args, *transfer], log=tmp_path / f"vllm-{start}.log", env=env) as url:
            server = Server(url)
            for rounds in range(2):
                before = server.metric("vllm:external_prefix_cache_hits_total")
                for name, prompt in [(name, prompt) for prompt in prompts for name in names]:
                    got = server.complete(prompt, 8, model=name)
                    truth = server.complete(prompt, 8, model=name, prompt_logprobs=1)
                    assert got.output == truth.output, (start, rounds, name)
                found = server.metric("vllm:external_prefix_cache_hits_total") - before
                is_stored = start or rounds
                assert found == (len(names) * len(prompts) * 4 * BLOCK if is_stored else 0), (start, rounds)
                HTTP.post(f"{url}/reset_prefix_cache").raise_for_status()
