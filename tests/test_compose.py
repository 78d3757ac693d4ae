"""docs/compose and docs/kubernetes.yaml as far as a machine without Docker can tell: files and options."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import vllm
import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def mounted(service: str) -> dict[str, Path]:
    """Files of this repository by their path in the container."""
    pairs = (volume.split(":") for volume in SERVICES[service]["volumes"])
    return {inside: (FOLDER / here).resolve() for here, inside, *_ in pairs if here.startswith(".")}


def test_every_file_that_a_container_gets_is_here_and_parses() -> None:
    for service in SERVICES:
        for path in mounted(service).values():
            assert (
                json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
            )
    build = SERVICES["vllm"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    assert (FOLDER / build["context"] / "pyproject.toml").exists()


def test_what_one_file_names_another_one_has() -> None:
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert set(prometheus["rule_files"]) <= mounted("prometheus").keys()
    [job] = prometheus["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in SERVICES and SERVICES[host]["ports"] == [f"{port}:{port}"]
    [source] = yaml.safe_load((FOLDER / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in SERVICES
    [provider] = yaml.safe_load((FOLDER / "dashboards.yaml").read_text())["providers"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home) in mounted("grafana") and str(home.parent) == provider["options"]["path"]


def test_vllm_takes_the_command_in_the_versions_that_are_supported() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"vllm-openai:v{vllm.__version__.partition('+')[0]}" in dockerfile, "what the tests run on"
    command = SERVICES["vllm"]["command"].replace("${MODEL:?set MODEL to a model of Hugging Face}", "m")
    command = command.replace("${PARSER:-hermes}", "hermes").replace(
        "/etc/continuum/lmcache.json", str(mounted("vllm")["/etc/continuum/lmcache.json"])
    )
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(shlex.split(command)[1:])
    assert args.scheduling_policy == "continuum" and args.kv_transfer_config.kv_connector
    assert args.tool_call_parser in ToolParserManager.list_registered()


def test_the_pods_options_are_vllms_and_its_volumes_are_there() -> None:
    deployment, service = yaml.safe_load_all((FOLDER.parent / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    [container] = pod["spec"]["containers"]
    args = [arg.replace("/etc/continuum/", str(FOLDER.parents[1]) + "/") for arg in container["args"]]
    assert make_arg_parser(FlexibleArgumentParser()).parse_args(args).scheduling_policy == "continuum"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
