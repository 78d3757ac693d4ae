"""The path for `--server-module`; the code is in connectors.lmcache_mp.server.module."""

from connectors.lmcache_mp.server.module import MpTierModule, build_server_modules

__all__ = ["MpTierModule", "build_server_modules"]
