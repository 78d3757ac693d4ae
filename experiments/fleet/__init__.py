"""The lab with N engines: one arrival stream, a router by name, and replicas that are slow or die."""
