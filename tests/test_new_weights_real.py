"""New weights under a real vLLM server, over a real LMCache server with a disk: no answer is the old ones'.

The truth is the same prompt with prompt_logprobs, for which vLLM reads no cache.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from serving import CHUNK, Server, ids, serve
from waiting import PATIENCE_S, wait_for

from experiments.mp_server import MpProcess, serve_mp
from experiments.tiny_model import make_model

pytestmark = pytest.mark.real
PROMPT = ids(4 * CHUNK, 5)


class Trainer:
    """Changes the weights as verl and SkyRL do, and asks."""

    def __init__(self, url: str) -> None:
        self.server = Server(url)

    def post(self, path: str, body: object = None, **params: str) -> None:
        sent = httpx.post(f"{self.server.url}/{path}", json=body, params=params, timeout=PATIENCE_S)
        sent.raise_for_status()
        assert "false" not in sent.text, sent.text

    def load(self, checkpoint: Path) -> None:
        self.post("pause", mode="abort", clear_cache="true")
        self.post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})
        self.post("resume")

    def loaded(self) -> float:
        tiers = ("dram", "ssd")
        return sum(self.server.metric("continuum_prompt_tokens_total", tier=tier) for tier in tiers)

    def answers_rightly(self) -> list[int]:
        served = self.server.complete(PROMPT)
        truth = self.server.complete(PROMPT, prompt_logprobs=1)
        assert served.output == truth.output
        assert served.logprobs[-8:] == pytest.approx(truth.logprobs[-8:], abs=0.05)
        return served.output


@contextmanager
def engine(mp: MpProcess, checkpoint: Path, log: Path, *more: str) -> Iterator[Trainer]:
    args = ["--scheduling-policy", "continuum", "--max-model-len", "4096", *more]
    args += ["--kv-transfer-config", json.dumps(mp.transfer_config)]
    with serve(checkpoint, args, log=log, env={"VLLM_SERVER_DEV_MODE": "1"}) as url:
        yield Trainer(url)


def test_no_answer_is_from_kv_of_other_weights(model: Path, tmp_path: Path) -> None:
    """Twice by a trainer in a running engine, then by another checkpoint in the folder of a new one."""
    other, latest = make_model(tmp_path / "other", 1), tmp_path / "latest"
    shutil.copytree(model, latest)
    disk = tmp_path / "disk"
    with serve_mp(1.0, disk, tmp_path / "mp.log", disk_gb=5) as mp:
        with engine(mp, latest, tmp_path / "first.log") as trainer:
            outputs = [trainer.answers_rightly()]
            for number, checkpoint in enumerate((other, model), 1):
                wait_for(lambda files=4 * number: len(list(disk.iterdir())) >= files, "its KV is on disk")
                trainer.load(checkpoint)
                outputs.append(trainer.answers_rightly())
            assert trainer.loaded() == 0
            time.sleep(1.0)
            trainer.post("reset_prefix_cache")
            trainer.server.complete(PROMPT)
            wait_for(lambda: trainer.loaded() > 0, "the newest weights' own KV is loaded", every_s=0.5)
        assert outputs[0] == outputs[2] != outputs[1]
        shutil.copy(other / "model.safetensors", latest)
        with engine(mp, latest, tmp_path / "second.log") as trainer:
            assert trainer.answers_rightly() == outputs[1]
            assert trainer.loaded() == 0
