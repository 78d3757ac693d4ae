"""The modules that run inside the LMCache MP server."""
