"""LMCache's settings: read as LMCache reads them, completed, and refused if they are known to fail."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("lmcache")

import torch
from hypothesis import example
from hypothesis import given as given_that
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from connectors.lmcache.known_issues import pool_chunks, with_defaults
from connectors.lmcache.settings import ENV_FAMILIES, NAMES, given, unread
from continuum_lmcache.capacity.kv_budget import GIB, WorkerSpec
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import kv_bytes_per_token

CPU = WorkerSpec(on_cpu=True, block_tokens=128, kv_bytes_per_token=8192, model="tiny")
GPU = WorkerSpec(on_cpu=False, block_tokens=16, kv_bytes_per_token=131072, model="tiny")


def refusal(extra=None, environ=None, machine=CPU) -> str:
    """The one line with which these settings are refused."""
    with pytest.raises(ConfigError) as refused:
        with_defaults(extra or {}, environ or {}, machine)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_an_unknown_key_is_refused_with_the_nearest_name():
    assert "did you mean lmcache.max_local_disk_size?" in refusal({"lmcache.max_local_disk_siz": 5})


def test_an_unknown_variable_is_refused_with_the_nearest_name():
    assert "did you mean LMCACHE_CHUNK_SIZE?" in refusal(environ={"LMCACHE_CHUNK_SIZ": "256"})


def test_an_unknown_name_in_the_config_file_is_refused(tmp_path):
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_siz: 256\n")
    message = refusal(environ={"LMCACHE_CONFIG_FILE": str(path)})
    assert "did you mean chunk_size?" in message and str(path) in message


def test_a_misspelt_prefix_is_refused():
    assert "lmcahe.chunk_size" in refusal({"lmcahe.chunk_size": 256})


def test_nested_keys_are_refused_because_lmcache_ignores_them():
    assert "flat keys" in refusal({"lmcache": {"local_cpu": True}})


def test_a_key_of_the_multi_process_connector_is_refused_by_its_owner():
    assert "LMCacheMPConnector" in refusal({"lmcache.mp.port": 5555})


@pytest.mark.parametrize(
    "name",
    [
        "LMCACHE_SERVER_SERVICE_HOST",
        "LMCACHE_PORT_8000_TCP_ADDR",
        "LMCACHE_LOG_LEVEL",
        "LMCACHE_MP_TRANSFER_MODE",
    ],
)
def test_variables_that_are_not_settings_are_left_alone(name):
    assert given({}, {name: "x"}) == {}
    assert unread({name: "x"}) == []


# of LMCache's older versions and of other people's deployments, in public recipes
RECIPES = (
    *("USE_EXPERIMENTAL", "RPC_PORT", "INSTANCE_ID", "WORKER_PORT", "DISTRIBUTED_URL", "CUFILE_BUFFER_SIZE"),
    *(
        "ENABLE_NIXL",
        "NIXL_RECEIVER_HOST",
        "NIXL_RECEIVER_PORT",
        "NIXL_ENABLE_GC",
        "LOCAL_DEVICE",
        "SHM_NAME",
    ),
    *("REMOTE_DEVICE", "PIPELINED_BACKEND", "ERROR_HANDLING", "HTTP_PORT", "PROMETHEUS_PORT", "URL", "HOME"),
    *("WEKA_PATH", "BACKEND", "CONTROLLER_PORT", "SERVER_LOG", "ENABLE_DEBUG", "VERSION", "IMAGE", "ROOT"),
)


@pytest.mark.parametrize("name", RECIPES)
def test_a_variable_of_old_recipes_or_of_a_deployment_gets_a_warning_and_no_refusal(name):
    variable = f"LMCACHE_{name}"
    with_defaults({}, {variable: "1"}, CPU)
    assert unread({variable: "1"}) == ([] if name == "CONTROLLER_PORT" else [variable])  # a family of names


def test_every_variable_that_the_installed_lmcache_reads_passes_without_a_word():
    """Found in its sources, so that another version of it shows here first."""
    import lmcache

    sources = Path(lmcache.__path__[0]).rglob("*.py")
    read = re.compile(r"""(?:environ(?:\.get\(|\[|\.setdefault\()|getenv\()\s*["'](LMCACHE_\w+)""")
    found = {name for path in sources for name in read.findall(path.read_text())}
    assert {"LMCACHE_CONFIG_FILE", "LMCACHE_TRACK_USAGE", "LMCACHE_FORCE_SKIP_SAVE"} <= found
    for name in found - {"LMCACHE_CONFIG_FILE"}:  # which must name a file
        assert unread({name: "x"}) == [], name
        assert given({}, {name: "1"}) in ({}, {name.removeprefix("LMCACHE_").lower(): "1"}), name


def test_a_slip_of_one_letter_in_any_variable_is_refused():
    for name in NAMES:
        slip = name[:-1]
        if slip not in NAMES and not slip.startswith(ENV_FAMILIES):  # theirs are not listed
            assert "did you mean LMCACHE_" in refusal(environ={f"LMCACHE_{slip.upper()}": "1"})


def test_a_kubernetes_port_variable_is_left_alone():
    assert given({}, {"LMCACHE_SERVER_PORT": "tcp://10.0.0.1:8000"}) == {}


def test_the_plugins_own_keys_are_left_alone():
    assert given({"continuum.policy": "fcfs"}, {}) == {}


@pytest.mark.parametrize(
    ("extra", "environ"),
    [
        ({"lmcache.chunk_size": "many"}, {}),
        ({}, {"LMCACHE_CHUNK_SIZE": "many"}),
        ({"lmcache.chunk_size": None}, {}),
    ],
)
def test_a_value_that_lmcache_would_turn_into_none_is_refused(extra, environ):
    assert "must be of type int" in refusal(extra, environ)


def test_a_bool_that_lmcache_would_turn_into_false_is_refused():
    assert "must be true or false" in refusal(environ={"LMCACHE_LOCAL_CPU": "yes"})


@pytest.mark.parametrize("content", [None, "", "nowhere.yaml"])
def test_a_config_file_that_is_not_there_is_refused(content, tmp_path):
    name = "" if content is None else str(tmp_path / content)
    assert "LMCACHE_CONFIG_FILE" in refusal(environ={"LMCACHE_CONFIG_FILE": name})


def test_a_config_file_that_is_not_a_mapping_is_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    assert "not a YAML mapping" in refusal(environ={"LMCACHE_CONFIG_FILE": str(tmp_path / "list.yaml")})
    assert "is not YAML" in refusal(environ={"LMCACHE_CONFIG_FILE": str(tmp_path / "broken.yaml")})


def test_the_extra_config_wins_over_variables_and_these_over_the_file(tmp_path):
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 128\nmax_local_cpu_size: 1\nsave_decode_cache: false\n")
    environ = {
        "LMCACHE_CONFIG_FILE": str(path),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
        "LMCACHE_CHUNK_SIZE": "256",
    }
    found = given({"lmcache.chunk_size": 512}, environ)
    assert found == {"chunk_size": 512, "max_local_cpu_size": 2.0, "save_decode_cache": False}


def test_hashes_agree_between_processes_by_default():
    extra, ours = with_defaults({}, {}, CPU)
    assert extra["lmcache.pre_caching_hash_algorithm"] == "sha256_cbor" == ours["pre_caching_hash_algorithm"]


@pytest.mark.parametrize("algorithm", ["builtin", "xxhash_cbor"])
def test_a_seeded_hash_without_a_seed_is_refused(algorithm):
    extra = {"lmcache.pre_caching_hash_algorithm": algorithm}
    assert "PYTHONHASHSEED=0" in refusal(extra)
    assert "PYTHONHASHSEED=0" in refusal(extra, {"PYTHONHASHSEED": "random"})
    assert "PYTHONHASHSEED=0" in refusal(environ={"LMCACHE_PRE_CACHING_HASH_ALGORITHM": algorithm})


def test_a_seeded_hash_with_a_seed_is_the_users_choice():
    extra, ours = with_defaults(
        {"lmcache.pre_caching_hash_algorithm": "builtin"}, {"PYTHONHASHSEED": "0"}, CPU
    )
    assert extra["lmcache.pre_caching_hash_algorithm"] == "builtin"
    assert "pre_caching_hash_algorithm" not in ours


def test_generated_tokens_are_saved_unless_the_user_says_no():
    assert with_defaults({}, {}, CPU)[0]["lmcache.save_decode_cache"] is True
    assert (
        "lmcache.save_decode_cache" not in with_defaults({}, {"LMCACHE_SAVE_DECODE_CACHE": "false"}, CPU)[0]
    )


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, "1e400", "nan", "[1]", '{"a": 1}', "1"])
    | st.text('a1/-.,"[{ ', max_size=5)
    | st.lists(st.integers() | st.none() | st.text("a1"), max_size=2)
)


@given_that(st.dictionaries(st.sampled_from(sorted(NAMES)).map("lmcache.{}".format), values, max_size=4))
@example({"lmcache.extra_config": "1", "lmcache.local_disk": "/d", "lmcache.max_local_disk_size": 1})
@example({"lmcache.storage_plugins": 1})
@example({"lmcache.max_local_cpu_size": 1e308})
@example({"lmcache.max_local_cpu_size": "nan"})
@example({"lmcache.chunk_size": 10**400})
def test_any_json_value_of_any_setting_is_taken_or_refused_in_one_line(extra):
    for machine in (CPU, GPU):
        try:
            with_defaults(extra, {}, machine)
        except ConfigError as error:
            assert str(error) and "\n" not in str(error)  # noqa: PT017 (either is right)


@given_that(st.floats(0.05, 64), st.sampled_from([128, 256, 512]))
def test_one_load_never_takes_more_than_the_dram_pool(dram_gib, chunk_tokens):
    extra = {"lmcache.max_local_cpu_size": dram_gib, "lmcache.chunk_size": chunk_tokens}
    load_tokens = with_defaults(extra, {}, CPU)[1]["max_tokens_per_load"]
    assert load_tokens % chunk_tokens == 0 and load_tokens > 0
    assert load_tokens * CPU.kv_bytes_per_token <= dram_gib * GIB


def test_a_pool_is_counted_in_aligned_chunks():
    odd = WorkerSpec(on_cpu=False, block_tokens=1, kv_bytes_per_token=4097, model="tiny")
    settings = {"chunk_size": 1, "max_local_cpu_size": 16384 / GIB}
    assert pool_chunks(settings, odd) == 2


def test_a_load_limit_below_one_chunk_is_refused():
    assert "at least one chunk, 256 tokens" in refusal({"lmcache.max_tokens_per_load": 100})


def test_the_disk_is_read_past_the_page_cache_by_default():
    disk = {"lmcache.local_disk": "file://./d/", "lmcache.max_local_disk_size": 1}
    assert with_defaults(disk, {}, CPU)[0]["lmcache.extra_config"] == {"use_odirect": True}
    kept = {**disk, "lmcache.extra_config": {"use_odirect": False, "disk_io_threads": 2}}
    assert with_defaults(kept, {}, CPU)[0]["lmcache.extra_config"] == {
        "use_odirect": False,
        "disk_io_threads": 2,
    }
    by_env = {"LMCACHE_EXTRA_CONFIG": '{"disk_io_threads": 2}'}
    assert with_defaults(disk, by_env, CPU)[0]["lmcache.extra_config"] == {
        "use_odirect": True,
        "disk_io_threads": 2,
    }


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"lmcache.use_gpu_connector_v3": True}, "dies at its first store"),
        ({"lmcache.enable_async_loading": True}, "frees it twice"),
        ({"lmcache.local_disk": "/d", "lmcache.max_local_disk_size": 0}, "nothing would be kept"),
        ({"lmcache.max_local_disk_size": 5}, "local_disk is not set"),
        ({"lmcache.local_disk": "s3://b", "lmcache.max_local_disk_size": 5}, "file:// URL"),
        ({"lmcache.max_local_cpu_size": 0}, "one chunk of 256 tokens takes 2.0 MiB"),
        ({"lmcache.max_local_cpu_size": 0.001}, "one chunk of 256 tokens takes 2.0 MiB"),
        ({"lmcache.chunk_size": 0}, "above 0"),
        ({"lmcache.cache_policy": "ARC"}, "LRU, LFU, FIFO, MRU"),
        ({"use_native": True}, "remove it"),
    ],
)
def test_settings_that_are_known_to_fail_are_refused_with_the_reason(extra, reason):
    assert reason in refusal(extra)


