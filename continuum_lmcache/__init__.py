"""Keep an agent's KV cache on the GPU while its tool runs, for as long as that pays."""

__version__ = "0.1.0"
