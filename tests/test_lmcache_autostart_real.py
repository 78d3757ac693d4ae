"""The card's command, but for its ports: one `vllm serve` starts LMCache's server, and a second uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache.integration.vllm.mp_server_launcher")

from serving import CHUNK_GIB, HTTP, Server, ids, serve
from waiting import wait_for

from connectors.lmcache_mp.server.command_line import leftover_pool, shm_name
from experiments.server import ROOT, reserved_port

pytestmark = pytest.mark.real
PROMPT = ids(832, 1)  # 3 chunks and a half block
SHIPPED = json.loads((ROOT / "lmcache.json").read_text())


def arguments(folder: Path, connector: str, extra: dict[str, Any]) -> list[str]:
    """vLLM's, with the repository's file for another connector or with other settings."""
    path = folder / f"{connector}.json"
    path.write_text(json.dumps(SHIPPED | {"kv_connector": connector, "kv_connector_extra_config": extra}))
    args = ["--kv-transfer-config", str(path), "--scheduling-policy", "continuum"]
    return [*args, "--max-model-len", "2048", "--num-gpu-blocks-override", "18"]


def servers_at(port: int) -> list[psutil.Process]:
    """LMCache's servers at this port; a process that is gone has no command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "lmcache.v1.multiprocess.http_server" in words and str(port) in words:
            found.append(process)
    return found


def from_dram(server: Server) -> float:
    return server.metric("continuum_prompt_tokens_total", tier="dram")


def reloads(server: Server) -> bool:
    """Whether the prompt comes from DRAM once the GPU has lost it; LMCache stores it some time after."""
    wait_for(lambda: server.usage == 0, "no block is held", every_s=0.1)
    HTTP.post(f"{server.url}/reset_prefix_cache").raise_for_status()
    before = from_dram(server)
    server.complete(PROMPT, is_last_step=True)
    return from_dram(server) > before


def test_one_command_starts_lmcaches_server_a_second_engine_shares_it_and_it_goes_with_the_first(
    model: Path, tmp_path: Path
) -> None:
    """With the sizes of LMCache's variables. The second engine's file is one for LMCache in one process."""
    port, log, other_log = reserved_port(), tmp_path / "first.log", tmp_path / "second.log"
    disk, yaml = tmp_path / "kv" / "deep", tmp_path / "lmcache.yaml"
    yaml.write_text("save_decode_cache: true\nlocal_device: cpu\n")
    env = {
        "LMCACHE_LOCAL_CPU": "true",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(60 * CHUNK_GIB),
        "LMCACHE_LOCAL_DISK": f"file://{disk}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "1",
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_CONFIG_FILE": str(yaml),
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    extra = SHIPPED["kv_connector_extra_config"] | {"lmcache.mp.port": port}
    with serve(model, arguments(tmp_path, "LMCacheMPConnector", extra), log=log, env=env) as url:
        first = Server(url)
        (process,) = servers_at(port)
        said = next(line for line in log.read_text().splitlines() if "LMCache's server on port" in line)
        assert said.count(f'"base_path": "{disk}/"') == 1 and "--chunk-size 256" in said
        assert "without effect: local_device" in said
        output = first.complete(PROMPT, is_last_step=True).output
        wait_for(lambda: reloads(first), "a load from DRAM", every_s=0.5)
        wait_for(lambda: any(disk.iterdir()), "something is on the disk")
        old = arguments(tmp_path, "LMCacheConnectorV1", {"lmcache.mp.port": port})
        with serve(model, old, log=other_log) as other_url:
            assert servers_at(port) == [process]
            assert f"runs on port {port} already and is used as it is" in other_log.read_text()
            other = Server(other_url)
            assert other.complete(PROMPT, is_last_step=True).output == output and from_dram(other) > 0
        assert leftover_pool(shm_name(port)).exists()
    wait_for(lambda: not servers_at(port), "LMCache's server is gone")
    assert not leftover_pool(shm_name(port)).exists()
