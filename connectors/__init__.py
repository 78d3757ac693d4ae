"""continuum-lmcache's KV connectors: the only files that import lmcache, and a fake that needs no LMCache.

The name is as the project's layout asks for it (docs/decisions.md). Another package of this name, earlier
on Python's path, would hide it: `OWNER` tells them apart, and the plugin asks before it names a module here.
"""

from continuum_lmcache.connector_names import OWNER as OWNER
