"""`--scheduling-policy continuum` and `--kv-transfer-config FILE`, on the command line and in `LLM(...)`.

Seams, read in vLLM 0.30 to 0.33 and run on 0.32: EngineArgs.add_cli_args, .from_cli_args,
.create_engine_config (vLLM loads plugins before it calls any). vLLM's own policy stays "fcfs" underneath; the
scheduler class is set on the finished config, when asynchronous scheduling has been decided. From
`--kv-offloading-size` VllmConfig.__post_init__ makes a KV transfer config, and would again in each engine's
process: there CacheConfig.kv_offloading_size is None.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial, partialmethod
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.connector_names import (
    AUTOSTART,
    IN_PROCESS,
    OURS,
    OVER_LMCACHE,
    OVER_NATIVE,
    OWNER,
    SERVER_ARGS,
)
from continuum_lmcache.errors import ConfigError, ContinuumError, ProfileError
from continuum_lmcache.policy.named import policy_named
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.vllm_plugin.files import recording_path
from continuum_lmcache.vllm_plugin.hooks import (
    data_parallel,
    prometheus,
    request_fields,
    rust_frontend,
    weight_updates,
)

logger = init_logger("vllm.continuum_lmcache")
POLICY = "continuum"
HELP = (
    "\n\n- \"continuum\" is fcfs by agents' programs: a turn's KV stays on the GPU while its tool runs, if "
    "that pays (continuum-lmcache)."
)
SCHEDULERS = "continuum_lmcache.vllm_plugin.scheduler."
CHECKED_VERSIONS = ("0.30.", "0.31.", "0.32.", "0.33.")
OLDEST = (0, 30)
SUPPORTED = "continuum supports 0.30 to 0.33"
CLOSE_TIMEOUT_S = 5
TOOL_PARSER = ("tool_call_parser", "tool_parser_plugin")  # arguments of `vllm serve`


def install() -> None:
    """Wrap the three methods, once a process."""
    arguments: Any = EngineArgs
    if hasattr(arguments, "_continuum"):
        return
    arguments._continuum = True
    for name, module in (OVER_LMCACHE, OVER_NATIVE):  # MultiConnector finds classes by name alone
        KVConnectorFactory.register_connector(name, module, name)
    arguments.add_cli_args = staticmethod(partial(add_cli_args, arguments.add_cli_args))
    arguments.from_cli_args = classmethod(partial(from_cli_args, arguments.from_cli_args.__func__))
    arguments.create_engine_config = partialmethod(create_engine_config, arguments.create_engine_config)


def add_cli_args(stock: Callable[..., Any], parser: Any) -> Any:
    """Offers one more policy, and takes a file for the KV connector."""
    parser = stock(parser)
    for action in parser._actions:
        if action.dest == "scheduling_policy" and POLICY not in (action.choices or (POLICY,)):
            action.choices = [*action.choices, POLICY]
            action.help = f"{action.help or ''}{HELP}"
        if action.dest == "kv_transfer_config":
            action.type = text_or_file(action.type)
    return parser


def text_or_file(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of JSON text that takes the path of a JSON file as well."""

    def read(value: str) -> Any:
        if value.lstrip().startswith("{"):
            return parse(value)
        path = Path(value)
        try:
            text = path.read_text()
            json.loads(text)
        except OSError as error:
            raise argparse.ArgumentTypeError(
                f"{value!r} is neither JSON nor a file that can be read ({error.strerror}; "
                f"looked in {Path.cwd()})"
            ) from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{value}: not valid JSON: {error}") from error
        return parse(text)

    return read


def from_cli_args(stock: Callable[..., Any], cls: type[EngineArgs], args: argparse.Namespace) -> Any:
    """Keeps arguments of the API server: the engine reads tool calls too."""
    made = stock(cls, args)
    kept = (*TOOL_PARSER, *rust_frontend.ARGUMENTS)
    vars(made).update({name: getattr(args, name, None) or "" for name in kept})
    return made


