"""Where lost KV can be brought back from, what that costs, and when it is done."""
