"""What was recorded, read back: recordings of runs and traces of programs. Reads files; has no clock."""
