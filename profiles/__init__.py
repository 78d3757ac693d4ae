"""Measured machines, and the code that measures them."""
