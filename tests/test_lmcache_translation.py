"""LMCache's settings become options of the server that the engine starts; nothing is dropped silently."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache.integration.vllm.mp_server_launcher")

from hypothesis import given
from hypothesis import strategies as st

from connectors.lmcache_mp.autostart import all_gpus, one_start, variables
from connectors.lmcache_mp.server import machine
from connectors.lmcache_mp.settings import with_defaults
from connectors.lmcache_mp.translation import (
    AUTOSTART,
    NAMES,
    SERVER_ARGS,
    EngineShape,
    misspelt,
    parse_server_args,
    translated,
)
from continuum_lmcache.errors import ConfigError, ServerError

ONE = EngineShape(ranks=1, block_tokens=16, kv_bytes_per_token=2**17, longest_prompt_tokens=4096)  # 0.5 GiB
SHIPPED = json.loads((Path(__file__).parents[1] / "lmcache.json").read_text())
FILE = SHIPPED["kv_connector_extra_config"]
BARE = {AUTOSTART: True}


def server(extra: dict[str, Any], environ: dict[str, str] | None = None, shape: EngineShape = ONE) -> Any:
    """The options of the server that is started."""
    found, _ = translated(extra, environ or {}, shape)
    args, rest = parse_server_args(found)
    assert rest == []
    return args


def refusal(extra: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        translated(extra, environ or {}, ONE)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_shipped_file_starts_lmcaches_own_server_under_any_policy() -> None:
    assert SHIPPED["kv_connector"] == "LMCacheMPConnector" and FILE[AUTOSTART] is True
    args = server(FILE)
    assert (args.l1_size_gb, args.chunk_size, args.http_port) == (5, 256, 5556)
    assert args.l2_adapter == [json.loads(shlex.split(FILE[SERVER_ARGS])[-5])]
    assert len(args.server_module) == 1
    with_defaults(translated(FILE, {}, ONE)[0])


@pytest.mark.parametrize(
    ("variable", "value", "option", "expected"),
    [
        ("MAX_LOCAL_CPU_SIZE", "20", "l1_size_gb", 20),
        ("CHUNK_SIZE", "512", "chunk_size", 512),
        ("LOCAL_DISK", "file:///nvme/kv/", "l2_adapter", {"base_path": "/nvme/kv/", "max_capacity_gb": 20}),
        ("MAX_LOCAL_DISK_SIZE", "'400'", "l2_adapter", {"base_path": "lmcache-disk", "max_capacity_gb": 400}),
    ],
)
def test_a_variable_overrides_the_file(variable: str, value: str, option: str, expected: Any) -> None:
    found = getattr(server(FILE, {f"LMCACHE_{variable}": value}), option)
    assert found == expected or (found[0].items() >= expected.items() and len(found) == 1)


def test_a_file_that_names_lmcache_in_one_process_means_the_same_sizes() -> None:
    extra = {
        **BARE,
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": 8,
        "lmcache.local_disk": "/d",
        "lmcache.max_local_disk_size": 30.0,
        "lmcache.save_decode_cache": False,
        "lmcache.max_tokens_per_load": 1024,
        "continuum.policy": "fcfs",
    }
    found, line = translated(extra, {}, ONE)
    assert found.keys() == {*BARE, SERVER_ARGS, "lmcache.mp.save_decode_cache", "continuum.policy"}
    assert found["lmcache.mp.save_decode_cache"] is False
    args, _ = parse_server_args(found)
    assert args.l1_size_gb == 8 and args.l2_adapter[0]["max_capacity_gb"] == 30
    assert args.l2_adapter[0]["use_odirect"] and args.l2_adapter[0]["eviction"]
    assert line.endswith("without a counterpart, so without effect: max_tokens_per_load")


def test_the_sources_override_each_other_as_in_lmcache(tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 128\nmax_local_cpu_size: 1\nlocal_device: cpu\n")
    environ = {
        "LMCACHE_CONFIG_FILE": str(path),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
        "LMCACHE_CHUNK_SIZE": "256",
    }
    args = server({**BARE, "lmcache.chunk_size": 512}, environ)
    assert (args.chunk_size, args.l1_size_gb) == (512, 2)


def test_sizes_are_of_one_rank_and_the_server_holds_all() -> None:
    two = EngineShape(2, 16, 2**18, 4096)
    environ = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "10", "LMCACHE_MAX_LOCAL_DISK_SIZE": "50"}
    args = server(FILE, environ, two)
    assert args.l1_size_gb == 20 and args.l2_adapter[0]["max_capacity_gb"] == 100


@given(st.integers(1, 2**20), st.sampled_from([None, "4", "20", "300"]))
def test_l1_keeps_the_longest_prompt_free_for_loads_from_disk_where_half_of_it_suffices(
    prompt_tokens: int, gib: str | None
) -> None:
    shape = EngineShape(1, 16, 2**17, prompt_tokens)
    disk = {**BARE, "lmcache.local_disk": "/d", "lmcache.max_local_disk_size": 9}
    args = server(disk, {"LMCACHE_MAX_LOCAL_CPU_SIZE": gib} if gib else {}, shape)
    prompt_gib = prompt_tokens * 2**17 / 2**30
    watermark = args.eviction_trigger_watermark or 0.8
    assert args.l1_size_gb == float(gib or args.l1_size_gb)
    if prompt_gib <= 0.5 * args.l1_size_gb:
        assert args.l1_size_gb * (1 - watermark) >= prompt_gib
    else:
        assert gib and watermark == 0.5


def test_a_second_translation_changes_nothing() -> None:
    environ = {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "7",
        "LMCACHE_LOCAL_DISK": "/d",
        "LMCACHE_BLEND_RECOMPUTE_RATIO": "1",
    }
    once, _ = translated({**FILE, "lmcache.chunk_size": 512}, environ, ONE)
    assert translated(once, environ, ONE)[0] == once


def test_a_server_of_the_users_own_keeps_its_command_line_and_the_variables_are_named() -> None:
    extra = {"lmcache.mp.port": 5555}
    found, line = translated(extra, {"LMCACHE_CHUNK_SIZE": "512"}, ONE)
    assert found == extra and line == "no effect without lmcache.mp.autostart: LMCACHE_CHUNK_SIZE"
    with pytest.raises(ConfigError, match=r"lmcache\.chunk_size has no effect"):
        with_defaults({**extra, "lmcache.chunk_size": 512})


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"lmcache.chunk_siz": 256}, "did you mean lmcache.chunk_size?"),
        ({"lmcache": {"local_cpu": True}}, "flat keys"),
        ({"lmcache.chunk_size": 24}, "set it to 32"),
        ({"lmcache.chunk_size": 0}, "set it to 16"),
        ({"lmcache.chunk_size": "many"}, "lmcache.chunk_size is 'many'; it must be a number"),
        ({"lmcache.max_local_cpu_size": 0.001}, "one chunk of 256 tokens takes 32.0 MiB"),
        ({"lmcache.max_local_disk_size": 5}, "local_disk is not"),
        ({"lmcache.local_disk": "/d"}, "nothing would be kept there"),
        ({"lmcache.local_disk": "s3://b", "lmcache.max_local_disk_size": 5}, "one directory"),
        ({"lmcache.local_disk": "/a,/b", "lmcache.max_local_disk_size": 5}, "one directory"),
        ({"lmcache.remote_url": "redis://a:1"}, "LMCache's server has options of its own"),
        ({SERVER_ARGS: "--l1-size-gb many"}, "invalid float value: 'many'"),
        ({SERVER_ARGS: "--l2-adapter [1]"}, "is no JSON object"),
        ({SERVER_ARGS: "'"}, "must be a command line: No closing quotation"),
        ({SERVER_ARGS: 5}, "must be a command line"),
        ({AUTOSTART: "perhaps"}, "must be true or false"),
    ],
)
def test_settings_that_would_fail_are_refused_with_the_reason(extra: dict[str, Any], reason: str) -> None:
    assert reason in refusal({**BARE, **extra})


def test_an_empty_local_disk_means_no_disk() -> None:
    assert server(FILE, {"LMCACHE_LOCAL_DISK": ""}).l2_adapter == []


@pytest.mark.parametrize("name", ["nowhere.yaml", "list.yaml", "broken.yaml", ""])
def test_a_config_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    assert "LMCACHE_CONFIG_FILE" in refusal(
        BARE, {"LMCACHE_CONFIG_FILE": str(tmp_path / name) if name else ""}
    )


@pytest.mark.parametrize(
    ("name", "nearly"),
    [
        ("BLEND_RECOMPUTE_RATIOS", ""),
        ("CHUNK_SIZ", "did you mean LMCACHE_CHUNK_SIZE?"),
        ("MAX_LOCAL_CPU_SZE", "did you mean LMCACHE_MAX_LOCAL_CPU_SIZE?"),
    ],
)
def test_a_setting_without_a_counterpart_and_a_misspelt_one_are_named_and_do_not_end_the_start(
    name: str, nearly: str
) -> None:
    environ = {f"LMCACHE_{name}": "1"}
    line = translated(BARE, environ, ONE)[1]
    assert line.endswith(f"without effect: LMCACHE_{name}")
    assert [nearly in sentence for sentence in misspelt(environ)] == [True] * bool(nearly)


@pytest.mark.parametrize("name", ["SERVER_SERVICE_HOST", "PORT_8000_TCP_ADDR", "HOME", "RPC_PORT"])
def test_variables_that_are_no_settings_are_left_alone(name: str) -> None:
    """Kubernetes' own of a service named lmcache; a deployment's; those of LMCache's older versions."""
    assert "without effect" not in translated(BARE, {f"LMCACHE_{name}": "10.0.0.1"}, ONE)[1]