def create_engine_config(self: EngineArgs, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the policy's name by this package's scheduler."""
    if self.scheduling_policy != POLICY:
        return stock(self, *args, **kwargs)
    self.scheduling_policy = "fcfs"
    is_command = TOOL_PARSER[0] in vars(self)
    try:
        refuse(self.scheduler_cls is not None, "--scheduler-cls is given too; drop one of the two")
        config = stock(self, *args, **kwargs)
        prepare_connector(config, is_command)
        settings = adopt(config)
        is_rust = rust_frontend.chosen(self, bool(kwargs.get("headless")))
        rust = rust_frontend.prepare(self, settings.metrics_port) if is_rust else None
    except ContinuumError as error:
        if not is_command:
            raise
        raise SystemExit(f"vllm: error: {error}") from None  # a sentence, without a traceback
    finally:
        self.scheduling_policy = POLICY
    # no field of vLLM's, so no hash of the compiled model has it; each engine's process gets it
    vars(config.scheduler_config).update({name: getattr(self, name, "") for name in TOOL_PARSER})
    vars(config.scheduler_config)[rust_frontend.TOLD] = rust
    return config


def adopt(config: VllmConfig) -> ContinuumConfig:
    """Put our scheduler into a finished config. Returns the settings. Raises ConfigError if that is
    impossible."""
    model, parallel = config.model_config, config.parallel_config
    refuse(config.scheduler_config.scheduler_cls is not None, "this model has its own scheduler")
    refuse(model.is_diffusion, "diffusion models are not scheduled by turns")
    refuse(model.is_encoder_decoder, "encoder-decoder models have no prefix to keep")
    refuse(not config.cache_config.enable_prefix_caching, "prefix caching is off, so nothing can be kept")
    refuse(
        parallel.distributed_executor_backend == "external_launcher",
        "external_launcher needs the same decisions on every rank, and a TTL depends on each one's clock",
    )
    refuse("--grpc" in sys.argv, "it reads programs' names and API keys in vLLM's HTTP server; drop --grpc")
    settings = load_settings(config)
    policy_named(settings.policy)  # here too, so that a mistake stops the start and not the engine
    if settings.profile:
        read_profile(Path(settings.profile))
    name = "ContinuumAsyncScheduler" if config.scheduler_config.async_scheduling else "ContinuumScheduler"
    config.scheduler_config.scheduler_cls = SCHEDULERS + name
    folder = settings.run_output_dir or os.environ.get("RUN_OUTPUT_DIR", "")
    if folder:
        recording_path(Path(folder))  # as above
    writes_files = settings.tool_durations_file or folder
    transfer = config.kv_transfer_config
    has_server = transfer is not None and bool(transfer.kv_connector_extra_config.get(AUTOSTART))
    if config.shutdown_timeout == 0 and (writes_files or has_server):
        # at 0 vLLM kills the engine before it can write, and LMCache's server before it frees its memory
        config.shutdown_timeout = CLOSE_TIMEOUT_S
    check_version(version("vllm"))
    try:
        request_fields.install()
        prometheus.install()
        data_parallel.install(SCHEDULERS)
        weight_updates.install_in_api_server()
        import_module(SCHEDULERS.rstrip("."))
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"--scheduling-policy {POLICY}: vLLM {version('vllm')}: {error}; {SUPPORTED}"
        ) from error
    prometheus.observe({"policy_info": {settings.policy: 1.0}}, engine=0)  # before the first request
    logger.info("scheduling policy %s (continuum.policy=%s), %s", POLICY, settings.policy, name)
    return settings


def check_version(found: str) -> None:
    """Refuse a vLLM on which our own tests fail (docs/versions.md); warn of one that was not checked."""
    is_old = tuple(map(int, found.split(".")[:2])) < OLDEST
    refuse(is_old, f"on vLLM {found} requests whose loads fail may wait for ever; {SUPPORTED}")
    if not found.startswith(CHECKED_VERSIONS):
        logger.warning("vLLM %s was not checked; %s", found, SUPPORTED)


def load_settings(config: VllmConfig) -> ContinuumConfig:
    """The settings in use, of the connector's config and the environment. Raises ConfigError."""
    transfer = config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    return ContinuumConfig.load(extra, os.environ)


def read_profile(path: Path) -> CostModel:
    """The costs in a profile. Raises ProfileError."""
    try:
        return CostModel.from_mapping(yaml.safe_load(path.read_text()), str(path))
    except (OSError, yaml.YAMLError) as error:
        raise ProfileError(f"continuum.profile {path}: {' '.join(str(error).split())}") from error


def prepare_connector(config: VllmConfig, waits: bool) -> None:
    """Replace LMCache's or vLLM's connector by our subclass, with its settings checked before engines start.

    To use the stock one under this policy, name its module: then its path is set already. `waits`: until
    LMCache's server is up, where no worker starts it.
    """
    transfer, cache = config.kv_transfer_config, config.cache_config
    if transfer is None or transfer.kv_connector is None:
        return
    stock, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    if stock in OURS and not transfer.kv_connector_module_path:
        transfer.kv_connector, transfer.kv_connector_module_path = OURS[stock]
        package = import_module(OURS[stock][1].partition(".")[0])
        refuse(
            getattr(package, "OWNER", "") != OWNER,
            f"another package named {package.__name__} hides ours: {[*package.__path__]}; remove it, or give "
            "this server an environment of its own",
        )
        size_gib, cache.kv_offloading_size = cache.kv_offloading_size, None
        if OURS[stock] is OVER_LMCACHE and (stock == IN_PROCESS or size_gib is not None):
            extra.setdefault(AUTOSTART, True)
        if OURS[stock] is OVER_LMCACHE and size_gib is not None:  # --kv-offloading-backend lmcache
            extra[SERVER_ARGS] = f"--l1-size-gb {size_gib:g} {extra.get(SERVER_ARGS, '')}"
    for each in extra.get("connectors", ()) if transfer.kv_connector == "MultiConnector" else ():
        if (inner := str(each.get("kv_connector"))) in OURS:
            text = "%s inside MultiConnector is the stock one, without our checks; name %s there"
            logger.warning(text, inner, OURS[inner][0])
    connector = KVConnectorFactory.get_connector_class(transfer)
    if (check := getattr(connector, "check_settings", None)) is not None:
        check(config)
    if waits and (find := getattr(connector, "find_server", None)) is not None:
        find(extra)


def refuse(conflict: bool, reason: str) -> None:
    if conflict:
        raise ConfigError(f"--scheduling-policy {POLICY}: {reason}")
