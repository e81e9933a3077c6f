"""Rotary embeddings, norms and activations."""
