"""What is recorded and reported of a run."""
