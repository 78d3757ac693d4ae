"""Settings are checked as they are read."""

from __future__ import annotations

import pytest

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import ConfigError


def test_keys_beside_lmcaches_own_are_read_and_the_environment_wins() -> None:
    extra = {"lmcache.chunk_size": 256, "continuum.max_ttl_s": 8, "continuum.policy": "static-ttl"}
    config = ContinuumConfig.load(extra, {"CONTINUUM_MAX_TTL_S": "4.5", "HOME": "/"})
    assert (config.max_ttl_s, config.policy) == (4.5, "static-ttl")


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"continuum.max_ttls_s .*did you mean continuum.max_ttl_s\?"):
        ContinuumConfig.load({"continuum.max_ttls_s": 8}, {})
    with pytest.raises(ConfigError, match=r"CONTINUUM_POLICI .*did you mean CONTINUUM_POLICY\?"):
        ContinuumConfig.load({}, {"CONTINUUM_POLICI": "fcfs"})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_ttl_s", "soon", "must be a number"),
        ("max_ttl_s", True, "must be a number"),
        ("max_ttl_s", -1, "seconds >= 0"),
        ("max_ttl_s", "nan", "must be a number"),
        ("max_ttl_s", None, "must be a number"),
        ("max_ttl_s", 10**400, "must be a number"),
        ("max_pinned_share", 1.5, r"share in \[0, 1\]"),
        ("infer_programs", "perhaps", "true or false"),
        ("policy", 3, "must be text"),
    ],
)
def test_a_bad_value_says_what_it_must_be(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"continuum.{name} is .*{expected}"):
        ContinuumConfig.load({f"continuum.{name}": value}, {})


@pytest.mark.parametrize("service", ["CONTINUUM", "CONTINUUM_ROUTER"])
def test_a_kubernetes_service_named_like_us_sets_nothing(service: str) -> None:
    ports = ("PORT", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    variables = {f"{service}_{name}": "tcp://10.0.0.1:8000" for name in (*ports, "SERVICE_HOST")}
    assert ContinuumConfig.load({}, variables) == ContinuumConfig()