def test_a_model_path_too_long_for_a_file_name_is_refused_with_a_disk():
    deep = WorkerSpec(True, 128, 8192, "/models/" + "x" * 240)
    disk = {"lmcache.local_disk": "/d", "lmcache.max_local_disk_size": 1}
    assert "shorter path" in refusal(disk, machine=deep)
    with_defaults({}, {}, deep)


def test_on_a_cpu_a_chunk_must_be_whole_blocks():
    message = refusal({"lmcache.chunk_size": 192})
    assert "192" in message and "128" in message and "set chunk_size to 256" in message
    with_defaults({"lmcache.chunk_size": 192}, {}, GPU)


def test_on_a_cpu_parts_of_blocks_cannot_be_moved():
    assert "a CPU cannot" in refusal({"lmcache.save_unfull_chunk": True})
    with_defaults({"lmcache.save_unfull_chunk": True}, {}, GPU)


@pytest.mark.parametrize("name", ["lmcache.use_layerwise", "use_layerwise", "lmcache.enable_blending"])
def test_moves_by_layer_are_refused_on_a_gpu_too(name):
    """With the first key vLLM keeps its FULL graphs; LMCache does not know the second."""
    assert f"{name} moves KV layer by layer" in refusal({name: True}, machine=GPU)
    with_defaults({name: False}, {}, GPU)


