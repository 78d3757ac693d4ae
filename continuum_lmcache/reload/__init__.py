"""Where lost KV can be loaded from, what that costs, and when it is done."""
