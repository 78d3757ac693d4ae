"""How long steps take, and what for."""
