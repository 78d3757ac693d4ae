"""Which new programs may start, and how much prefill a step takes."""
