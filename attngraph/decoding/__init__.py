"""Decoders: one graph for the prompt and the steps, its caches, tokens and lengths."""
