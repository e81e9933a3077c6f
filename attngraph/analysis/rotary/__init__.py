"""Rotary embeddings, whatever their spelling."""
