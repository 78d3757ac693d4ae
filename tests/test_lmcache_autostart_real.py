"""The card's command, but for its ports: one `vllm serve` starts LMCache's server, and a second uses it."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache.integration.vllm.mp_server_launcher")

from serving import CHUNK_GIB, Server, ids, serve
from waiting import PATIENCE_S, wait_for

from connectors.lmcache_mp.server.command_line import leftover_pool, shm_name
from experiments.server import ROOT, ServerError, reserved_port

pytestmark = pytest.mark.real
PROMPT = 832  # tokens: 3 chunks and a half block


def lmcache_json(folder: Path, connector: str) -> tuple[Path, int]:
    """The repository's file at a port of its own; with `LMCacheConnectorV1` one that names no server."""
    config = json.loads((ROOT / "lmcache.json").read_text())
    port = reserved_port()
    extra = config["kv_connector_extra_config"] if connector == config["kv_connector"] else {}
    config |= {"kv_connector": connector, "kv_connector_extra_config": {**extra, "lmcache.mp.port": port}}
    path = folder / f"{connector}.json"
    path.write_text(json.dumps(config))
    return path, port


DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache


def arguments(path: Path, *more: str) -> list[str]:
    return [
        *("--kv-transfer-config", str(path), "--scheduling-policy", "continuum"),
        *("--max-model-len", "2048", "--num-gpu-blocks-override", "18", *more),
    ]


def servers_at(port: int) -> list[psutil.Process]:
    """LMCache's servers at this port; a process that is gone has no command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "lmcache.v1.multiprocess.http_server" in words and str(port) in words:
            found.append(process)
    return found


def came_from(server: Server, tier: str) -> float:
    return server.metric("continuum_prompt_tokens_total", tier=tier)


def evict(server: Server) -> None:
    """Drop what the GPU has, once nothing holds blocks, so that only LMCache has the KV."""
    wait_for(lambda: server.usage == 0, "no block is held", every_s=0.1)
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=PATIENCE_S).raise_for_status()


def reloads(server: Server, story: int, tier: str) -> None:
    """The same tokens, from a tier of LMCache's."""
    prompt = ids(PROMPT, story)
    first = server.complete(prompt, is_last_step=True)

    def is_loaded() -> bool:
        evict(server)
        before = came_from(server, tier)
        again = server.complete(prompt, is_last_step=True)
        assert again.output == first.output
        return came_from(server, tier) > before

    wait_for(is_loaded, f"a load from {tier}", every_s=0.5)


def test_one_command_starts_lmcaches_server_with_the_variables_sizes_and_a_second_engine_shares_it(
    model: Path, tmp_path: Path
) -> None:
    path, port = lmcache_json(tmp_path, "LMCacheMPConnector")
    old_file, _ = lmcache_json(tmp_path, "LMCacheConnectorV1")
    disk, yaml = tmp_path / "kv" / "deep", tmp_path / "lmcache.yaml"
    yaml.write_text("save_decode_cache: true\nlocal_device: cpu\n")
    env = {
        "LMCACHE_LOCAL_CPU": "true",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(60 * CHUNK_GIB),
        "LMCACHE_LOCAL_DISK": f"file://{disk}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "1",
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_CONFIG_FILE": str(yaml),
        "LMCACHE_BLEND_RECOMPUTE_RATIO": "0.15",  # of LMCache 0.3
    }
    log = tmp_path / "first.log"
    with serve(model, arguments(path), log=log, env=env | DEVELOPER) as url:
        first = Server(url)
        (process,) = servers_at(port)
        said = next(line for line in log.read_text().splitlines() if "LMCache's server on port" in line)
        assert said.count(f'"base_path": "{disk}/"') == 1 and "--chunk-size 256" in said
        assert "without effect: LMCACHE_BLEND_RECOMPUTE_RATIO, local_device" in said
        reloads(first, 1, "dram")
        wait_for(lambda: any(disk.iterdir()), "something is on the disk")

        other_log = tmp_path / "second.log"
        old = json.loads(old_file.read_text())
        old["kv_connector_extra_config"] = {"lmcache.mp.port": port, "lmcache.chunk_size": 256}
        old_file.write_text(json.dumps(old))
        with serve(model, arguments(old_file), log=other_log) as other_url:
            assert servers_at(port) == [process]
            assert f"runs on port {port} already and is used as it is" in other_log.read_text()
            prompt = ids(PROMPT, 1)
            other = Server(other_url)
            assert other.complete(prompt, is_last_step=True).output == first.complete(prompt).output
            assert came_from(other, "dram") > 0

        process.send_signal(signal.SIGKILL)
        before = first.complete(ids(PROMPT, 2), is_last_step=True)
        assert first.complete(ids(PROMPT, 2), is_last_step=True).output == before.output
        up = "continuum_tier_store_up"
        wait_for(lambda: first.complete([5, 6]) and not first.metric(up), "it is missed")
    assert servers_at(port) == []


def test_the_server_goes_when_vllm_stops_and_leaves_no_memory(model: Path, tmp_path: Path) -> None:
    path, port = lmcache_json(tmp_path, "LMCacheConnectorV1")
    with serve(model, arguments(path), log=tmp_path / "vllm.log", env=DEVELOPER) as url:
        assert servers_at(port) and leftover_pool(shm_name(port)).exists()
        reloads(Server(url), 3, "dram")
    wait_for(lambda: not servers_at(port), "LMCache's server is gone")
    assert not leftover_pool(shm_name(port)).exists()


def test_a_port_that_something_else_has_is_named(model: Path, tmp_path: Path) -> None:
    path, port = lmcache_json(tmp_path, "LMCacheMPConnector")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        log = tmp_path / "vllm.log"
        with pytest.raises(ServerError), serve(model, arguments(path), log=log):
            pass
    assert f"port {port} is taken by something" in log.read_text()
