"""`serve run continuum_lmcache.serve.app:build model=NAME key=value ...`, or a Serve config file's
import_path.

settings.py has the keys. Ray Serve's own settings (autoscaling, resources, limits) are in its config file,
under the deployment's name `vllm`.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig

from continuum_lmcache.programs.identity import key_digest
from continuum_lmcache.serve.names import ENVIRONMENT
from continuum_lmcache.serve.replica import STATE, Replica
from continuum_lmcache.serve.settings import ServeSettings
from continuum_lmcache.serve.state import FleetState

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray listens on 127.0.0.1 alone
ONGOING = 4096  # requests of one replica: vLLM's queue orders them
CALLS = 1000  # that the state may execute at once: those of a new state wait for the replicas' reports


def build(args: dict[str, Any]) -> serve.Application:
    """The application. Raises ConfigError."""
    settings = ServeSettings.of(args)
    settings = replace(settings, key=settings.key or secrets.token_hex(32))
    if not ray.is_initialized():
        prepare()
    return deployment(settings).bind(settings)


def prepare() -> None:
    """Set the environment of a Ray that is started here: `serve run` starts one after this.

    A Ray that runs already has its own (docs/fleet.md). Ray 2.60 has read LOOPBACK when it was imported.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "RAY_ADDRESS" not in os.environ and os.environ.setdefault(LOOPBACK, "0") == "0":
        ray_constants.ENABLE_RAY_CLUSTER = False


def deployment(settings: ServeSettings, replica: type[Replica] = Replica) -> serve.Deployment:
    """The replicas, their router and their state."""
    return serve.deployment(
        replica,
        name="vllm",
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        max_ongoing_requests=ONGOING,
        max_queued_requests=ONGOING,
        request_router_config=RequestRouterConfig(
            request_router_class="continuum_lmcache.serve.router:ProgramRouter",
            request_router_kwargs={
                "key": settings.key,
                "api_keys": [key_digest(key).hex() for key in settings.api_keys],
            },
        ),
        deployment_actors=[
            DeploymentActorConfig(
                name=STATE,
                actor_class=ray.remote(FleetState),
                actor_options={"num_cpus": 0, "max_concurrency": CALLS},
            )
        ],
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=20,
    )
