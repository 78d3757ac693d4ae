"""What an engine reads from and writes to files."""
