"""What the plugin is held against: vLLM's own tests, other versions, hostile clients, long runs."""
