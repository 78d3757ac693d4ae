"""The simulator with several engines: one arrival stream, a router, and replicas that are slow or die."""
