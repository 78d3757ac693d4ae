"""Reads recordings of runs and traces of programs from files. Has no clock."""
