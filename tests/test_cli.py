"""The README's command line, and its errors for bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.utils.argparse_utils import FlexibleArgumentParser

from connectors.lmcache_mp import startup
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.vllm_plugin import register
from continuum_lmcache.vllm_plugin.hooks import engine_args
from continuum_lmcache.vllm_plugin.hooks.engine_args import SCHEDULERS, adopt
from experiments.server import reserved_port

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("CONTINUUM_", "LMCACHE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.chdir(ROOT)
    register()
    register()  # vLLM may load a plugin more than once


def parse(*args: str) -> AsyncEngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(args)))


def test_the_readmes_command_parses_and_picks_our_scheduler_and_connector(model: Path) -> None:
    command = re.search(
        r"vllm serve MODEL (--kv-transfer-config.*continuum)", (ROOT / "README.md").read_text()
    )
    assert command, "the README has lost its command"
    config = parse("--model", str(model), *command[1].split()).create_engine_config()
    assert config.scheduler_config.scheduler_cls == SCHEDULERS + "ContinuumScheduler"
    assert config.kv_transfer_config.kv_connector_module_path == "connectors.lmcache_mp"
    assert config.scheduler_config.policy == "fcfs", "vLLM's own policy underneath"


def test_help_offers_the_policy_and_describes_it(capsys: pytest.CaptureFixture[str]) -> None:
    """That a new process finds the entry point is in test_wheel, whose server is started as users do."""
    with pytest.raises(SystemExit):
        parse("--help=scheduling-policy")
    said = " ".join(capsys.readouterr().out.split())
    assert "{fcfs,priority,continuum}" in said and '"continuum" is fcfs by agents' in said


def test_a_vllm_without_a_part_that_is_replaced_does_not_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(OpenAIServingModels, "load_lora_adapter")
    with pytest.raises(ConfigError, match="vLLM .* no attribute 'load_lora_adapter'; continuum supports"):
        engine(model).create_engine_config()


def test_an_unknown_policy_is_still_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--scheduling-policy", "bogus")
    assert "invalid choice: 'bogus'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "neither JSON nor a file that can be read (No such file or directory; looked in "),
        ("{'kv_connector': 1}", "not valid JSON: Expecting property name"),
        ("", "not valid JSON: Expecting value: line 1 column 1"),
    ],
)
def test_a_wrong_config_file_gets_one_line_that_says_what_and_where(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lmcache.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        parse("--kv-transfer-config", str(path))
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in last and str(path) in last


def engine(model: Path, **values: object) -> EngineArgs:
    return EngineArgs(model=str(model), scheduling_policy="continuum", dtype="bfloat16", **values)  # type: ignore[arg-type]


def test_a_directory_for_recordings_that_cannot_be_written_is_refused_before_engines_start(
    model: Path, settings: Callable[..., None]
) -> None:
    settings(run_output_dir="/proc/recordings")
    with pytest.raises(ConfigError, match=r"/proc/recordings.*run_output_dir"):
        engine(model).create_engine_config()


def test_a_scheduler_given_by_hand_is_one_sentence_on_the_command_line(model: Path) -> None:
    args = engine(model, scheduler_cls="some.Scheduler")
    vars(args)["tool_call_parser"] = ""  # as `vllm serve` leaves it
    with pytest.raises(SystemExit, match="^vllm: error: --scheduling-policy continuum: --scheduler-cls"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"scheduler_cls": "some.Scheduler"}, "--scheduler-cls is given too"),
        ({"enable_prefix_caching": False}, "prefix caching is off"),
    ],
)
def test_a_conflict_is_refused_at_the_start(model: Path, values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--scheduling-policy continuum: {reason}"):
        engine(model, **values).create_engine_config()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: vars(c.model_config).update(is_encoder_decoder=True), "encoder-decoder"),
        (lambda c: vars(c.model_config).update(is_diffusion=True), "diffusion"),
        (
            lambda c: setattr(c.parallel_config, "distributed_executor_backend", "external_launcher"),
            "every rank",
        ),
        (
            lambda c: setattr(c.scheduler_config, "scheduler_cls", "a.DiffusionScheduler"),
            "its own scheduler",
        ),
    ],
)
def test_what_only_the_finished_config_knows_is_refused_too(model: Path, spoil, reason: str) -> None:  # type: ignore[no-untyped-def]
    config = EngineArgs(model=str(model), dtype="bfloat16").create_engine_config()
    spoil(config)
    with pytest.raises(ConfigError, match=reason):
        adopt(config)


def test_a_front_end_that_passes_no_names_on_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--grpc"])
    with pytest.raises(ConfigError, match="names and API keys .* drop --grpc"):
        engine(model).create_engine_config()


@pytest.mark.parametrize(
    ("is_async", "name"), [(True, "ContinuumAsyncScheduler"), (False, "ContinuumScheduler")]
)
def test_the_scheduler_class_matches_vllms_final_async_flag(model: Path, is_async: bool, name: str) -> None:
    config = EngineArgs(model=str(model), dtype="bfloat16").create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    adopt(config)
    assert config.scheduler_config.scheduler_cls == SCHEDULERS + name


def test_a_cpu_turns_async_off_and_the_class_follows(model: Path) -> None:
    config = engine(model, async_scheduling=True).create_engine_config()
    assert not config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == SCHEDULERS + "ContinuumScheduler"


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("MAX_TTLS", "unknown key CONTINUUM_MAX_TTLS .*did you mean CONTINUUM_MAX_TTL_S.*"),
        ("PROFILE", "continuum.profile 3: .*No such file or directory: '3'"),
    ],
)
def test_on_the_command_line_a_wrong_setting_ends_in_one_sentence_before_the_engine_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch, variable: str, sentence: str
) -> None:
    monkeypatch.setenv(f"CONTINUUM_{variable}", "3")
    with pytest.raises(SystemExit) as ended:
        parse("--model", str(model), "--scheduling-policy", "continuum").create_engine_config()
    assert re.fullmatch(f"vllm: error: {sentence}", str(ended.value.code))


def test_on_the_command_line_an_lmcache_server_must_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.lmcache_mp.autostart.START_S", 0.1)
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": reserved_port()}
    file = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    given = ("--scheduling-policy", "continuum", "--kv-transfer-config", json.dumps(file))
    with pytest.raises(SystemExit) as ended:
        parse("--model", str(model), *given).create_engine_config()
    assert "no LMCache server has answered at tcp://127.0.0.1:" in str(ended.value.code)


def test_a_server_with_vllms_own_policy_is_stock_where_this_package_is_installed(model: Path) -> None:
    """Same connector, no check, nothing wrapped, none of our connectors even imported."""
    command = [sys.executable, str(ROOT / "tests" / "stock_start.py"), str(model)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    kinds = ("LMCacheConnectorV1", "LMCacheMPConnector") * 2
    assert [start["connector"] for start in report["starts"]] == [
        [kind, None, {"lmcache.chunk_siz": 1}] for kind in kinds
    ]
    assert {start["load_failure_policy"] for start in report["starts"]} == {"fail"}, "vLLM's default"
    assert all(start["scheduler"].startswith("vllm.") for start in report["starts"])
    assert report["wrapped"] == [] and report["connectors"] == []


def transfer(connector: str, module: str | None = None) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector, kv_connector_module_path=module, kv_role="kv_both")


V1 = "vllm.distributed.kv_transfer.kv_connector.v1."


@pytest.mark.parametrize(
    ("policy", "connector", "module", "expected"),
    [
        ("continuum", "LMCacheConnectorV1", None, "connectors.lmcache_mp"),
        ("continuum", "LMCacheMPConnector", None, "connectors.lmcache_mp"),
        ("continuum", "LMCacheConnectorV1", V1 + "lmcache_connector", V1 + "lmcache_connector"),
        ("continuum", "LMCacheMPConnector", V1 + "lmcache_mp_connector", V1 + "lmcache_mp_connector"),
        ("fcfs", "ContinuumLMCacheMPConnector", "connectors.lmcache_mp", "connectors.lmcache_mp"),
    ],
)
def test_a_module_path_picks_the_connector_under_any_policy_and_ours_is_the_default_under_ours(
    model: Path, policy: str, connector: str, module: str | None, expected: str
) -> None:
    args = EngineArgs(
        model=str(model),
        scheduling_policy=policy,  # type: ignore[arg-type]
        dtype="bfloat16",
        kv_transfer_config=transfer(connector, module),
    )
    found = args.create_engine_config().kv_transfer_config
    built = KVConnectorFactory.get_connector_class(found)
    assert found.kv_connector_module_path == expected
    assert built.__name__.startswith("Continuum") == expected.startswith("connectors.")


@pytest.mark.parametrize(
    ("backend", "ours"),
    [
        ("native", ("ContinuumOffloadingConnector", "connectors.native.connector")),
        ("lmcache", ("ContinuumLMCacheMPConnector", "connectors.lmcache_mp")),
    ],
)
def test_vllms_option_for_offloading_gets_our_connector_over_its_backend(
    model: Path, backend: str, ours: tuple[str, str]
) -> None:
    asked = ("--kv-offloading-size", "3", "--kv-offloading-backend", backend)
    args = parse("--model", str(model), "--scheduling-policy", "continuum", *asked)
    config = args.create_engine_config()
    config.__post_init__()  # as vLLM does in each engine's process
    found = config.kv_transfer_config
    assert (found.kv_connector, found.kv_connector_module_path) == ours
    extra = found.kv_connector_extra_config
    if backend == "native":
        assert extra == {"cpu_bytes_to_use": 3 * 2**30, "offload_prompt_only": False}
    else:
        assert extra["lmcache.mp.autostart"] is True
        assert extra["lmcache.mp.autostart.server_args"].startswith("--l1-size-gb 3 ")


def test_a_connectors_file_is_taken_under_every_policy(model: Path) -> None:
    config = parse("--model", str(model), "--kv-transfer-config", "lmcache.json").create_engine_config()
    assert config.kv_transfer_config.kv_connector == "LMCacheMPConnector"
    assert config.kv_transfer_config.kv_connector_module_path is None


def test_a_file_for_lmcache_in_one_process_starts_lmcaches_server_and_one_line_says_so(
    model: Path, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "512")
    lines = logged(startup, "info")
    file = transfer("LMCacheConnectorV1")
    file.kv_connector_extra_config["lmcache.max_local_cpu_size"] = 2.0
    config = engine(model, kv_transfer_config=file).create_engine_config()
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert extra.keys() == {"lmcache.mp.autostart", "lmcache.mp.autostart.server_args"}
    assert "--l1-size-gb 2 --chunk-size 512 " in extra["lmcache.mp.autostart.server_args"]
    (line,) = lines
    assert line.endswith("; from LMCACHE_CHUNK_SIZE, max_local_cpu_size")


def test_lmcaches_own_connector_inside_multi_connector_is_named_and_ours_is_found_by_its_name(
    model: Path, logged: Any
) -> None:
    lines = logged(engine_args)
    file = transfer("MultiConnector")
    names = ("LMCacheMPConnector", "ContinuumLMCacheMPConnector")
    inner = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    file.kv_connector_extra_config["connectors"] = inner
    engine(model, kv_transfer_config=file).create_engine_config()
    assert [line for line in lines if "inside MultiConnector" in line] == [
        "LMCacheMPConnector inside MultiConnector is the stock one, without our checks; name "
        "ContinuumLMCacheMPConnector there"
    ]
    found = KVConnectorFactory.get_connector_class_by_name("ContinuumLMCacheMPConnector")
    assert found.__module__ == "connectors.lmcache_mp.connector"
