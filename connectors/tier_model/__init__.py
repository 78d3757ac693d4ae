"""DRAM and disk as tiers of a certain size and speed: names and times, no bytes."""
