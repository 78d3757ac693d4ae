"""For how long a finished turn's KV stays on the GPU, and in which order turns wait."""
