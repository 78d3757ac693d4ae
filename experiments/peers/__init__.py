"""Other projects' schedulers for programs, as contenders of the sweep: docs/peers.md."""
