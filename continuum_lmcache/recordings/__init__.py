"""Reads recordings of runs from files. Has no clock."""
