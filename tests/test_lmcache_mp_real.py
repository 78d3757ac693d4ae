"""A real vLLM server, a real LMCache MP server; the second is killed, and the first gets new weights.

The oracle is vLLM's own prefix hit of the same length, and for a prompt that is computed again its first
answer: another prompt split, or another batch, rounds logits otherwise. Prompts are 256 * n + 64 tokens,
of which vLLM and LMCache both hit 256 * n, and go one at a time.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from serving import CHUNK, CHUNK_GIB, HTTP, Answer, Server, serve
from waiting import PATIENCE_S, wait_for

from experiments.mp_server import MpProcess, serve_mp
from experiments.tiny_model import make_model

pytestmark = pytest.mark.real
ARGS = (
    *("--scheduling-policy", "continuum", "--max-model-len", "3072", "--num-gpu-blocks-override", "26"),
    *("--max-num-seqs", "1"),
)


UNSEEN = itertools.count(1000)  # seeds of prompts that no test asks


def prompt(seed: int, chunks: int = 2) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 4096) for _ in range(chunks * CHUNK + 64)]


@dataclass(frozen=True)
class Pair:
    """Both servers."""

    vllm: Server
    mp: MpProcess
    log: Path
    checkpoint: Path

    def ask(self, token_ids: list[int]) -> Answer:
        return self.vllm.complete(token_ids, is_last_step=True)

    def forget_gpu(self) -> None:
        """Drop vLLM's own cache. It refuses while a connector still has blocks of a finished request."""
        wait_for(lambda: self.vllm.usage == 0, "no block is held", every_s=0.05)
        HTTP.post(f"{self.vllm.url}/reset_prefix_cache").raise_for_status()
        time.sleep(0.3)  # the mirror is behind by a question's interval

    def clear_l1(self) -> None:
        self.mp.clear_l1()
        time.sleep(1.0)  # the mirror asks ten times a second, and later on a busy machine

    def new_weights(self, checkpoint: Path) -> None:
        """As verl and SkyRL change them."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self._post("pause", mode="abort", clear_cache="true")
        self._post("collective_rpc", reload)
        self._post("resume")

    def _post(self, path: str, body: object = None, **params: str) -> None:
        sent = HTTP.post(f"{self.vllm.url}/{path}", json=body, params=params)
        sent.raise_for_status()
        assert "false" not in sent.text, sent.text

    def answers_rightly(self, token_ids: list[int]) -> list[int]:
        """Its answer, which is that without a cache."""
        served = self.ask(token_ids)
        self.vllm.check_without_cache(served)
        return served.output

    def came_from(self, tier: str) -> float:
        return self.vllm.metric("continuum_prompt_tokens_total", tier=tier)

    def stores(self) -> None:
        """Return when computed KV reaches the disk: LMCache's worker has found its server by itself."""
        before = self.written()

        def is_stored() -> bool:
            self.ask(prompt(next(UNSEEN)))
            return self.written() != before

        wait_for(is_stored, "something is stored", every_s=0.5)
        written = 0
        while written != self.written():  # both chunks of the last one
            written = self.written()
            time.sleep(1.0)

    def written(self) -> int:
        return len(list(self.mp.disk.rglob("*")))

    def loaded(self) -> tuple[float, float]:
        return self.came_from("dram"), self.came_from("ssd")

    def loaded_becomes(self, dram_tokens: int, ssd_tokens: int) -> None:
        """Figures follow an answer by half a second, or by as long as a store of it takes."""
        wanted = (dram_tokens, ssd_tokens)
        wait_for(lambda: self.loaded() == wanted, f"loaded from DRAM and disk: {wanted}", every_s=0.05)

    def loads_more(self, tokens: int) -> None:
        """Return when this many more tokens were loaded from the tiers."""
        before = sum(self.loaded())
        wait_for(lambda: sum(self.loaded()) >= before + tokens, "more is loaded", every_s=0.1)

    def becomes_up(self, up: float) -> None:
        name = "continuum_tier_store_up"
        wait_for(lambda: self.vllm.metric(name) == up, f"{name} is {up}", every_s=0.1)

    def warnings(self) -> list[str]:
        """This package's warnings about the MP server; LMCache logs one too, after its heartbeat."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if "WARNING" in line and "LMCache's MP server" in line]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("mp")
    with serve_mp(100 * CHUNK_GIB, folder / "disk", folder / "mp.log") as mp:
        latest = Path(shutil.copytree(model, folder / "latest"))
        with vllm_over(mp, latest, folder / "vllm.log") as pair:
            pair.stores()
            yield pair


@contextmanager
def vllm_over(mp: MpProcess, checkpoint: Path, log: Path) -> Iterator[Pair]:
    args = [*ARGS, "--kv-transfer-config", json.dumps(mp.transfer_config)]
    with serve(checkpoint, args, log=log, env={"VLLM_SERVER_DEV_MODE": "1"}) as url:
        yield Pair(Server(url), mp, log, checkpoint)


def test_reloads_from_l1_and_l2_give_the_logprobs_of_vllms_own_prefix_hit(pair: Pair) -> None:
    p = prompt(1)
    pair.ask(p)
    own = pair.ask(p)
    pair.forget_gpu()
    assert pair.ask(p).logprobs == own.logprobs
    pair.loaded_becomes(2 * CHUNK, 0)
    pair.forget_gpu()
    pair.clear_l1()
    assert pair.ask(p).logprobs == own.logprobs
    pair.loaded_becomes(2 * CHUNK, 2 * CHUNK)
    hits = pair.mp.hits()  # the server's own counters, for connectors that do not distinguish tiers
    assert hits["dram"] >= 2 * CHUNK and hits["ssd"] >= 2 * CHUNK


def test_the_mode_is_in_the_log_and_in_the_metrics(pair: Pair) -> None:
    assert "KV below the GPU: lmcache-mp" in pair.log.read_text()
    assert pair.vllm.metric("continuum_tier_store_info", mode="lmcache-mp") == 1
    assert pair.vllm.metric("continuum_tier_store_up") == 1


def test_noise_in_l1_is_noticed(pair: Pair) -> None:
    """The negative control: these tests notice a load of other data."""
    p = prompt(2)
    pair.ask(p)
    own = pair.ask(p)
    pair.forget_gpu()
    memory = np.memmap(pair.mp.memory, dtype=np.uint8, mode="r+")
    memory[:] = np.random.default_rng(0).integers(0, 120, memory.size, dtype=np.uint8)
    assert pair.ask(p).logprobs != own.logprobs
    pair.forget_gpu()
    pair.mp.clear_l1()


def test_a_server_that_stands_still_for_seconds_costs_a_wait_and_changes_no_answer(pair: Pair) -> None:
    p, new = prompt(3), prompt(4)
    cold, own = pair.ask(p), pair.ask(p)
    pair.forget_gpu()
    group = pair.mp.process.pid
    os.killpg(group, signal.SIGSTOP)
    waking = threading.Timer(4.0, os.killpg, (group, signal.SIGCONT))
    waking.start()
    answers = pair.ask(new), pair.ask(p)
    waking.join()
    assert answers[1].logprobs in (cold.logprobs, own.logprobs)
    end_s = time.monotonic() + PATIENCE_S
    while pair.vllm.metric("continuum_tier_store_up") != 1:  # an idle engine does not say that it changed
        assert time.monotonic() < end_s
        assert pair.ask(new).output[0] == answers[0].output[0]
    pair.vllm.usage_becomes(0.0)
    pair.stores()


def test_l2_files_that_are_cut_short_are_computed_again(pair: Pair) -> None:
    before = set(pair.mp.disk.rglob("*"))
    p = prompt(5)
    cold, own = pair.ask(p), pair.ask(p)

    def written() -> list[Path]:
        return [f for f in set(pair.mp.disk.rglob("*")) - before if f.is_file()]

    wait_for(lambda: len(written()) >= 2, "2 chunks are written", every_s=0.1)
    pair.forget_gpu()
    pair.clear_l1()
    for path in written():
        path.write_bytes(path.read_bytes()[: 2**20])
    assert pair.ask(p).logprobs in (cold.logprobs, own.logprobs)
    assert pair.vllm.complete(prompt(6)).output


def test_a_killed_server_costs_computing_and_one_warning_and_is_used_again_when_it_is_back(
    pair: Pair,
) -> None:
    prompts = [prompt(seed) for seed in range(10, 17)]  # 7 x 5 blocks: more than the GPU's 26
    right = [(pair.ask(p), pair.ask(p)) for p in prompts]
    asking, answers = True, []

    def run() -> None:
        while asking:
            for which, p in enumerate(prompts):
                answers.append((which, pair.ask(p)))
                time.sleep(0.3)  # the rest of the core is for the server that starts

    runner = threading.Thread(target=run)
    runner.start()
    pair.loads_more(4 * CHUNK)
    warned = len(pair.warnings())
    pair.mp.kill()
    pair.becomes_up(0)
    answered = len(answers)
    while len(answers) < answered + 2 * len(prompts):
        time.sleep(0.1)
    assert len(pair.warnings()) == warned + 1
    assert "does not answer" in pair.warnings()[-1]
    computed = pair.came_from("none")
    pair.mp.start()
    pair.becomes_up(1)
    pair.loads_more(4 * CHUNK)
    asking = False
    runner.join()
    assert computed > 0
    for which, answer in answers:
        cold, own = right[which]
        assert answer.logprobs in (cold.logprobs, own.logprobs), f"prompt {which} got other KV"
    pair.vllm.usage_becomes(0.0)


def test_no_answer_is_from_kv_of_other_weights(pair: Pair, model: Path, tmp_path: Path) -> None:
    """Twice new ones in a running engine, then another checkpoint in the folder of a new engine."""
    other, p = make_model(tmp_path / "other", 1), prompt(20, 4)
    before, written = sum(pair.loaded()), pair.written()
    outputs = [pair.answers_rightly(p)]
    for number, checkpoint in enumerate((other, model), 1):
        wait_for(lambda least=written + 4 * number: pair.written() >= least, "its KV is on disk")
        pair.new_weights(checkpoint)
        outputs.append(pair.answers_rightly(p))
    assert sum(pair.loaded()) == before and outputs[0] == outputs[2] != outputs[1]
    pair.forget_gpu()
    pair.ask(p)
    wait_for(lambda: sum(pair.loaded()) > before, "the newest weights' own KV is loaded", every_s=0.5)
    shutil.copy(other / "model.safetensors", pair.checkpoint)
    with vllm_over(pair.mp, pair.checkpoint, tmp_path / "vllm.log") as new:
        assert new.answers_rightly(p) == outputs[1]
        assert sum(new.loaded()) == 0
