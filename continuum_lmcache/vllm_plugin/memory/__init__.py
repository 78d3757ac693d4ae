"""GPU blocks: which ones a pin holds, when pins are reclaimed, and where else KV is."""
