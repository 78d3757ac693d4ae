"""The modules that run inside the LMCache MP server, and what its start needs."""