def test_every_variable_that_the_installed_lmcache_reads_passes_without_a_word() -> None:
    """Found in its sources, so that another version of it shows here first."""
    import lmcache

    sources = Path(lmcache.__path__[0]).rglob("*.py")
    read = re.compile(r"""(?:environ(?:\.get\(|\[|\.setdefault\()|getenv\()\s*["'](LMCACHE_\w+)""")
    found = {name for path in sources for name in read.findall(path.read_text())}
    assert {"LMCACHE_CONFIG_FILE", "LMCACHE_TRACK_USAGE", "LMCACHE_FORCE_SKIP_SAVE"} <= found
    for name in found - {"LMCACHE_CONFIG_FILE"}:  # which must name a file
        known = name.removeprefix("LMCACHE_").lower() in NAMES
        assert known or "without effect" not in translated(BARE, {name: "1"}, ONE)[1], name


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text('a1/-.,"[{ ', max_size=5)


@given(st.dictionaries(st.sampled_from(sorted(NAMES)).map("lmcache.{}".format), values, max_size=4))
def test_any_json_value_of_any_setting_is_taken_or_refused_in_one_line(extra: dict[str, Any]) -> None:
    try:
        translated({**BARE, **extra}, {}, ONE)
    except ConfigError as error:
        assert str(error) and "\n" not in str(error)  # noqa: PT017 (either is right)


