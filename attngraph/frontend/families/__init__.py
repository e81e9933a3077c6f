"""Models of transformers with caches or images, as modules whose tensors are explicit."""
