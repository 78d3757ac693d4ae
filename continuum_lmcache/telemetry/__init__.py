"""The records and reports of a run."""
