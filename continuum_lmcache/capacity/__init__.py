"""What a deployment can hold, computed before it runs."""
