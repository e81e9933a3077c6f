"""The sizes that a trace holds for: dims, their ranges, and conditions on them."""
