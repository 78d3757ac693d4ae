"""Adapters that move KV: the only files that import lmcache, and a fake that needs nothing."""
