"""vLLM's own offloading to CPU memory."""