def test_kv_bytes_are_those_that_vllm_keeps_for_each_layer():
    """DeepSeek V3.2: 656 bytes a token of `fp8_ds_mla`, not 576 values of a byte, and 132 of its indexer."""
    main = {"block_size": 64, "num_kv_heads": 1, "dtype": torch.uint8}
    mla = MLAAttentionSpec(**main, head_size=576, state_content_bytes=656, cache_dtype_str="fp8_ds_mla")
    indexer = MLAAttentionSpec(**main, head_size=132)
    one = KVCacheGroupSpec(["a", "b"], mla)
    assert kv_bytes_per_token(KVCacheConfig(9, [], [one])) == 2 * 656
    both = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"a": mla, "a.indexer": indexer})
    config = KVCacheConfig(9, [], [KVCacheGroupSpec(["a", "a.indexer"], both)])
    assert kv_bytes_per_token(config) == 656 + 132
    sizes = {"a": 64 * 656, "a.indexer": 64 * 132}
    pages = [KVCacheTensor(9 * n, [name], 9 * n, n) for name, n in sizes.items()]
    config = KVCacheConfig(9, pages, [KVCacheGroupSpec(["a", "a.indexer"], mla)])  # a scheduler's
    assert kv_bytes_per_token(config) == 656 + 132


