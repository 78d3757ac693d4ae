"""Checks of the plugin: vLLM's own tests, other versions, hostile clients, long runs."""
