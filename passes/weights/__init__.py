"""Linears and norms: their weights are merged, split, scaled and composed."""
