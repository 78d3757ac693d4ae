"""Every choice a user can make, in one frozen value.

Keys are `continuum.*` in the KV connector's extra config, beside LMCache's own `lmcache.*`; each
can be set by a `CONTINUUM_*` environment variable, which wins. Unknown names are refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from continuum_lmcache.errors import ConfigError

PREFIX = "continuum."
ENV_PREFIX = "CONTINUUM_"
METRICS_PORT_OFFSET = 10_000  # from the HTTP server's port to that of `metrics_port`
# Kubernetes puts these into every pod that has a Service whose name begins with "continuum"
KUBERNETES = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")


@dataclass(frozen=True, slots=True)
class ContinuumConfig:
    """Settings of the scheduler. Times in seconds, shares in [0, 1]."""

    policy: str = "continuum"  # or "continuum-published", "static-ttl", module:name of your own
    static_ttl_s: float = 2.0  # the TTL of policy "static-ttl"
    max_ttl_s: float = 300.0  # no pin lasts longer, with any policy
    max_pinned_share: float = 0.8  # share of the GPU's KV blocks that pins may hold
    max_tenant_share: float = 1.0  # share of max_pinned_share that one API key may hold; without keys: all
    first_token_limit_s: float = 30.0  # below this expected wait turns queue alike, without places; 0: never
    longest_wait_s: float = 600.0  # programs keep places until a turn would wait longer; slices may exceed it
    pin_reclaim_after_s: float = 120.0  # a turn refused blocks for this long may take other programs' pins
    program_idle_s: float = 3600.0  # a program without a turn for this long is forgotten
    admission: bool = True  # new programs wait while the started ones fill the KV cache
    honor_priority: bool = False  # a request's priority orders programs, lower first; false: ignored
    honor_program_age: bool = False  # trust program_turns of tenants' requests; a router must set them
    infer_programs: bool = True  # link a request without an id to the turn its prompt extends
    reading_calls: str = ""  # collective_rpc's methods that change no weights, with commas between
    profile: str = ""  # a measured profile (YAML); empty: cautious built-in costs
    tool_durations_file: str = ""  # file for learned tool durations, read at the next start; empty: none
    run_output_dir: str = ""  # directory of recordings; empty: RUN_OUTPUT_DIR, else none
    metrics_port: int = 0  # of our metrics behind a HTTP server in Rust; 0: 10,000 above its own (clients.md)
    record_ids: bool = False  # recordings have clients' ids of programs and turns, not hashes

    def __post_init__(self) -> None:
        require(0 <= self.metrics_port < 65_536, PREFIX + "metrics_port", self.metrics_port, "a port")
        for key in KEYS:
            name, value = PREFIX + key, getattr(self, key)
            require(not key.endswith("_s") or value >= 0, name, value, "a number of seconds >= 0")
            require(not key.endswith("_share") or 0 <= value <= 1, name, value, "a share in [0, 1]")

    @classmethod
    def load(cls, extra: Mapping[str, Any], environ: Mapping[str, str]) -> ContinuumConfig:
        """From a connector's extra config and the environment. Raises ConfigError."""
        given = {k.removeprefix(PREFIX): v for k, v in extra.items() if k.startswith(PREFIX)}
        refuse_unknown(given, KEYS, PREFIX, "kv_connector_extra_config")
        for name, value in environ.items():
            if name.startswith(ENV_PREFIX) and not KUBERNETES.search(name.removeprefix(ENV_PREFIX)):
                given[name.removeprefix(ENV_PREFIX).lower()] = value
        refuse_unknown(given, KEYS, ENV_PREFIX, "the environment", str.upper)
        return cls(**{k: parsed(PREFIX + k, v, KEYS[k]) for k, v in given.items()})


KEYS: dict[str, str] = {f.name: str(f.type) for f in fields(ContinuumConfig)}


def refuse_unknown(
    given: Iterable[str], known: Iterable[str], prefix: str, where: str, spell: Any = str
) -> None:
    """Raise ConfigError for the first name that is not known, with the nearest one that is."""
    known = sorted(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            known_names = "Known: " + ", ".join(map(spell, known))
            hint = f"did you mean {prefix}{spell(near[0])!s}?" if near else known_names
            raise ConfigError(f"unknown key {prefix}{spell(name)} in {where}; {hint}")


def parsed(name: str, value: Any, kind: str) -> Any:
    """A setting in its type, from JSON or text. `name`: with its prefix, for the error."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if kind == "bool":
        found = value if isinstance(value, bool) else words.get(str(value).lower())
        require(found is not None, name, value, "true or false")
        return found
    if kind == "str":
        require(isinstance(value, str), name, value, "text")
        return value
    require(not isinstance(value, bool), name, value, "a number")
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    require(math.isfinite(number), name, value, "a number")
    require(kind == "float" or number == int(number), name, value, "a whole number")
    return number if kind == "float" else int(number)


def require(holds: bool, name: str, value: Any, expected: str) -> None:
    """Raise ConfigError unless it holds."""
    if not holds:
        raise ConfigError(f"{name} is {value!r}; it must be {expected}")
