"""GPU blocks: which ones a pin holds, when pins yield, and where else the KV lies."""
