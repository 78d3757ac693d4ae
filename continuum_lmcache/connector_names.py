"""The names of vLLM's KV connectors, of ours in their place, and of their settings."""

from __future__ import annotations

IN_PROCESS = "LMCacheConnectorV1"  # LMCache in vLLM's own process; here its settings start LMCache's server
OVER_LMCACHE = "ContinuumLMCacheMPConnector", "connectors.lmcache_mp"
OVER_NATIVE = "ContinuumOffloadingConnector", "connectors.native.connector"
OURS = {  # connectors that our subclasses replace: name and module
    IN_PROCESS: OVER_LMCACHE,
    "LMCacheMPConnector": OVER_LMCACHE,
    "OffloadingConnector": OVER_NATIVE,
}
OWNER = "continuum-lmcache"  # of the package that they are in, whose name is a common one
EXTRA = "kv_connector_extra_config"
LMCACHE_PREFIX = "lmcache."
MP_PREFIX = LMCACHE_PREFIX + "mp."
AUTOSTART = MP_PREFIX + "autostart"
SERVER_ARGS = AUTOSTART + ".server_args"
