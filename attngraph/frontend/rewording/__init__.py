"""Code that torch.export can't trace as it is written, put so that it can be."""
