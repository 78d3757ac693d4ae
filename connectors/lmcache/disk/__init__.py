"""LMCache's disk tier: reads and writes that neither deadlock nor return wrong data."""
