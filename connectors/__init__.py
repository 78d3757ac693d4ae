"""KV connectors: the only files that import lmcache, and a fake that needs no LMCache."""
