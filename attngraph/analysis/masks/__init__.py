"""What a mask says: predicates over (b, h, q, k), their reading and their description."""
