"""Which tool a turn called, and how long tools take."""
