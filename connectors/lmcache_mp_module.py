"""The path for `--server-module`; the code is in connectors.lmcache_mp.server.module."""

from connectors.lmcache_mp.server.module import build_server_modules as build_server_modules