def test_a_port_that_something_else_has_is_named_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for extra in ({"lmcache.mp.port": port}, {SERVER_ARGS: f"--http-port {port}"}):
            with pytest.raises(ConfigError, match=f"port {port}"), one_start({**BARE, **extra}, True):
                pass


def test_a_server_that_ends_while_it_starts_is_told_in_one_line(tmp_path: Path) -> None:
    extra, _ = translated(
        {**BARE, "lmcache.local_disk": str(tmp_path / "a" / "b"), "lmcache.max_local_disk_size": 1}, {}, ONE
    )
    with pytest.raises(ServerError, match="said why above: exit 1"), one_start(extra, True):
        assert (tmp_path / "a" / "b").is_dir()
        raise ConnectionError("exit 1")


def test_what_the_server_writes_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    """KV tells the prompt."""
    disk = tmp_path / "disk"
    extra, _ = translated(
        {**BARE, "lmcache.local_disk": str(disk), "lmcache.max_local_disk_size": 1}, {}, ONE
    )
    before = os.umask(0o022)
    try:
        with one_start(extra, True):
            subprocess.run(["touch", disk / "chunk"], check=True)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert not any(path.stat().st_mode & 0o077 for path in (disk, disk / "chunk"))


@pytest.mark.parametrize(
    ("mine", "shown"), [("2", "2,0,1,3"), ("1,0", "1,0,2,3"), ("GPU-5f", "GPU-5f"), ("", "")]
)
def test_the_server_sees_all_gpus_and_the_engines_own_first(
    mine: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mine)
    with variables(all_gpus(4)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mine
