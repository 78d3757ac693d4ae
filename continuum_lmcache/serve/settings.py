"""The arguments of `serve run continuum_lmcache.serve.app:build key=value ...`. Unknown keys are refused."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from continuum_lmcache.config import parsed, refuse_unknown
from continuum_lmcache.errors import ConfigError

LEAST = {"gpus": 0, "cpus": 0, "lmcache_gb": 0, "replicas": 1, "lmcache_port": 1}
KEY = re.compile(r"(([0-9a-fA-F]{2}){16,64})?")  # blake2 takes 64 bytes at most


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """One fleet of equal replicas."""

    model: str  # as after `vllm serve`
    replicas: int = 1
    vllm: str = "--scheduling-policy continuum"  # more of `vllm serve`'s options, as on its command line
    gpus: float = 1.0  # of a replica; 0: a CPU
    cpus: float = 1.0  # of a replica
    lmcache_gb: float = 0.0  # L1 of one LMCache server a node; 0: none is started
    lmcache_disk: str = ""  # the directory of its L2; empty: no L2
    lmcache_port: int = 5555  # on 127.0.0.1
    lmcache_http_port: int = 5556  # there too
    key: str = field(default="", repr=False)  # of programs' names, hexadecimal; "": each deploy makes its own

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be at least {least}")
        if not KEY.fullmatch(self.key):
            raise ConfigError("key must be 32 to 128 hexadecimal digits, an even number of them")

    @property
    def vllm_args(self) -> list[str]:
        """The arguments after `vllm serve`: with our LMCache server, its connector unless one is named."""
        words = [self.model, *shlex.split(self.vllm)]
        if self.lmcache_gb and not any(word.startswith("--kv-transfer-config") for word in words):
            words += ["--kv-transfer-config", CONNECTOR % self.lmcache_port]
        return words

    @property
    def api_keys(self) -> list[str]:
        """The keys that vLLM requires, by its options or else its environment variable; empty: none."""
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument("--api-key", "--api_key", nargs="*", default=[])
        given: list[str] = parser.parse_known_args(shlex.split(self.vllm))[0].api_key
        return [key for key in (given or [os.environ.get("VLLM_API_KEY", "")]) if key]

    @classmethod
    def of(cls, args: Mapping[str, object]) -> ServeSettings:
        """From text on a command line or values in YAML. Raises ConfigError with the problem."""
        types = {each.name: str(each.type) for each in dataclasses.fields(cls)}
        refuse_unknown(args, types, "", "the arguments")
        if not args.get("model"):
            raise ConfigError("model is missing; pass model=NAME_OR_PATH")
        return cls(**{name: parsed(name, value, types[name]) for name, value in args.items()})


CONNECTOR = (
    '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
    '{"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": %d}}'
)
