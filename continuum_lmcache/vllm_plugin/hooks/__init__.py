"""Everything of vLLM that is replaced or wrapped at run time."""
