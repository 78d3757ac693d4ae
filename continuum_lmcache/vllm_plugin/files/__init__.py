"""The files that an engine reads and writes."""
