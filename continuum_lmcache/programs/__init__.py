"""Programs (agent runs): which one a request belongs to, and the state of each."""
