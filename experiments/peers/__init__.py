"""Other projects' schedulers for programs, as contenders of the sweep: experiments/records/peers.md."""
