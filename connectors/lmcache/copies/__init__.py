"""Copies of KV between vLLM's blocks and LMCache's chunks, in-process."""
