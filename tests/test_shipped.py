"""What comes along beside the code: `continuum-lmcache init` and `measure`, and whose `connectors` it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from console import Command

from connectors.lmcache_mp.translation import EngineShape, parse_server_args, translated
from continuum_lmcache.connector_names import EXTRA
from continuum_lmcache.console import app
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.shipped import OPERATING
from continuum_lmcache.vllm_plugin.hooks import engine_args

SHAPE = EngineShape(ranks=1, block_tokens=16, kv_bytes_per_token=131_072, longest_prompt_tokens=4096)


def server_of(folder: Path, environ: dict[str, str]) -> tuple[float, list[tuple[str, float]]]:
    """What LMCache's server gets: GiB of DRAM, and each disk's folder and GiB."""
    config = json.loads((folder / "lmcache.json").read_text())
    args, _ = parse_server_args(translated(config[EXTRA], environ, SHAPE)[0])
    return args.l1_size_gb, [(each["base_path"], each["max_capacity_gb"]) for each in args.l2_adapter]


def test_init_writes_a_connector_with_the_sizes_that_it_says(command: Command, tmp_path: Path) -> None:
    ran = command("init", tmp_path / "new", "--dram-gib", 12, "--disk", "/nvme/kv", "--disk-gib", 300)
    assert ran.status == 0
    assert "12 GiB of DRAM, and 300 GiB in /nvme/kv" in ran.out
    assert f"--kv-transfer-config {tmp_path / 'new' / 'lmcache.json'}" in ran.out
    assert server_of(tmp_path / "new", {}) == (12.0, [("/nvme/kv", 300.0)])


def test_without_a_folder_init_leaves_the_disk_out_and_says_how_to_have_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert "--disk FOLDER adds a disk" in command("init", tmp_path).out
    assert server_of(tmp_path, {}) == (5.0, [])


def test_variables_override_what_init_wrote_as_they_override_the_shipped_file(
    command: Command, tmp_path: Path
) -> None:
    command("init", tmp_path, "--disk", "/nvme/kv")
    environ = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "7", "LMCACHE_LOCAL_DISK": "/other"}
    assert server_of(tmp_path, environ) == (7.0, [("/other", 20.0)])


def test_init_replaces_no_file_unless_it_is_told_to(command: Command, tmp_path: Path) -> None:
    (tmp_path / "docs" / "grafana").mkdir(parents=True)
    assert "docs/grafana is there already; --force" in command.refused(
        "init", tmp_path, "--disk", "", "--operating"
    )
    assert not (tmp_path / "lmcache.json").exists(), "nothing was written before the refusal"
    assert command("init", tmp_path, "--disk", "", "--operating", "--force").status == 0
    assert all((tmp_path / name).exists() for name in OPERATING)
    assert "continuum_" in (tmp_path / "docs" / "grafana" / "continuum.json").read_text()


def test_what_operating_needs_is_written_beside_a_file_with_sizes_of_ones_own(
    command: Command, tmp_path: Path
) -> None:
    command("init", tmp_path, "--disk", "", "--dram-gib", "7")
    said = command("init", tmp_path, "--disk", "", "--operating").out
    assert "kept" in said and all((tmp_path / name).exists() for name in OPERATING)
    assert server_of(tmp_path, {}) == (7.0, [])


def test_init_says_if_nobody_can_write_where_the_disk_is_to_be(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "NOTE" not in command("init", tmp_path, "--disk", tmp_path / "new" / "kv").out
    said = command("init", tmp_path, "--disk", tmp_path / "file" / "kv", "--force").out
    assert "cannot be written here" in said and "Not a directory" in said


def test_measure_passes_its_options_on_and_says_what_it_lacks(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("measure", "--model", tmp_path / "none", "--out", "x.yaml").status == 2
    monkeypatch.setattr(app, "find_spec", lambda name: None if name == "scipy" else name)
    assert "pip install 'continuum-lmcache[gpu,measure]'" in command.refused("measure", "--help")


def test_another_package_named_connectors_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    stranger = ModuleType("connectors")
    stranger.__path__ = ["/somewhere/connectors"]
    config = EngineArgs(model=str(model)).create_engine_config()
    config.kv_transfer_config = KVTransferConfig(kv_connector="LMCacheMPConnector", kv_role="kv_both")
    monkeypatch.setitem(sys.modules, "connectors", stranger)
    with pytest.raises(ConfigError, match="another package named connectors hides ours: .*somewhere"):
        engine_args.prepare_connector(config, waits=False)
