"""Files of L2 that are not what was stored: damaged ones are computed again, and whole ones are used."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

from lmcache_mp_rig import MpEngine, MpRig, prompt
from lmcache_mp_server import CHUNK
from waiting import wait_for

from connectors.lmcache_mp import tier_mirror
from connectors.lmcache_mp.server import checksums, module
from connectors.lmcache_mp.server.checksums import MAGIC, TRAILER_BYTES
from connectors.lmcache_mp.wire import MODULE
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.tier_store import TierHit
from continuum_lmcache.types import Tier
from experiments.mp_server import MpProcess
from experiments.trust.damage import DAMAGE, files_of, flip

OFF = json.dumps({"module_path": MODULE, "config": {"checksums": False}})
CHUNK_BYTES = CHUNK * MpEngine.bytes_per_token
PROMPTS = [prompt(program, 3) for program in range(8)]
Make = Callable[..., MpRig]


def found_of(rig: MpEngine, token_ids: list[int]) -> int:
    """Runs a prompt, whose loaded KV must be right (rig.load); returns how many tokens were found."""
    found = rig.run(token_ids)
    return found.dram_tokens + found.ssd_tokens


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", ["fs_native", "fs"])
def test_a_damaged_chunk_is_a_miss_that_is_counted_named_and_stored_anew(
    mp_rig: Make, logged: Callable[..., list[str]], damage: Callable[..., None], kind: str
) -> None:
    rig, said, warned = mp_rig(kind=kind), logged(checksums), logged(tier_mirror)
    rig.run(PROMPTS[0])
    rig.run(PROMPTS[1])
    rig.settle()
    folder = rig.server.directory
    first = min(files_of(folder), key=lambda file: file.stat().st_mtime_ns)
    damage(first, random.Random(0))
    rig.server.clear_l1()
    hits = [found_of(rig, each) for each in PROMPTS[:2]]
    assert sum(hits) < 6 * CHUNK
    rig.follower.poll()
    assert rig.follower.faults["damaged_chunk"] >= 1 and rig.follower.faults["failed_store"] == 0
    assert any(first.name in line and "damaged" in line for line in said)
    assert [line for line in warned if "damaged chunk" in line]
    rig.settle()
    rig.server.clear_l1()
    assert [rig.run(each) for each in PROMPTS[:2]] == 2 * [TierHit(0, 3 * CHUNK)], "they were stored anew"


@pytest.mark.parametrize("kind", ["fs_native", "fs"])
def test_a_damaged_chunk_is_stored_anew_however_late_it_is_deleted(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rig = mp_rig(kind=kind)
    rig.run(PROMPTS[0])
    rig.settle()
    for file in files_of(rig.server.directory):
        flip(file, random.Random(0))
    rig.server.clear_l1()
    adapter = rig.server._adapter
    adapter = getattr(adapter, "inner_adapter", adapter)
    delete = adapter.delete

    def late(keys: Any) -> None:
        time.sleep(0.3)
        delete(keys)

    monkeypatch.setattr(adapter, "delete", late)
    assert found_of(rig, PROMPTS[0]) == 0
    rig.settle()
    monkeypatch.setattr(adapter, "delete", delete)
    rig.server.clear_l1()
    assert rig.run(PROMPTS[0]) == TierHit(0, 3 * CHUNK)


def test_random_damage_between_servers_gives_no_wrong_kv_and_costs_no_whole_chunk(
    tmp_path: Path,
) -> None:
    """Each round another server finds what the last one left; a kill leaves files without a trailer."""
    draw = random.Random(os.urandom(8).hex())
    folder, damaged, right = tmp_path / "l2", 0, dict[str, bytes]()  # the files' content as first stored
    for _ in range(12):
        rig = MpRig(folder, 24, 64)
        for each in draw.sample(PROMPTS, 5):
            found_of(rig, each)
        rig.settle()
        rig.server.clear_l1()
        right = {file.name: file.read_bytes() for file in files_of(folder)} | right
        again = draw.sample(PROMPTS, 5)
        for file in draw.sample(files_of(folder), 2) if draw.random() < 0.7 else ():
            if file.exists():  # else renamed over the other
                draw.choice(DAMAGE)(file, draw)
                damaged += 1
        whole = {file.name for file in files_of(folder) if file.read_bytes() == right[file.name]}
        for each in again:
            names = [name for name in right if _is_of(rig, each, name)]
            found = found_of(rig, each)
            if whole >= set(names):
                assert found == len(names) * CHUNK, "a whole chunk was refused"
        rig.settle()
        rig.close()
    assert damaged


def _is_of(rig: MpEngine, token_ids: list[int], name: str) -> bool:
    return any(chunk.hex() in name for chunk in rig.tiers._names(token_ids, "", ()))


def test_files_of_stock_lmcache_are_not_believed_and_an_eviction_frees_them_first(tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    rig = MpRig(folder, 24, 64, server_module=OFF)
    rig.run(PROMPTS[0])
    rig.settle()
    assert all(file.stat().st_size == CHUNK_BYTES for file in files_of(folder)), "as LMCache writes them"
    rig.server.clear_l1()
    assert rig.run(PROMPTS[0]) == TierHit(0, 3 * CHUNK), "with checksums off they are read"
    rig.settle()
    rig.close()
    rig = MpRig(folder, 24, 4)
    assert rig.locate(PROMPTS[0]) == TierHit(0, 0)
    old = set(files_of(folder))
    rig.run(PROMPTS[1])
    rig.settle()
    assert len(files_of(folder)) == 4 and len(old & set(files_of(folder))) == 1
    assert rig.run(PROMPTS[0]).ssd_tokens == 0
    rig.settle()
    rig.server.clear_l1()
    rig.run(PROMPTS[0])
    rig.settle()
    rig.close()


def test_an_unknown_key_of_the_modules_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean checksums"):
        module.build_server_modules(SimpleNamespace(config={"checksum": False}, server_context=None))


def test_a_disk_that_is_full_makes_the_tier_smaller_and_its_failed_stores_are_counted(
    mp_rig: Make, monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]
) -> None:
    rig, said = mp_rig(), logged(checksums)
    before = rig.tiers.capacity_tokens()
    rig.run(PROMPTS[0])
    rig.settle()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checksums, "append_once", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    rig.run(PROMPTS[1])
    rig.settle()
    assert rig.follower.faults["failed_store"] == 3 and any("No space left" in line for line in said)
    held = rig.tiers.capacity_tokens()
    assert held[Tier.DRAM] == before[Tier.DRAM]
    assert held[Tier.SSD] == 3 * CHUNK < before[Tier.SSD]
    assert len(files_of(rig.server.directory)) == 3, "what was written of a failed store is deleted"
    rig.server.clear_l1()
    assert rig.run(PROMPTS[0]) == TierHit(0, 3 * CHUNK)
    rig.settle()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[MpProcess]:
    made = MpProcess(0.05, tmp_path / "l2", tmp_path / "mp.log", ("--chunk-size", str(CHUNK)), disk_gb=1)
    made.start()
    yield made
    made.kill()
    made.memory.unlink(missing_ok=True)


@pytest.mark.real
def test_what_a_server_that_was_killed_while_it_wrote_has_left_is_right_or_not_used(
    process: MpProcess,
) -> None:
    many = [prompt(program, 12) for program in range(12)]
    engine = MpEngine(process)  # type: ignore[arg-type]
    for each in many:
        engine.run(each)
    process.kill()  # with writes in its queue
    engine.adapter._mq_timeout = 0.1  # its unregister request gets no answer
    engine.close()
    left = files_of(process.disk)
    stored = sum(file.read_bytes()[-TRAILER_BYTES:].startswith(MAGIC) for file in left)
    assert stored, "something was stored before the kill"
    process.start()
    engine = MpEngine(process)  # type: ignore[arg-type]
    found = [engine.run(each) for each in many]
    assert sum(each.ssd_tokens for each in found) >= stored * CHUNK / 2
    wait_for(lambda: engine.follower.poll() and len(files_of(process.disk)) == 144, every_s=0.1)
    engine.close()