@given_that(
    st.fixed_dictionaries(
        {},
        optional={
            "lmcache.chunk_size": st.sampled_from([128, 256, "512"]),
            "lmcache.save_decode_cache": st.booleans(),
            "lmcache.extra_config": st.just({"disk_io_threads": 2}),
            "lmcache.max_tokens_per_load": st.sampled_from([0, 4096]),
            "continuum.policy": st.just("fcfs"),
        },
    )
)
def test_settling_twice_changes_nothing_and_no_choice_of_the_users(extra):
    disk = {"lmcache.local_disk": "/d", "lmcache.max_local_disk_size": 1, **extra}
    once, _ = with_defaults(disk, {}, CPU)
    assert with_defaults(once, {}, CPU) == (once, {})
    for key, value in extra.items():
        assert once[key] == (value if key != "lmcache.extra_config" else {"use_odirect": True, **value})


@pytest.mark.parametrize("connector", ["lmcache", "lmcache_mp"])
@pytest.mark.parametrize(
    ("lora", "embeds", "reason"),
    [
        (object(), False, "does not tell LoRA adapters apart.*drop --enable-lora"),
        (None, True, "does not tell prompt embeddings apart.*drop --enable-prompt-embeds"),
    ],
)
def test_prompts_whose_kv_depends_on_more_than_tokens_are_refused(
    connector: str, lora: object, embeds: bool, reason: str
) -> None:
    from types import SimpleNamespace

    if connector == "lmcache_mp":  # LMCache 0.5.5 has none
        pytest.importorskip("lmcache.v1.multiprocess.protocols.server_module")
    module = importlib.import_module(f"connectors.{connector}")
    name = {"lmcache": "ContinuumLMCacheConnector", "lmcache_mp": "ContinuumLMCacheMPConnector"}[connector]
    config = SimpleNamespace(
        lora_config=lora, model_config=SimpleNamespace(enable_prompt_embeds=embeds, enable_sleep_mode=False)
    )
    with pytest.raises(ConfigError, match=reason):
        getattr(module, name).check_settings(config)


@pytest.mark.parametrize(
    ("scheduler", "runs_ahead", "newer_runner", "expected"),
    [
        (None, False, False, True),
        (None, True, False, False),
        (None, False, True, False),
        ("some.Scheduler", True, True, False),
        ("continuum_lmcache.vllm_plugin.scheduler.ContinuumAsyncScheduler", True, True, True),
    ],
)
def test_a_failed_load_is_computed_again_only_where_that_gives_the_right_tokens(
    scheduler, runs_ahead, newer_runner, expected
) -> None:
    from types import SimpleNamespace

    from connectors.lmcache.startup import recomputes_correctly

    steps = SimpleNamespace(scheduler_cls=scheduler, async_scheduling=runs_ahead)
    config = SimpleNamespace(scheduler_config=steps, use_v2_model_runner=newer_runner)
    assert recomputes_correctly(config) is expected
