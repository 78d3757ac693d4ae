"""The path that `--server-module` is given: connectors.lmcache_mp.server.module has the code."""

from connectors.lmcache_mp.server.module import MpTierModule, build_server_modules

__all__ = ["MpTierModule", "build_server_modules"]
