"""continuum-lmcache's KV connectors: the only files that import lmcache, and a fake that needs no LMCache.

The name is as the project's layout asks for it. Users' --kv-transfer-config files and LMCache's
--server-module name modules here, so a moved folder would leave forwarding modules. A mapping in
pyproject.toml (package-dir) would tie every checkout to one absolute folder, and a link would let each module
be imported twice.

Another package of this name, earlier on Python's path, would hide it: `OWNER` tells them apart, and the
plugin asks before it names a module here.
"""

from continuum_lmcache.connector_names import OWNER as OWNER
