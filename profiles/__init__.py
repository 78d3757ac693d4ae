"""Measured machines, and what measures them."""
