"""Programs (agent runs): which one a request belongs to, and what is known of each."""
