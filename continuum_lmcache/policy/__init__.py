"""The policies: what is decided, each decision a pure function that answers with its reason."""
