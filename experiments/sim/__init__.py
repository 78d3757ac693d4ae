"""The simulator: vLLM's own scheduler, block pool and connector interface in virtual time."""
